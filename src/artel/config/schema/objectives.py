"""Sections of single objectives."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from artel.config.schema.base import Name, Section
from artel.config.schema.quantities import Count, Length, Number


class MaskedConfig(Section):
    rate: Number = Field(default=0.15, gt=0, lt=1, description="Fraction of tokens to predict.")
    mask: Number = Field(default=0.8, ge=0, le=1, description="Fraction of predicted tokens replaced by the mask.")
    random: Number = Field(
        default=0.1, ge=0, le=1, description="Fraction of predicted tokens replaced by a random one."
    )
    whole_words: bool = Field(default=False, description="Mask whole words instead of single tokens.")

    @model_validator(mode="after")
    def _check_fractions(self) -> MaskedConfig:
        if self.mask + self.random > 1:
            raise ValueError(
                f"the sum of mask {self.mask:g} and random {self.random:g} is over 1; write e.g. 0.8 and 0.1"
            )
        return self


class HeadWeights(Section):
    start: Number = Field(default=1.0, ge=0, description="Weight of the cross-entropy of the answer's first token.")
    end: Number = Field(default=1.0, ge=0, description="Weight of the cross-entropy of the answer's last token.")
    start_position: Number = Field(
        default=1.0, ge=0, description="five: weight of the squared error of the start (0 to 1 within the window)."
    )
    end_position: Number = Field(default=1.0, ge=0, description="five: weight of the squared error of the end.")
    answer_class: Number = Field(
        default=1.0, ge=0, description="five: weight of the answer class's loss (yes, no, short, long, unknown)."
    )


class SpanQAConfig(Section):
    question: Length = Field(
        default=64, ge=1, description="Maximum length of a question in tokens; longer ones are rejected and listed."
    )
    stride: Length = Field(default=128, ge=1, description="Tokens between the starts of a document's windows.")
    unknown_windows: Number = Field(
        default=1.0, ge=0, le=1, description="Fraction of training windows without the answer to keep; 0.02 suits NQ."
    )
    heads: Literal["span", "five"] = Field(
        default="span",
        description="span: start and end (SQuAD). five: also regression of both and the answer's class (NQ).",
    )
    weights: HeadWeights = Field(default=HeadWeights(), description="Weight of each head's loss.")
    class_loss: Literal["cross_entropy", "focal", "smooth"] = Field(
        default="cross_entropy",
        description="five: loss of the class head; focal is Lin et al. 2017, smooth is label smoothing.",
    )
    focal_gamma: Number = Field(
        default=2.0, ge=0, description="focal: exponent that downweights confident predictions."
    )
    focal_alpha: Number = Field(default=1.0, gt=0, description="focal: factor of the loss.")
    smoothing: Number = Field(default=0.1, ge=0, lt=1, description="smooth: probability distributed over all classes.")
    class_weights: Literal["none", "balanced"] = Field(
        default="none",
        description="five: balanced weights each class by its inverse frequency in the training windows.",
    )
    balanced_sampling: bool = Field(
        default=False,
        description="Sample the windows of all classes equally often, repeating rare ones; epochs keep their length.",
    )
    no_answer: bool = Field(
        default=True, description="True if documents without an answer occur (SQuAD v2, NQ); false for SQuAD v1."
    )
    longest_answer: Length = Field(default=30, ge=1, description="Maximum length of a predicted answer in tokens.")


class Seq2SeqConfig(Section):
    prefix: str = Field(
        default="",
        description="Text before each input, e.g. T5's 'summarize: '. Special tokens such as '<LM>' are recognized.",
    )
    target: Length | None = Field(
        default=None, ge=2, description="Maximum tokens of an output, including its end (null: data.block)."
    )
    too_long: Literal["truncate", "drop"] = Field(
        default="truncate",
        description="Inputs longer than data.block and outputs longer than target: truncate their ends, or drop the "
        "pair. Both are counted in the ledger.",
    )
    smoothing: Number = Field(
        default=0.0, ge=0, lt=1, description="Label smoothing: probability distributed over all tokens."
    )
    source_language: str = Field(
        default="", description="Language code of the inputs in the tokenizer (mBART: ru_RU, NLLB: rus_Cyrl)."
    )
    target_language: str = Field(
        default="", description="Language code of the outputs (default: source_language). Generation starts with it."
    )
    generate: Count = Field(
        default=200,
        ge=0,
        description="Number of validation pairs to generate outputs for (exact_match, chrf); 0 disables it.",
    )
    beams: Count | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Beam width in generation; 1 is greedy. null: the value in the model's generation_config.json, "
        "otherwise 1.",
    )


class ChatConfig(Section):
    template: Name = Field(
        default="auto",
        description="Chat template: auto (the tokenizer's template; without one, chatml if the tokenizer has its "
        "tokens, otherwise plain), chatml, plain (User: … Assistant: …), or a file with a Jinja template.",
    )
    train_on: Literal["assistant", "last", "tool_calls", "all"] = Field(
        default="assistant",
        description="Tokens with loss: those of the assistant's turns, of its last turn, of its turns with tool calls, "
        "or all. Tool results never have loss.",
    )
    reasoning: Literal["keep", "last", "drop"] = Field(
        default="keep",
        description="Reasoning (reasoning_content, <think>) to keep: wherever the template writes it, only after the "
        "last user message, or none. Removed reasoning is counted in the ledger.",
    )
    too_long: Literal["skip", "split", "truncate_left"] = Field(
        default="skip",
        description="Conversations longer than data.block: skip them, split them between turns, or remove their oldest "
        "tokens. All are counted in the ledger.",
    )


class PreferenceConfig(Section):
    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = Field(
        default="dpo",
        description="dpo, ipo, kto: with the model before training as reference; orpo, simpo: without one.",
    )
    beta: Number | None = Field(
        default=None, gt=0, description="Strength (null: 0.1; simpo: 2.0). ipo: the target margin is 1 / (2 beta)."
    )
    smoothing: Number = Field(
        default=0.0, ge=0, lt=0.5, description="dpo: assumed fraction of pairs with swapped answers."
    )
    margin: Number = Field(default=1.0, ge=0, description="simpo: margin gamma between chosen and rejected answers.")
    desirable: Number = Field(default=1.0, gt=0, description="kto: weight of the chosen answers.")
    undesirable: Number = Field(default=1.0, gt=0, description="kto: weight of the rejected answers.")
