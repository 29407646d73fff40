"""The section `tokenizer`: an existing tokenizer, or the training of one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from artel.config.schema.base import Name, Section, runtime_only
from artel.config.schema.quantities import Vocabulary


class TokenizerTraining(Section):
    pattern: Literal["gpt2", "gpt4", "whitespace"] = Field(
        default="gpt2",
        description="How a text is split before merging. gpt2: words with the preceding space. gpt4: the same, with "
        "numbers in groups of three and contractions of any case: slightly fewer tokens on Russian and code. "
        "whitespace: words and punctuation, without spaces.",
    )
    vocab: Literal["auto"] | Annotated[Vocabulary, Field(ge=257)] = Field(
        default="auto",
        description="Size of the vocabulary, including special tokens; smaller if the text yields fewer tokens. "
        "auto: about one token per 700 bytes of text, from 1,024 to 32,768.",
    )
    special: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[], description="Special tokens besides <|endoftext|> and <|pad|>, or RoBERTa's five for encoders."
    )


class TokenizerConfig(Section):
    train: TokenizerTraining | None = Field(
        default=None,
        description="Train a BPE tokenizer on the training text, over bytes or words (pattern: whitespace).",
    )
    from_: Name | None = Field(default=None, alias="from", description="Folder or hub id of an existing tokenizer.")
    replace: bool = runtime_only(
        False,
        "Train a tokenizer even though model.from has one. The pretrained embeddings belong to other tokens, so they "
        "are lost and must be learned again.",
    )

    @model_validator(mode="after")
    def _check_combination(self) -> TokenizerConfig:
        if self.train is not None and self.from_ is not None:
            raise ValueError("train and from cannot be combined; keep one")
        return self
