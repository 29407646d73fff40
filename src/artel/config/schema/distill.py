"""The section of a run file for distillation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from artel.config.schema.base import Name, Section
from artel.config.schema.quantities import Count, Number


class HiddenStatesConfig(Section):
    loss: Literal["mse", "cosine"] = Field(
        default="mse", description="mse: mean squared difference of the numbers; cosine: 1 - cosine of the vectors."
    )
    layers: Literal["last", "even"] = Field(
        default="last",
        description="The last layers of both; or each of the student's with the teacher's that is as far along.",
    )
    weight: Number = Field(default=1.0, gt=0, description="What this loss is multiplied by.")


class DistillConfig(Section):
    teacher: Name | None = Field(default=None, description="The teacher: the folder of a run or a model, or a hub id.")
    tokenizer: Literal["same", "by_text"] = Field(
        default="same",
        description="same: a teacher whose tokenizer is not the student's is refused. by_text: it reads the same text "
        "by its own tokenizer, and teaches the targets that are its tokens, too; ids are mapped by their text.",
    )
    on: Literal["auto", "causal", "chat", "masked"] = Field(
        default="auto",
        description="What it teaches, as the objective of that name learns it: causal (auto: of texts), chat (auto: of "
        "conversations), masked (with top_k null).",
    )
    loss: Literal["forward_kl", "reverse_kl", "js"] = Field(
        default="forward_kl",
        description="KL(teacher || student), KL(student || teacher), or the generalized Jensen-Shannon divergence.",
    )
    beta: Number = Field(default=0.5, gt=0, lt=1, description="js: the teacher's share of the mixture.")
    temperature: Number = Field(
        default=1.0, gt=0, description="T: logits of both are divided by it, and the divergence is multiplied by T²."
    )
    alpha: Number = Field(
        default=0.5, ge=0, lt=1, description="Weight of the plain cross-entropy; the divergence has 1 - alpha."
    )
    top_k: Count | None = Field(
        default=64,
        ge=1,
        description="The teacher's likeliest ids of each target, kept beside the store before training, with the "
        "probability of all others; null: all ids, with the teacher in memory beside the student.",
    )
    hidden: HiddenStatesConfig | None = Field(
        default=None, description="Match hidden states too, of a teacher as wide as the student; with top_k null."
    )
