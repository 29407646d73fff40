"""The sections of a run file about text and tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from artel.config.quantities import Bytes, Count, Number
from artel.config.section import Paths, Section, number_if_it_is_one


class SourceConfig(Section):
    path: Paths = Field(
        default=[],
        description="File, glob, folder or http(s) URL, or a list of them; {stdlib} is Python's own library folder.",
    )
    format: Literal["auto", "text", "html", "jsonl", "pairs", "nq", "squad", "chat", "preference", "dummy"] = Field(
        "auto",
        description="What the files hold; auto goes by suffix (.html .htm .xhtml .shtml, .jsonl .json, else text). "
        "pairs: csv or jsonl with an input and an output; nq: Natural Questions; squad: SQuAD json; chat: "
        "conversations in json or jsonl; preference: prompts with a chosen and a rejected answer; dummy: made up.",
    )
    name: str = Field("", description="Name of this source in the ledger; the path when silent.")
    document: Literal["file", "line", "paragraph"] = Field(
        "file", description="text: what one document is: a file, a line, or what blank lines separate."
    )
    encoding: str = Field("auto", description="Encoding of the files: auto, utf-8, windows-1251, koi8-r, cp866 …")
    field: str = Field("text", description="jsonl: the field that holds the text.")
    profile: Literal["none", "lib.ru"] = Field(
        "none", description="html: drop the header and footer of a known site; a page without its marks is kept whole."
    )
    pairs: Literal["none", "commas"] = Field(
        "none", description="Make pairs of plain texts: commas (input is the text without its commas, output the text)."
    )
    input: str = Field("input", description="pairs: the column or field of the input.")
    output: str = Field("output", description="pairs: the column or field of the output.")
    outputs: str = Field("", description="pairs: the file that holds the outputs, line for line, when it is another.")
    converter: str = Field(
        "auto",
        description="chat, preference: the form of a row: auto (by its fields), messages, alpaca, sharegpt, dialog, "
        "character, oasst; or module:function, a function of your own from a row to messages.",
    )
    mapping: dict[str, str] = Field(
        default={}, description="chat, preference: names of the file's fields: {instruction: question, output: answer}."
    )
    rows: str = Field(
        "", description="Which records are taken, as a slice in quotes: '[:1000]', '[10%:]', '[-500:]'; all when empty."
    )
    fill: dict[str, str] = Field(
        default={}, description="chat, preference: what stands for {{name}} in the texts: {name: Artel, author: you}."
    )
    kind: Literal["text", "questions"] = Field("text", description="dummy: what to make.")
    documents: Count = Field(1000, ge=1, description="dummy: how many documents to make.")
    seed: Count = Field(0, description="dummy: the seed that the documents are made from.")

    @property
    def yields(self) -> Literal["text", "pairs", "questions", "conversations", "preferences"]:
        """What the records of this source are."""
        if self.format == "chat":
            return "conversations"
        if self.format == "preference":
            return "preferences"
        if self.format in ("nq", "squad") or (self.format == "dummy" and self.kind == "questions"):
            return "questions"
        return "pairs" if self.format == "pairs" or self.pairs != "none" else "text"

    @model_validator(mode="after")
    def _needs_path(self) -> SourceConfig:
        if self.format != "dummy" and not self.path:
            raise ValueError("a source needs a path (or format: dummy); write path: texts/*.txt")
        return self


class CleanConfig(Section):
    unicode: Literal["NFC", "NFKC", "none"] = Field("NFC", description="Unicode normal form.")
    control: bool = Field(True, description="Remove control characters other than line feed and tab.")
    whitespace: bool = Field(
        True, description="CRLF to LF, trailing spaces off each line, at most two blank lines in a row, ends stripped."
    )
    minimum: Count = Field(1, ge=1, description="Documents of fewer characters than this are dropped (too_short).")


class DedupConfig(Section):
    exact: bool = Field(True, description="Keep the first of documents with the same cleaned text.")


class DataConfig(Section):
    sources: list[SourceConfig] = Field(default=[], description="Where the text comes from; one source or many.")
    clean: CleanConfig = Field(
        CleanConfig(),
        description="Cleaning rules; each counted in the ledger. Questions and their documents are taken as they are: "
        "answers are located in them by character.",
    )
    dedup: DedupConfig = Field(DedupConfig(), description="Which repeated documents are dropped.")
    validation: Annotated[float | str, BeforeValidator(number_if_it_is_one)] = Field(
        0.05,
        description="Fraction of documents held out for validation, chosen by hash; or a path to validation texts.",
    )
    block: Count = Field(
        1024, ge=2, description="Tokens in a block; the longest window or pair where samples stand alone."
    )
    max_bad: Number = Field(0.001, ge=0, le=1, description="Share of unreadable records that is borne; each is listed.")
    max_document: Bytes = Field(
        100_000_000, ge=1, description="Largest file or line read as one document, in bytes; a larger one is an error."
    )
    store: str = Field(
        "", description="Folder for token stores; by default in the cache folder (ARTEL_CACHE).",
        json_schema_extra={"shapes_result": False},
    )  # fmt: skip

    @field_validator("validation")
    @classmethod
    def _fraction(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value < 1:
            raise ValueError(f"{value} is not a fraction from 0 to below 1, nor a path; write 0.05")
        return value


class TokenizerTraining(Section):
    vocab: Count = Field(16384, ge=257, description="Ids in the vocabulary, the special tokens included.")
    end: str | None = Field(
        None, min_length=1, description="The end-of-document token; <|endoftext|>, for encoders </s>, when null."
    )
    pad: str | None = Field(
        None, min_length=1, description="The padding token; <|pad|>, for encoders <pad>, when null."
    )
    special: list[str] = Field(default=[], description="Further special tokens.")
    minimum_frequency: Count = Field(2, ge=1, description="Merges seen fewer times than this are not made.")
    sample: Bytes = Field(
        2_000_000_000, ge=1, description="Bytes of training text, at most, that the tokenizer is trained on."
    )


class TokenizerConfig(Section):
    train: TokenizerTraining | None = Field(None, description="Train a byte-level BPE on the training text.")
    from_: str | None = Field(None, alias="from", description="Folder or hub id of an existing tokenizer.")

    @model_validator(mode="after")
    def _one(self) -> TokenizerConfig:
        if self.train is not None and self.from_ is not None:
            raise ValueError("both train and from are given; keep one")
        return self
