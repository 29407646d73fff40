"""The section `model` of a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from artel.config.schema.base import Name, OneOrMore, Section, runtime_only
from artel.config.schema.quantities import Length, Number, Rank


class LoraConfig(Section):
    rank: Rank = Field(default=16, ge=1, description="Rank of the two matrices of an adapter.")
    alpha: Number = Field(
        default=32.0, gt=0, description="Scale of the adapter's output: alpha / rank (alpha / sqrt(rank) with rslora)."
    )
    dropout: Number = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target: Annotated[list[str], OneOrMore] = Field(
        default=["auto"],
        description="Names of linear layers to adapt, e.g. q_proj, v_proj; auto: all except the output head. Experts "
        "stored in one tensor must be named: [auto, experts].",
    )
    rslora: bool = Field(default=False, description="Scale by the square root of the rank (Kalajdzievski 2023).")
    dora: bool = Field(default=False, description="Train magnitude and direction separately (DoRA, Liu et al. 2024).")
    base: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="Dtype of the frozen base weights. auto: the saved dtype if layers compute in 16 bits (the same "
        "results in half the memory), otherwise fp32; bf16 rounds a model saved in fp32.",
    )
    save: list[str] = Field(
        default=[], description="Modules to train in full and save with the adapter, e.g. embed_tokens, lm_head."
    )

    @field_validator("target")
    @classmethod
    def _check_target(cls, target: list[str]) -> list[str]:
        if not target:
            raise ValueError("the list is empty; write auto, or names of linear layers: [q_proj, v_proj]")
        return target


_LENGTH_DEPENDENT_TYPES = ("dynamic", "longrope")


class RopeConfig(Section):
    type: Literal["yarn", "linear", "llama3", "default"] = Field(
        description="Method of scaling positions, as in transformers' rope_parameters; default: only a new theta."
    )
    factor: Number = Field(gt=1, description="New context length as a multiple of the model's.")
    theta: Number | None = Field(default=None, gt=1, description="Base of the rotary angles (null: the model's).")

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, name: object) -> object:
        if name in _LENGTH_DEPENDENT_TYPES:
            raise ValueError(
                f"{name} depends on the longest row of a batch, so the result would depend on how a batch is split; "
                "write yarn, llama3 or linear"
            )
        return name

    @model_validator(mode="after")
    def _check_theta(self) -> RopeConfig:
        if self.type == "default" and self.theta is None:
            raise ValueError("default only changes theta; write e.g. theta: 1e6, or type: yarn")
        return self


class AttentionConfig(Section):
    window: Length = Field(ge=1, description="Tokens that a token sees, including itself, in layers with a window.")


class ModelConfig(Section):
    config: dict[str, Any] | None = Field(
        default=None, description="New model: model_type and any key of its transformers configuration."
    )
    from_: Name | None = Field(default=None, alias="from", description="Pretrained model: a folder or a hub id.")
    auto: bool = Field(
        default=False,
        description="New model of the best size for train.budget, the text and this machine; the batch size, the "
        "learning rate and other keys that are not set are chosen with it.",
    )
    trust_remote_code: str | None = runtime_only(
        None,
        "Repository whose code may run: its name, as in `from`. The code has all of your permissions: read it first.",
    )
    lora: LoraConfig | None = Field(
        default=None, description="Train low-rank adapters on the pretrained weights (peft)."
    )
    quantize: Literal["none", "int8", "nf4"] = Field(
        default="none",
        description="Quantize the pretrained weights below the adapters to 8 or 4 bits (QLoRA; extra `quantize`).",
    )
    rope: RopeConfig | None = Field(
        default=None, description="Extend the context of a pretrained model with rotary positions."
    )
    attention: AttentionConfig | None = Field(
        default=None, description="Set the attention window of a pretrained model whose architecture has one."
    )
    freeze: list[str] = Field(
        default=[], description="Parameters to freeze, by name or pattern, e.g. ['*embed*', 'model.layers.0.*']."
    )

    @model_validator(mode="after")
    def _check_combination(self) -> ModelConfig:
        others = {"config": self.config, "from": self.from_, "lora": self.lora, "freeze": self.freeze}
        set_keys = [name for name, value in others.items() if value]
        if self.auto and set_keys:
            raise ValueError(f"auto chooses a new model, so it cannot be combined with {' and '.join(set_keys)}")
        if self.lora is not None and self.from_ is None:
            raise ValueError("lora adapts a pretrained model, but `from` is not set; write from: FOLDER")
        for name, value in {"rope": self.rope, "attention": self.attention}.items():
            if value is not None and self.from_ is None:
                raise ValueError(f"{name} changes a pretrained model; write from: FOLDER, or its key in config")
        if self.quantize != "none" and self.lora is None:
            raise ValueError(f"weights in {self.quantize} cannot be trained directly; add lora: {{rank: 16}}")
        if self.quantize != "none" and self.lora is not None and self.lora.base != "auto":
            raise ValueError(
                f"lora.base: {self.lora.base} and quantize: {self.quantize} both set the dtype of the base; remove one "
                "of them"
            )
        if self.lora is not None and self.freeze:
            raise ValueError("lora freezes all pretrained weights already; remove freeze, or lora")
        if self.config is not None and self.from_ is not None:
            raise ValueError("config and from cannot be combined; keep one")
        if self.trust_remote_code is not None and self.trust_remote_code != self.from_:
            raise ValueError(
                f"trust_remote_code is {self.trust_remote_code}, but from is {self.from_}; write the name in from, or "
                "remove it"
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config has no model_type; write model_type: gpt2 (or llama, qwen3 …)")
        return self

    @property
    def runs_code(self) -> bool:
        """True if the pretrained model's own code may run."""
        return self.trust_remote_code is not None
