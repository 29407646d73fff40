"""The sections of objectives with their own head: labels, embeddings, scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from artel.config.schema.base import Section
from artel.config.schema.quantities import Count, Length, Number


def _labels_to_text(value: Any) -> Any:
    """Convert labels that YAML reads as numbers to strings, as formats yield them."""
    if not isinstance(value, list):
        return value
    for item in value:
        if isinstance(item, bool):
            raise ValueError("yes, no, on and off are booleans in YAML; write labels in quotes: ['yes', 'no']")
    return [str(item) if isinstance(item, int | float) else item for item in value]


class ClassificationConfig(Section):
    kind: Literal["auto", "single", "multi", "number"] = Field(
        default="auto",
        description="Target of a text: a single label, multi (any number of labels) or a number. auto: number if each "
        "text has one and some have a fractional part; multi if a text has several labels or none; otherwise single.",
    )
    labels: Annotated[Literal["auto"] | list[str], BeforeValidator(_labels_to_text)] = Field(
        default="auto",
        description="Labels in the order of the model's outputs; of two, the second is the positive one. auto: all "
        "labels that occur, sorted, after the labels of a pretrained head in its order. Rows with other labels are "
        "rejected and listed.",
    )
    too_long: Literal["truncate", "drop"] = Field(
        default="truncate",
        description="Texts longer than data.block: truncate their ends (of a pair, the longer text first) or drop "
        "them. Both are counted in the ledger.",
    )
    class_weights: Literal["none", "balanced"] = Field(
        default="none",
        description="balanced weights the loss of each label by its inverse frequency in the training texts.",
    )
    balanced_sampling: bool = Field(
        default=False,
        description="Sample the texts of all labels equally often, repeating rare ones; epochs keep their length.",
    )
    loss: Literal["cross_entropy", "focal"] = Field(
        default="cross_entropy", description="Loss; focal (Lin et al. 2017) downweights confident predictions."
    )
    focal_gamma: Number = Field(
        default=2.0, ge=0, description="focal: exponent that downweights confident predictions."
    )
    smoothing: Number = Field(
        default=0.0, ge=0, lt=1, description="cross_entropy: label smoothing, a probability for all labels."
    )

    @field_validator("labels")
    @classmethod
    def _check_distinct(cls, labels: str | list[str]) -> str | list[str]:
        for label in labels if isinstance(labels, list) else []:
            if labels.count(label) > 1 or not label.strip():
                raise ValueError(f"{label!r} is empty or occurs twice; write each label once")
        return labels

    @model_validator(mode="after")
    def _check_combination(self) -> ClassificationConfig:
        if self.loss == "focal" and self.smoothing:
            raise ValueError("focal loss and smoothing cannot be combined; remove one of them")
        if self.kind == "number":
            set_keys = {"class_weights", "balanced_sampling", "loss", "smoothing"} & self.model_fields_set
            wrong = [key for key in sorted(set_keys) if getattr(self, key) != type(self).model_fields[key].default]
            if wrong:
                raise ValueError(f"{' and '.join(wrong)} is for labels, but kind: number has none; remove it")
        return self


class RewardConfig(Section):
    center: Number = Field(
        default=0.0,
        ge=0,
        description="Weight of (score of chosen + score of rejected)² in the loss of a pair. It keeps scores near 0, "
        "so that scores of different prompts are comparable (Eisenstein et al. 2023); 0.01 is common.",
    )


class RerankConfig(Section):
    loss: Literal["pointwise", "listwise"] = Field(
        default="pointwise",
        description="pointwise: binary cross-entropy of each query and document; listwise: softmax over a positive "
        "document and its negatives.",
    )
    negatives: Count = Field(
        default=4,
        ge=1,
        le=254,
        description="Negatives per positive document in training: the record's own and, if it has fewer, others "
        "sampled from the training records in each epoch.",
    )


class EmbeddingPrompts(Section):
    query: str = Field(default="", description="Text before each query, e.g. 'query: '.")
    document: str = Field(default="", description="Text before each document, e.g. 'passage: '.")


class EmbeddingConfig(Section):
    loss: Literal["in_batch_negatives", "triplet", "cosine", "cosent"] = Field(
        default="in_batch_negatives",
        description="in_batch_negatives (MNRL, InfoNCE): softmax of a query's document over all documents of the "
        "global batch; triplet: the positive nearer than the negatives by a margin; cosine: squared error of the "
        "cosine against the score; cosent: cosines in the order of the scores.",
    )
    temperature: Number = Field(
        default=0.05, gt=0, description="in_batch_negatives, cosent: divides cosines; 0.05 is a scale of 20."
    )
    margin: Number = Field(default=0.2, gt=0, description="triplet: margin between cosines.")
    largest_score: Number = Field(
        default=1.0, gt=0, description="cosine: score of identical texts, e.g. 5 for scores from 0 to 5."
    )
    negatives: Count = Field(
        default=4,
        ge=0,
        description="in_batch_negatives, triplet: maximum of a query's own negatives per step; each epoch samples "
        "others. One of several positives is sampled in the same way.",
    )
    pooling: Literal["mean", "cls", "last"] = Field(
        default="mean",
        description="Embedding of a text from the last layer: the mean over its tokens, its first token, or its last "
        "token (for decoders).",
    )
    normalize: bool = Field(default=True, description="Normalize embeddings to length 1.")
    matryoshka: list[Length] = Field(
        default=[],
        description="Dimensions to which embeddings can be truncated, e.g. [384, 128, 64]; the loss is the mean over "
        "them (Kusupati et al. 2022).",
    )
    prompts: EmbeddingPrompts = Field(
        default=EmbeddingPrompts(), description="Prefixes of queries and documents, saved in the model folder."
    )

    @field_validator("matryoshka")
    @classmethod
    def _sort_dimensions(cls, dimensions: list[int]) -> list[int]:
        return sorted(set(dimensions), reverse=True)

    @property
    def learns_scores(self) -> bool:
        """True if records are pairs with a score."""
        return self.loss in ("cosine", "cosent")

    @property
    def max_negatives(self) -> int:
        """Maximum number of a query's own negatives per step."""
        return 0 if self.learns_scores else self.negatives


class TokensConfig(Section):
    labels: Annotated[Literal["auto"] | list[str], BeforeValidator(_labels_to_text)] = Field(
        default="auto",
        description="Entity labels, e.g. [ORG, PER], or all tags in the order of the head's outputs, e.g. [O, B-PER, "
        "I-PER]; auto: the labels in the records. Records with other labels are rejected and listed.",
    )
    scheme: Literal["bio", "bilou", "words"] = Field(
        default="bio",
        description="Tagging scheme of entities: bio (B- first word, I- others) or bilou (also L- last word, U- single "
        "word). words: each word has its own label (e.g. part of speech); implied by a source with kind: words.",
    )
    nested: Literal["outermost", "innermost"] = Field(
        default="outermost",
        description="Which of several overlapping entities to train and evaluate on; the others are counted in the "
        "ledger.",
    )
    isolate_punctuation: bool = Field(
        default=True,
        description="Make each punctuation mark a separate token, so that an entity can end before it; false does not "
        "change the tokenizer.",
    )

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and (not value or len(set(value)) < len(value) or not all(map(str.strip, value))):
            raise ValueError(f"{value} are not valid labels; write each once: [ORG, PER], or auto")
        return value
