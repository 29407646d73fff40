"""The sections of a run file that belong to one objective each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from artel.config.schema.base import Name, Section
from artel.config.schema.quantities import Count, Length, Number


class MaskedConfig(Section):
    rate: Number = Field(default=0.15, gt=0, lt=1, description="Share of tokens that are predicted.")
    mask: Number = Field(default=0.8, ge=0, le=1, description="Of these, the share replaced by the mask token.")
    random: Number = Field(default=0.1, ge=0, le=1, description="And by any token; the rest stay as they are.")
    whole_words: bool = Field(default=False, description="Choose words, all of whose tokens are predicted, not tokens.")

    @model_validator(mode="after")
    def _shares(self) -> MaskedConfig:
        if self.mask + self.random > 1:
            raise ValueError(f"mask {self.mask:g} and random {self.random:g} are over 1 together; write 0.8 and 0.1")
        return self


class HeadWeights(Section):
    start: Number = Field(default=1.0, ge=0, description="Cross-entropy of the first token of the answer.")
    end: Number = Field(default=1.0, ge=0, description="And of the last.")
    start_position: Number = Field(
        default=1.0, ge=0, description="five: squared error of the start's place in the window, 0 to 1."
    )
    end_position: Number = Field(default=1.0, ge=0, description="five: and of the end's.")
    answer_class: Number = Field(
        default=1.0, ge=0, description="five: loss of the class: yes, no, short, long, unknown."
    )


class SpanQAConfig(Section):
    question: Length = Field(
        default=64, ge=1, description="Longest question in tokens; a longer one is rejected and listed."
    )
    stride: Length = Field(default=128, ge=1, description="Tokens from one window of a document to the next.")
    unknown_windows: Number = Field(
        default=1.0, ge=0, le=1, description="Share of training windows without the answer that is kept; 0.02 suits NQ."
    )
    heads: Literal["span", "five"] = Field(
        default="span",
        description="span: start and end (SQuAD); five: also their regression and the answer's class (NQ).",
    )
    weights: HeadWeights = Field(default=HeadWeights(), description="What each head's loss counts.")
    class_loss: Literal["cross_entropy", "focal", "smooth"] = Field(
        default="cross_entropy",
        description="five: the class head's loss; focal is Lin et al. 2017, smooth is label smoothing.",
    )
    focal_gamma: Number = Field(default=2.0, ge=0, description="focal: how much sure answers count less.")
    focal_alpha: Number = Field(default=1.0, gt=0, description="focal: factor of the loss.")
    smoothing: Number = Field(default=0.1, ge=0, lt=1, description="smooth: probability shared among all classes.")
    class_weights: Literal["none", "balanced"] = Field(
        default="none",
        description="five: balanced weighs each class by the inverse of its share of the training windows.",
    )
    balanced_sampling: bool = Field(
        default=False,
        description="Draw windows of each class equally often, rare ones repeatedly; an epoch stays as long.",
    )
    no_answer: bool = Field(
        default=True, description="A document may hold no answer (SQuAD v2, NQ); false for SQuAD v1."
    )
    longest_answer: Length = Field(default=30, ge=1, description="Longest predicted answer in tokens.")


class Seq2SeqConfig(Section):
    prefix: str = Field(
        default="",
        description="Text put before each input, as T5 has it: 'summarize: '. Special tokens in it are tokens: '<LM>'.",
    )
    target: Length | None = Field(
        default=None, ge=2, description="Longest output in tokens, with its end token; data.block when null."
    )
    too_long: Literal["truncate", "drop"] = Field(
        default="truncate",
        description="Inputs over data.block tokens and outputs over target: cut off at their end, or the pair is left "
        "out; each is counted in the ledger.",
    )
    smoothing: Number = Field(
        default=0.0, ge=0, lt=1, description="Label smoothing: the probability shared among all tokens."
    )
    source_language: str = Field(
        default="", description="The tokenizer's code of the inputs' language (mBART, NLLB): ru_RU, rus_Cyrl."
    )
    target_language: str = Field(
        default="", description="And of the outputs'; that of the inputs when empty. The model begins to write with it."
    )
    generate: Count = Field(
        default=200,
        ge=0,
        description="So many of the validation pairs are also written by the model, for exact_match and chrf; 0: none.",
    )
    beams: Count | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Beams of the search when the model writes; 1 takes the likeliest token. null: as the model's "
        "generation_config.json says, else 1.",
    )


class ChatConfig(Section):
    template: Name = Field(
        default="auto",
        description="How a conversation is written: auto (the tokenizer's template; without one chatml where it has "
        "the tokens, else plain), chatml, plain (User: … Assistant: …), or a file with a Jinja template.",
    )
    train_on: Literal["assistant", "last", "tool_calls", "all"] = Field(
        default="assistant",
        description="The assistant's turns, its last turn only, only turns that call a tool, or every token. What a "
        "tool returned is never learned.",
    )
    reasoning: Literal["keep", "last", "drop"] = Field(
        default="keep",
        description="Thoughts (reasoning_content, <think>): where the template writes them, only after the last "
        "message of the user, or none; those left out are counted in the ledger.",
    )
    too_long: Literal["skip", "split", "truncate_left"] = Field(
        default="skip",
        description="Conversations over data.block tokens: left out, cut between turns into several, or without their "
        "oldest tokens; each is counted in the ledger.",
    )


class PreferenceConfig(Section):
    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = Field(
        default="dpo", description="dpo, ipo, kto: against the model before training; orpo, simpo: without a reference."
    )
    beta: Number | None = Field(
        default=None, gt=0, description="Strength; 0.1 when null, simpo 2.0. ipo: the margin aimed at is 1 / (2 beta)."
    )
    smoothing: Number = Field(
        default=0.0, ge=0, lt=0.5, description="dpo: the share of pairs whose answers may be swapped."
    )
    margin: Number = Field(default=1.0, ge=0, description="simpo: the margin gamma between chosen and rejected.")
    desirable: Number = Field(default=1.0, gt=0, description="kto: weight of the chosen answers.")
    undesirable: Number = Field(default=1.0, gt=0, description="kto: weight of the rejected ones.")
