"""The section `tokenizer`: one that is there, or how one is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from artel.config.schema.base import Name, Section, free
from artel.config.schema.quantities import Vocabulary


class TokenizerTraining(Section):
    pattern: Literal["gpt2", "gpt4", "whitespace"] = Field(
        default="gpt2",
        description="What a text is cut into before merging. gpt2: words with the space before them; gpt4: the same, "
        "numbers in threes, letters of any case: slightly fewer tokens on Russian and code; whitespace: words and "
        "punctuation, spaces are lost.",
    )
    vocab: Literal["auto"] | Annotated[Vocabulary, Field(ge=257)] = Field(
        default="auto",
        description="Ids in the vocabulary, the special tokens included; as many as the text yields if that is fewer. "
        "auto: about one for 700 bytes of text, 1,024 to 32,768.",
    )
    special: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description="Special tokens beside <|endoftext|> and <|pad|>, or RoBERTa's five for encoders.",
    )


class TokenizerConfig(Section):
    train: TokenizerTraining | None = Field(
        default=None, description="Train a BPE on the training text: over bytes, or over words (pattern: whitespace)."
    )
    from_: Name | None = Field(default=None, alias="from", description="Folder or hub id of an existing tokenizer.")
    replace: bool = free(
        False,
        "Train one although model.from has its own: the model's embeddings, learned for other tokens, are then of no "
        "use, and must be learned anew.",
    )

    @model_validator(mode="after")
    def _one(self) -> TokenizerConfig:
        if self.train is not None and self.from_ is not None:
            raise ValueError("both train and from are given; keep one")
        return self
