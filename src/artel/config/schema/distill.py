"""The section of a run file for distillation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from artel.config.schema.base import Name, Section
from artel.config.schema.quantities import Count, Length, Number


class HiddenStatesConfig(Section):
    loss: Literal["mse", "cosine"] = Field(
        default="mse", description="Loss on hidden states. mse: mean squared difference; cosine: 1 - cosine."
    )
    layers: Literal["last", "even"] = Field(
        default="last",
        description="Layers to match: the last of both models, or each layer of the student with the teacher's layer "
        "at the same relative depth.",
    )
    weight: Number = Field(default=1.0, gt=0, description="Weight of this loss.")


class DistillConfig(Section):
    teacher: Name | None = Field(default=None, description="Teacher: a run folder, a model folder or a hub id.")
    tokenizer: Literal["same", "by_text"] = Field(
        default="same",
        description="Tokenizer of the teacher. same: it must be the student's. by_text: the teacher reads the text "
        "with its own tokenizer and teaches the targets that are also its tokens; ids are mapped by their text.",
    )
    on: Literal["auto", "causal", "chat", "masked"] = Field(
        default="auto",
        description="Targets to distill, as in the objective of that name: causal (auto: for texts), chat (auto: for "
        "conversations) or masked (requires top_k: null).",
    )
    loss: Literal["forward_kl", "reverse_kl", "js"] = Field(
        default="forward_kl",
        description="Divergence: KL(teacher || student), KL(student || teacher) or generalized Jensen-Shannon.",
    )
    beta: Number = Field(default=0.5, gt=0, lt=1, description="js: weight of the teacher in the mixture.")
    temperature: Number = Field(
        default=1.0, gt=0, description="T: divides the logits of both models, and T² multiplies the divergence."
    )
    alpha: Number = Field(
        default=0.5, ge=0, lt=1, description="Weight of the cross-entropy; the divergence has weight 1 - alpha."
    )
    top_k: Count | None = Field(
        default=64,
        ge=1,
        description="Number of the teacher's most likely ids per target to cache before training, with the total "
        "probability of the other ids. null: all ids, with the teacher in memory during training.",
    )
    on_policy: Number = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Fraction of the samples whose last answer the student writes anew in each step; it learns the "
        "teacher's distributions on that answer (GKD). Requires conversations and top_k: null.",
    )
    new_tokens: Length = Field(
        default=256, description="on_policy: maximum length of an answer in tokens, within data.block."
    )
    hidden: HiddenStatesConfig | None = Field(
        default=None, description="Also match hidden states. Requires equal hidden sizes and top_k: null."
    )
