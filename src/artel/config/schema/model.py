"""The section `model` of a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from artel.config.schema.base import Name, OneOrMore, Section, free
from artel.config.schema.quantities import Length, Number, Rank


class LoraConfig(Section):
    rank: Rank = Field(default=16, ge=1, description="Rank of the two matrices of an adapter.")
    alpha: Number = Field(
        default=32.0, gt=0, description="Scales the adapter's output: alpha / rank (alpha / sqrt(rank) with rslora)."
    )
    dropout: Number = Field(default=0.0, ge=0, lt=1, description="Dropout of the adapter's input.")
    target: Annotated[list[str], OneOrMore] = Field(
        default=["auto"],
        description="Names of the linear layers adapted (q_proj, v_proj); auto: all but the output head. Experts that "
        "one tensor holds are adapted where they are named: [auto, experts].",
    )
    rslora: bool = Field(default=False, description="Scale by the square root of the rank (Kalajdzievski 2023).")
    dora: bool = Field(default=False, description="Train magnitude and direction apart (Liu et al. 2024, DoRA).")
    base: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="What the frozen matrices beneath the adapters are held in: auto is what the model is saved in, "
        "where layers compute in 16 bits (the same results in half the memory), else fp32; bf16 rounds a model that is "
        "saved in fp32.",
    )
    save: list[str] = Field(
        default=[], description="Modules trained in full and kept with the adapter (embed_tokens, lm_head)."
    )

    @field_validator("target")
    @classmethod
    def _some(cls, target: list[str]) -> list[str]:
        if not target:
            raise ValueError("no layer is adapted; write auto, or names of linear layers: [q_proj, v_proj]")
        return target


_BY_LENGTH = ("dynamic", "longrope")


class RopeConfig(Section):
    type: Literal["yarn", "linear", "llama3", "default"] = Field(
        description="How positions are stretched, as transformers' rope_parameters name it; default: by theta alone."
    )
    factor: Number = Field(gt=1, description="How many times the positions that the model was trained on.")
    theta: Number | None = Field(default=None, gt=1, description="Another base of the angles than the model's.")

    @field_validator("type", mode="before")
    @classmethod
    def _not_by_length(cls, name: object) -> object:
        if name in _BY_LENGTH:
            raise ValueError(
                f"{name} goes by the longest row of a batch, so what is learned would depend on how a batch is cut; "
                "write yarn, llama3 or linear"
            )
        return name

    @model_validator(mode="after")
    def _has_theta(self) -> RopeConfig:
        if self.type == "default" and self.theta is None:
            raise ValueError("default stretches positions by theta alone; write theta: 1e6, or type: yarn")
        return self


class AttentionConfig(Section):
    window: Length = Field(ge=1, description="Tokens that a token sees, itself included; in layers that have a window.")


class ModelConfig(Section):
    config: dict[str, Any] | None = Field(
        default=None, description="From scratch: model_type and any key of its transformers configuration."
    )
    from_: Name | None = Field(default=None, alias="from", description="Pretrained: a folder or a hub id.")
    auto: bool = Field(
        default=False,
        description="From scratch, of a size that train.budget, the text and this machine make best; batch, learning "
        "rate and what else the run file does not say are chosen with it.",
    )
    trust_remote_code: str | None = free(
        None,
        "The repository whose own code may be run: its name, as in `from`. It can do all that you can: read it first.",
    )
    lora: LoraConfig | None = Field(
        default=None, description="Train low-rank adapters over the pretrained weights (peft)."
    )
    quantize: Literal["none", "int8", "nf4"] = Field(
        default="none",
        description="Hold the pretrained weights in 8 or 4 bits under the adapters (QLoRA; extra `quantize`).",
    )
    rope: RopeConfig | None = Field(
        default=None, description="Extend the context of the pretrained model, whose positions are rotary."
    )
    attention: AttentionConfig | None = Field(
        default=None, description="Give the pretrained model's attention a window, where its architecture has one."
    )
    freeze: list[str] = Field(
        default=[], description="Parameters that stay as they are, by name or pattern: ['*embed*', 'model.layers.0.*']."
    )

    @model_validator(mode="after")
    def _one(self) -> ModelConfig:
        others = {"config": self.config, "from": self.from_, "lora": self.lora, "freeze": self.freeze}
        beside = [name for name, value in others.items() if value]
        if self.auto and beside:
            raise ValueError(f"auto is a new model of artel's choice, which {' and '.join(beside)} does not go with")
        if self.lora is not None and self.from_ is None:
            raise ValueError("lora changes a pretrained model and there is none; write from: FOLDER")
        for name, value in {"rope": self.rope, "attention": self.attention}.items():
            if value is not None and self.from_ is None:
                raise ValueError(f"{name} changes a pretrained model; write from: FOLDER, or its key in config")
        if self.quantize != "none" and self.lora is None:
            raise ValueError(f"weights in {self.quantize} are not trained themselves; write lora: {{rank: 16}} with it")
        if self.quantize != "none" and self.lora is not None and self.lora.base != "auto":
            raise ValueError(
                f"lora.base: {self.lora.base} beside quantize: {self.quantize}, which says what the base is held in; "
                "keep one"
            )
        if self.lora is not None and self.freeze:
            raise ValueError("under lora all pretrained weights stay as they are; leave freeze out, or lora")
        if self.config is not None and self.from_ is not None:
            raise ValueError("both config and from are given; keep one")
        if self.trust_remote_code is not None and self.trust_remote_code != self.from_:
            raise ValueError(
                f"trust_remote_code names {self.trust_remote_code}, and the model is from {self.from_}; write the name "
                "that stands in from, or remove it"
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config has no model_type; write model_type: gpt2 (or llama, qwen3 …)")
        return self

    @property
    def runs_code(self) -> bool:
        """True if code that comes with the pretrained model may be run."""
        return self.trust_remote_code is not None
