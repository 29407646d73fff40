"""The sections of a run file about what becomes of texts: cleaning rules, duplicates."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from artel.config.schema.base import Name, OneOrMore, Section
from artel.config.schema.quantities import Count, Number


def _regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        at = "" if error.pos is None else f" at character {error.pos + 1}"
        raise ValueError(
            f"{pattern!r} is no regular expression: {error.msg}{at}; write signs that stand for themselves with a "
            r"backslash: \( \* \["
        ) from None
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"this regular expression is too large: {error}; write a shorter one") from None
    if not pattern:
        raise ValueError("an empty regular expression is found everywhere; write what is to be found")
    return pattern


Patterns = Annotated[list[Annotated[str, AfterValidator(_regular_expression)]], OneOrMore]
Share = Annotated[Number, Field(ge=0, le=1)]


PiiKind = Literal["email", "phone", "card", "ip", "passport", "snils", "inn"]


def _all_kinds(value: object) -> object:
    """true and all stand for every kind, one kind for a list of it."""
    if isinstance(value, bool) or value == "all":
        return list(get_args(PiiKind)) if value else []
    return [value] if isinstance(value, str) else value


PiiKinds = Annotated[
    list[PiiKind], BeforeValidator(_all_kinds, json_schema_input_type=bool | Literal["all"] | PiiKind | list[PiiKind])
]


class PiiConfig(Section):
    mask: PiiKinds = Field(
        default=[],
        description="What is replaced by [EMAIL], [PHONE] …, and counted in the ledger (pii_email): email, phone "
        "(international, Russian; needs artel-lm[pii]), card, ip (public ones), and of Russian documents passport, "
        "snils and inn; or all.",
    )
    drop: PiiKinds = Field(default=[], description="What a document is dropped for (pii); of the same kinds.")

    @model_validator(mode="after")
    def _something(self) -> PiiConfig:
        if both := sorted({*self.mask} & {*self.drop}):
            raise ValueError(f"{', '.join(both)} cannot be both masked and dropped; keep one")
        if not self.mask and not self.drop:
            raise ValueError("nothing is masked, and no document dropped; write mask: all")
        return self


class ClassifierConfig(Section):
    from_: Name = Field(alias="from", description="Folder of a classifier that `artel data classifier` has trained.")
    minimum: Share = Field(
        default=0.5, description="Least probability of being a good text; its classifier.json says what each keeps."
    )


class CleanConfig(Section):
    unicode: Literal["NFC", "NFKC", "none"] = Field(default="NFC", description="Unicode normal form.")
    mojibake: bool = Field(
        default=False,
        description="Repair text that was decoded in a wrong encoding (РџСЂРёРІРµС‚); needs artel-lm[mojibake].",
    )
    invisible: bool = Field(
        default=False,
        description="Remove soft hyphens, zero-width spaces and direction marks; joiners of letters stay.",
    )
    drop_lines: Patterns = Field(
        default=[],
        description="Regular expressions: lines in which one is found are removed. Of plain texts only; pairs and "
        "conversations keep their lines.",
    )
    pii: PiiConfig | None = Field(
        default=None,
        description="Personal data of the given kinds are masked, or documents with them dropped: {mask: all}. Not of "
        "questions, whose answers are located by character.",
    )
    classifier: ClassifierConfig | None = Field(
        default=None,
        description="Documents that a classifier takes for bad ones are dropped (quality): {from: FOLDER}. Questions "
        "and texts with marked spans stay.",
    )
    minimum: Count = Field(
        default=1, ge=1, description="Documents of fewer characters than this are dropped (too_short)."
    )
    maximum: Count | None = Field(
        default=None,
        ge=1,
        description="Documents of more characters are dropped (too_long). This rule and those below look at a pair's "
        "output and at all turns of a conversation together, and never at questions.",
    )
    drop_documents: Patterns = Field(
        default=[],
        description="Regular expressions: documents in which one is found are dropped (document_filter); ^ and $ are "
        "the ends of any line. '\\A(?![\\s\\S]*WORD)' drops those without WORD.",
    )
    symbols: Share | None = Field(
        default=None,
        description="Largest share of punctuation and symbols among the visible characters; 0.4 leaves code in.",
    )
    repeated_lines: Share | None = Field(
        default=None,
        description="Largest share of characters in lines that repeat an earlier line of their document; Gopher's is "
        "0.2. This rule and the next two keep documents of fewer than 50 words. They are made for prose: Gopher's "
        "values drop one file in six of Python's own library.",
    )
    repeated_paragraphs: Share | None = Field(
        default=None, description="The same for paragraphs, which blank lines separate; Gopher's is 0.2."
    )
    repeated_ngrams: dict[Count, Share] = Field(
        default={},
        description="Largest share of characters in repeated runs of n words, by n: below 5 in the most frequent run, "
        "from 5 in all that repeat an earlier one. Gopher's: {2: 0.2, 3: 0.18, 4: 0.16, 5: 0.15, 6: 0.14, 7: 0.13, "
        "8: 0.12, 9: 0.11, 10: 0.1}.",
    )
    languages: Annotated[list[str], OneOrMore] = Field(
        default=[],
        description="Codes (ru, en): documents that are in none of these languages are dropped (language); those under "
        "100 characters cannot be recognized and stay. Needs artel-lm[languages].",
    )

    @field_validator("repeated_ngrams")
    @classmethod
    def _lengths(cls, value: dict[int, float]) -> dict[int, float]:
        for length in value:
            if not 2 <= length <= 20:
                raise ValueError(f"runs of {length} words; write lengths from 2 to 20: {{2: 0.2, 5: 0.15}}")
        return value


class NearConfig(Section):
    threshold: Number = Field(
        default=0.8,
        ge=0.1,
        le=1,
        description="Least Jaccard similarity of two documents' runs of 5 words: counted, no estimate. Documents of "
        "fewer words are left to the exact rule.",
    )


class DedupConfig(Section):
    exact: bool = Field(default=True, description="Keep the first of documents with the same cleaned text.")
    lines: Literal["none", "line", "paragraph"] = Field(
        default="none",
        description="Remove lines, or paragraphs, of 30 characters and more that stood before, in the same document or "
        "in another; of plain texts only. Where less than data.clean.minimum is left, the document goes (repeated).",
    )
    near: NearConfig | None = Field(
        default=None,
        description="Keep the first of documents that are nearly the same (near_duplicate), and none in training that "
        "is nearly a validation text given by a path (near_validation). Write {} for the defaults; all texts are read "
        "once more. Not of questions and preferences. Needs artel-lm[near].",
    )
