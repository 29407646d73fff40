"""The sections of a run file that belong to objectives with a head of their own: labels, vectors, scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from artel.config.schema.base import Section
from artel.config.schema.quantities import Count, Length, Number


def _as_texts(value: Any) -> Any:
    """Labels that YAML reads as numbers become texts, as formats have them."""
    if not isinstance(value, list):
        return value
    for item in value:
        if isinstance(item, bool):
            raise ValueError("yes, no, on and off are booleans in YAML; write labels in quotes: ['yes', 'no']")
    return [str(item) if isinstance(item, int | float) else item for item in value]


class ClassificationConfig(Section):
    kind: Literal["auto", "single", "multi", "number"] = Field(
        default="auto",
        description="What is predicted: one label of a text, several (any of them, or none), or a number. auto: a "
        "number where each text has one and some have a fraction; several where a text has more labels than one, or "
        "none; else one.",
    )
    labels: Annotated[Literal["auto"] | list[str], BeforeValidator(_as_texts)] = Field(
        default="auto",
        description="The labels, in the order of the model's outputs; of two the second is the positive one. auto: all "
        "that occur, sorted; those of a pretrained head first, in its order. A row with another label is rejected and "
        "listed.",
    )
    too_long: Literal["truncate", "drop"] = Field(
        default="truncate",
        description="Texts over data.block tokens: cut off at their end (of a pair the longer one first), or left out; "
        "each is counted in the ledger.",
    )
    class_weights: Literal["none", "balanced"] = Field(
        default="none",
        description="balanced weighs the loss of each label by the inverse of its share of the training texts.",
    )
    balanced_sampling: bool = Field(
        default=False,
        description="Draw texts of each label equally often, rare ones repeatedly; an epoch stays as long.",
    )
    loss: Literal["cross_entropy", "focal"] = Field(
        default="cross_entropy", description="Of labels; focal is Lin et al. 2017: sure answers count less."
    )
    focal_gamma: Number = Field(default=2.0, ge=0, description="focal: how much less.")
    smoothing: Number = Field(
        default=0.0, ge=0, lt=1, description="cross_entropy: label smoothing, the probability shared among all labels."
    )

    @field_validator("labels")
    @classmethod
    def _different(cls, labels: str | list[str]) -> str | list[str]:
        for label in labels if isinstance(labels, list) else []:
            if labels.count(label) > 1 or not label.strip():
                raise ValueError(f"{label!r} is empty or there twice; write each label once")
        return labels

    @model_validator(mode="after")
    def _fits(self) -> ClassificationConfig:
        if self.loss == "focal" and self.smoothing:
            raise ValueError("focal and smoothing pull against each other; leave one out")
        if self.kind == "number":
            set_keys = {"class_weights", "balanced_sampling", "loss", "smoothing"} & self.model_fields_set
            wrong = [key for key in sorted(set_keys) if getattr(self, key) != type(self).model_fields[key].default]
            if wrong:
                raise ValueError(f"{' and '.join(wrong)} is for labels, and kind: number has none; remove it")
        return self


class RewardConfig(Section):
    center: Number = Field(
        default=0.0,
        ge=0,
        description="Weight of (score of chosen + score of rejected)² in the loss of a pair: scores stay around 0, so "
        "that those of different prompts compare (Eisenstein et al. 2023); 0.01 is usual.",
    )


class RerankConfig(Section):
    loss: Literal["pointwise", "listwise"] = Field(
        default="pointwise",
        description="pointwise: binary cross-entropy of each query and document; listwise: softmax over a document "
        "that matches and its negatives.",
    )
    negatives: Count = Field(
        default=4,
        ge=1,
        le=254,
        description="Documents that do not match beside one that does, in training: the record's own, and where it has "
        "fewer, others drawn from the training records, anew in each epoch.",
    )


class EmbeddingPrompts(Section):
    query: str = Field(default="", description="Text put before each query: 'query: '.")
    document: str = Field(default="", description="Text put before each document: 'passage: '.")


class EmbeddingConfig(Section):
    loss: Literal["in_batch_negatives", "triplet", "cosine", "cosent"] = Field(
        default="in_batch_negatives",
        description="in_batch_negatives (MNRL, InfoNCE): a query's document among all documents of the global batch; "
        "triplet: nearer than its negatives by a margin; cosine: the cosine is the score (squared error); cosent: the "
        "order of cosines is that of the scores.",
    )
    temperature: Number = Field(
        default=0.05, gt=0, description="in_batch_negatives, cosent: cosines are divided by it; 0.05 is a scale of 20."
    )
    margin: Number = Field(default=0.2, gt=0, description="triplet: by how much, in cosines.")
    largest_score: Number = Field(
        default=1.0, gt=0, description="cosine: the score of two texts that mean the same: 5 for scores from 0 to 5."
    )
    negatives: Count = Field(
        default=4,
        ge=0,
        description="in_batch_negatives, triplet: at most so many of a query's own negatives in a step, others in each "
        "epoch. Of several positives one is taken, likewise.",
    )
    pooling: Literal["mean", "cls", "last"] = Field(
        default="mean",
        description="A text's vector, from the last layer: the mean of its tokens, its first token, or its last one "
        "(decoders).",
    )
    normalize: bool = Field(default=True, description="Vectors have the length 1.")
    matryoshka: list[Length] = Field(
        default=[],
        description="Lengths at which the beginning of a vector is a vector, too: [384, 128, 64]; the loss is their "
        "mean (Kusupati et al. 2022).",
    )
    prompts: EmbeddingPrompts = Field(
        default=EmbeddingPrompts(), description="Texts that tell queries from documents; kept in the model's folder."
    )

    @field_validator("matryoshka")
    @classmethod
    def _longest_first(cls, dimensions: list[int]) -> list[int]:
        return sorted(set(dimensions), reverse=True)

    @property
    def learns_scores(self) -> bool:
        """True if records are pairs with a score."""
        return self.loss in ("cosine", "cosent")

    @property
    def most_negatives(self) -> int:
        """Maximum number of a query's own negatives per step."""
        return 0 if self.learns_scores else self.negatives


class TokensConfig(Section):
    labels: Annotated[Literal["auto"] | list[str], BeforeValidator(_as_texts)] = Field(
        default="auto",
        description="What is marked: [ORG, PER]; auto: what the records have. Or all tags in the order of the head's "
        "rows: [O, B-PER, I-PER]. A record with another label is rejected and listed.",
    )
    scheme: Literal["bio", "bilou", "words"] = Field(
        default="bio",
        description="Tags of the words of a name: bio (B- the first, I- the others); bilou (also L- the last, U- a "
        "single one). words: each word has a label of its own (parts of speech), as where a source is of kind words.",
    )
    nested: Literal["outermost", "innermost"] = Field(
        default="outermost",
        description="Which of names that overlap is learned, and evaluated against; the others are counted in the "
        "ledger.",
    )
    isolate_punctuation: bool = Field(
        default=True,
        description="Make each punctuation mark a token of its own, so that a name can end before it; false leaves "
        "the tokenizer as it is.",
    )

    @field_validator("labels")
    @classmethod
    def _names(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and (not value or len(set(value)) < len(value) or not all(map(str.strip, value))):
            raise ValueError(f"{value} are no labels; write each once: [ORG, PER], or auto")
        return value
