"""The sections `data.clean` and `data.dedup`: cleaning rules and duplicates."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from artel.config.schema.base import Name, OneOrMore, Section
from artel.config.schema.quantities import Count, Number


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        position = "" if error.pos is None else f" at character {error.pos + 1}"
        raise ValueError(
            f"{pattern!r} is not a valid regular expression: {error.msg}{position}; escape literal characters with a "
            r"backslash: \( \* \["
        ) from None
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"this regular expression is too large: {error}; write a shorter one") from None
    if not pattern:
        raise ValueError("an empty regular expression matches everything; write a pattern")
    return pattern


Patterns = Annotated[list[Annotated[str, AfterValidator(_check_pattern)]], OneOrMore]
Fraction = Annotated[Number, Field(ge=0, le=1)]


PiiKind = Literal["email", "phone", "card", "ip", "passport", "snils", "inn"]


def _expand_kinds(value: object) -> object:
    """Convert true and all to every kind, and one kind to a list."""
    if isinstance(value, bool) or value == "all":
        return list(get_args(PiiKind)) if value else []
    return [value] if isinstance(value, str) else value


PiiKinds = Annotated[
    list[PiiKind],
    BeforeValidator(_expand_kinds, json_schema_input_type=bool | Literal["all"] | PiiKind | list[PiiKind]),
]


class PiiConfig(Section):
    mask: PiiKinds = Field(
        default=[],
        description="Kinds to replace by [EMAIL], [PHONE] … and count in the ledger (pii_email): email, phone "
        "(international, Russian; needs artel-lm[pii]), card, ip (public ones), and of Russian documents passport, "
        "snils and inn; or all.",
    )
    drop: PiiKinds = Field(
        default=[], description="Kinds for which to drop a document (pii); the same kinds as in mask."
    )

    @model_validator(mode="after")
    def _check_mask_and_drop(self) -> PiiConfig:
        if both := sorted({*self.mask} & {*self.drop}):
            raise ValueError(f"{', '.join(both)} cannot be both masked and dropped; keep one")
        if not self.mask and not self.drop:
            raise ValueError("both mask and drop are empty; write e.g. mask: all")
        return self


class ClassifierConfig(Section):
    from_: Name = Field(alias="from", description="Folder of a classifier trained by `artel data classifier`.")
    minimum: Fraction = Field(
        default=0.5,
        description="Minimum probability of being a good text; classifier.json lists what each value keeps.",
    )


class CleanConfig(Section):
    unicode: Literal["NFC", "NFKC", "none"] = Field(default="NFC", description="Unicode normal form.")
    mojibake: bool = Field(
        default=False, description="Repair text decoded with a wrong encoding (РџСЂРёРІРµС‚). Needs artel-lm[mojibake]."
    )
    invisible: bool = Field(
        default=False, description="Remove soft hyphens, zero-width spaces and direction marks, but not letter joiners."
    )
    drop_lines: Patterns = Field(
        default=[],
        description="Regular expressions: remove lines that match one. Plain texts only; pairs and conversations keep "
        "their lines.",
    )
    pii: PiiConfig | None = Field(
        default=None,
        description="Mask personal data of the given kinds, or drop documents that contain them, e.g. {mask: all}. Not "
        "applied to questions, whose answers are located by character.",
    )
    classifier: ClassifierConfig | None = Field(
        default=None,
        description="Drop documents that a quality classifier rejects (quality): {from: FOLDER}. Questions and texts "
        "with marked spans are kept.",
    )
    minimum: Count = Field(default=1, ge=1, description="Drop documents with fewer characters (too_short).")
    maximum: Count | None = Field(
        default=None,
        ge=1,
        description="Drop documents with more characters (too_long). This rule and the rules below apply to the output "
        "of a pair and to all turns of a conversation together, and never to questions.",
    )
    drop_documents: Patterns = Field(
        default=[],
        description="Regular expressions: drop documents that match one (document_filter); ^ and $ match at line ends. "
        "'\\A(?![\\s\\S]*WORD)' drops those without WORD.",
    )
    symbols: Fraction | None = Field(
        default=None,
        description="Maximum fraction of punctuation and symbols among visible characters; 0.4 keeps code.",
    )
    repeated_lines: Fraction | None = Field(
        default=None,
        description="Maximum fraction of characters in lines that repeat an earlier line of the document (Gopher: "
        "0.2). This rule and the next two keep documents with fewer than 50 words. They are designed for prose: "
        "Gopher's values drop one in six files of Python's standard library.",
    )
    repeated_paragraphs: Fraction | None = Field(
        default=None,
        description="Maximum fraction of characters in repeated paragraphs, separated by blank lines (Gopher: 0.2).",
    )
    repeated_ngrams: dict[Count, Fraction] = Field(
        default={},
        description="Maximum fraction of characters in repeated n-grams of words, by n. Below 5, only the most "
        "frequent n-gram counts; from 5, all n-grams that repeat an earlier one. Gopher: {2: 0.2, 3: 0.18, 4: 0.16, 5: "
        "0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}.",
    )
    languages: Annotated[list[str], OneOrMore] = Field(
        default=[],
        description="Drop documents in other languages than these (language), given by codes such as ru, en. Documents "
        "under 100 characters cannot be recognized and are kept. Needs artel-lm[languages].",
    )

    @field_validator("repeated_ngrams")
    @classmethod
    def _check_ngram_lengths(cls, value: dict[int, float]) -> dict[int, float]:
        for length in value:
            if not 2 <= length <= 20:
                raise ValueError(f"{length} is not a valid n; write lengths from 2 to 20, e.g. {{2: 0.2, 5: 0.15}}")
        return value


class NearConfig(Section):
    threshold: Number = Field(
        default=0.8,
        ge=0.1,
        le=1,
        description="Minimum Jaccard similarity of two documents' runs of 5 words, computed exactly. Documents with "
        "fewer words are only compared by the exact rule.",
    )


class DedupConfig(Section):
    exact: bool = Field(default=True, description="Keep only the first of documents with the same cleaned text.")
    lines: Literal["none", "line", "paragraph"] = Field(
        default="none",
        description="Remove lines or paragraphs of at least 30 characters that occurred before, in the same document "
        "or another; plain texts only. Documents left with less than data.clean.minimum are dropped (repeated).",
    )
    near: NearConfig | None = Field(
        default=None,
        description="Drop near duplicates of earlier documents (near_duplicate), and training documents that nearly "
        "equal a validation text given by a path (near_validation). {} means the defaults. All texts are read a second "
        "time. Not for questions and preferences. Needs artel-lm[near].",
    )
