"""The sections of a run file about text and tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from artel.config.schema.base import (
    ColumnOrField,
    Name,
    OneOrMore,
    Paths,
    Section,
    free,
    number_if_it_is_one,
    number_or_numbers,
)
from artel.config.schema.cleaning import CleanConfig, DedupConfig
from artel.config.schema.decontamination import Decontaminate
from artel.config.schema.quantities import Bytes, Count, Length, Number, at_most
from artel.config.schema.registered import FormatName, NamingSection
from artel.registry import FORMATS


class SourceConfig(NamingSection):
    registries: ClassVar = {"format": FORMATS}
    path: Paths = Field(
        default=[],
        description="File, glob, folder, http(s)://, s3://BUCKET/KEY or hf://datasets/OWNER/NAME/FILE (globs there "
        "too), or a list of them; {stdlib} is Python's own library folder, {books} that of two novels which "
        "come with artel, {rows} that of rows which a Python program gave.",
    )
    format: FormatName = Field(
        default="auto",
        description="What the files hold; auto goes by suffix, else text (.gz .zst .xz .bz2 may stand behind .jsonl "
        ".json .txt .csv, .gz behind .warc). csv: tables with a header; warc: crawled pages; pairs: csv, jsonl or "
        "parquet with an input and an output; nq: Natural Questions; squad: SQuAD json; chat: conversations in json or "
        "jsonl; preference: prompts with a chosen and a rejected answer; matches: queries with texts that match them "
        "and texts that do not, pairs with a score, or groups of lines that say the same; labels: texts with labels in "
        "csv, jsonl or parquet, or files in folders named by their labels; conll: words and their tags in columns; "
        "entities: json or jsonl with spans of characters, or words with tags (doccano, Label Studio, spaCy, Hugging "
        "Face), and files with conll's endings; dummy: made up.",
    )
    name: str = Field(default="", description="Name of this source in the ledger; by default the path.")
    license: str = free(
        "", "Licence of these texts, as the hub names it: cc-by-4.0. It stands in the model card (artel push)."
    )
    document: Literal["auto", "file", "line", "paragraph"] = Field(
        default="auto",
        description="text, labels (files in folders): what one document is: a file, a line, or what blank lines "
        "separate. auto is a file; but a text of 20 kB or more that is more than data.validation of all the text is "
        "cut into documents of about 4,000 characters, at blank lines, else at ends of lines, so that a share of it "
        "can be held out.",
    )
    encoding: str = Field(
        default="auto", description="Encoding of the files: auto, utf-8, windows-1251, koi8-r, cp866 …"
    )
    field: str = Field(
        default="text", description="jsonl, parquet, csv, labels: the field or column that holds the text."
    )
    second: str = Field(
        default="", description="labels: the field or column of the second text, where texts are pairs."
    )
    label: Annotated[list[str], OneOrMore] = Field(
        default=["label"],
        min_length=1,
        description="labels: the field or column of the label, of a list of labels, or of a number to predict; or "
        "columns of 0 and 1, each named by its label: [toxic, insult].",
    )
    separator: str = Field(
        default="", description="labels: what stands between several labels in one text: ',' or '|'."
    )
    set_field: str = Field(
        default="",
        description="jsonl, parquet, csv: the field that names the set of a record, NAME or OUTER.NAME; the ledger "
        "then counts each set. auto is The Pile's meta.pile_set_name where a record has it.",
    )
    include: list[str] = Field(default=[], description="Only records of these sets are kept (see set_field).")
    exclude: list[str] = Field(default=[], description="Records of these sets are dropped (see set_field).")
    profile: Literal["none", "lib.ru", "gutenberg"] = Field(
        default="none",
        description="Drop the header and footer of a known site: lib.ru (html), gutenberg (text). A file without its "
        "marks is kept whole.",
    )
    extract: Literal["all", "main"] = Field(
        default="all",
        description="html, warc: all the text of a page, or its main text without menus and boilerplate (trafilatura; "
        "needs artel-lm[pages]).",
    )
    weight: Annotated[float | dict[str, Number], BeforeValidator(number_or_numbers)] = Field(
        default=1.0,
        description="How often a training document comes in an epoch: 2 is twice, 0.5 is every second one, chosen by "
        "the run's seed; or by sets, those not named once: {Wikipedia (en): 3, Github: 0.5}.",
    )
    budget_bytes: Bytes | None = Field(
        default=None,
        ge=1,
        description="At most so much training text of this source (2G), chosen at random by the run's seed.",
    )
    pairs: Literal["none", "commas"] = Field(
        default="none",
        description="Make pairs of plain texts: commas (input is the text without its commas, output the text).",
    )
    input: str = Field(default="input", description="pairs: the column or field of the input.")
    output: str = Field(default="output", description="pairs: the column or field of the output.")
    outputs: Name = Field(
        default="", description="pairs: the file that holds the outputs, line for line, when it is another."
    )
    converter: str = Field(
        default="auto",
        description="chat, preference: the form of a row: auto (by its fields), messages, alpaca, sharegpt, dialog, "
        "character, oasst, xlam, completion; or module:function, a function of your own from a row to messages.",
    )
    tools: list[dict[str, Any]] = Field(
        default=[],
        description="chat, preference: functions that the assistant may call, where a row has no `tools` of its own: "
        "[{name: get_weather, description: …, parameters: {type: object, properties: {city: {type: string}}}}].",
    )
    mapping: dict[str, str] = Field(
        default={},
        description="chat, preference, matches: names of the file's fields: {instruction: question, output: answer}.",
    )
    rows: str = Field(
        default="",
        description="Which records are taken, as a slice in quotes: '[:1000]', '[10%:]', '[-500:]'; all when empty.",
    )
    fill: dict[str, str] = Field(
        default={}, description="chat, preference: what stands for {{name}} in the texts: {name: Artel, author: you}."
    )
    words: Annotated[str, ColumnOrField] = Field(
        default="",
        description="conll: the column of the words, from 0 (the first; of .conllu files their FORM); entities: the "
        "field with the list of words (tokens or words), where a row has no text.",
    )
    tags: Annotated[str, ColumnOrField] = Field(
        default="",
        description="conll: the column of the tags, from 0 (-1, the last; of .conllu files the part of speech); "
        "entities: the field with the spans (entities, spans, labels or label), or with the tags of the words "
        "(ner_tags, tags …).",
    )
    tag_names: list[str] = Field(
        default=[],
        description="entities: the names of tags that are numbers, in their order: [O, B-PER, I-PER]. Parquet files "
        "of Hugging Face's datasets bring them along.",
    )
    kind: Literal["text", "questions", "entities", "words"] = Field(
        default="text",
        description="dummy: what to make (text, questions, entities). conll, entities: words, where each word has a "
        "tag of its own (parts of speech); else the tags are of names (B-PER I-PER O).",
    )
    documents: Annotated[Count, at_most(10**8, "nobody needs so much made-up text")] = Field(
        default=1000, ge=1, description="dummy: how many documents to make."
    )

    @property
    def yields(self) -> str:
        """Kind of this source's records: text, pairs, questions, conversations, preferences."""
        kinds = FORMATS[self.format].yields
        kind = self.kind if self.kind in kinds else kinds[0]
        return "pairs" if kind == "text" and self.pairs != "none" else kind

    @model_validator(mode="after")
    def _fits_its_format(self) -> SourceConfig:
        if FORMATS[self.format].has_files and not self.path:
            raise ValueError("a source needs a path (or format: dummy); write path: texts/*.txt")
        if self.extract == "main" and not FORMATS[self.format].is_pages:
            raise ValueError(f"extract: main is for pages and has no meaning for format: {self.format}; remove it")
        if (self.include or self.exclude) and not self.set_field:
            raise ValueError("include and exclude go by sets; write set_field: auto, or the field that names the set")
        if self.include and self.exclude:
            raise ValueError("both include and exclude are given; keep one")
        if self.set_field and not FORMATS[self.format].names_sets:
            raise ValueError(f"set_field has no meaning for format: {self.format}; remove it")
        if self.set_field == "auto" and FORMATS[self.format].is_table:
            raise ValueError(f"set_field: auto has no meaning for format: {self.format}; write the name of the column")
        return self

    @field_validator("tools")
    @classmethod
    def _functions(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for item in value:
            function = item.get("function", item)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(
                    f"{str(item)[:80]} is no function; write {{name: …, description: …, parameters: {{…}}}}"
                )
        return value

    @field_validator("weight")
    @classmethod
    def _weights(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        for name, weight in value.items() if isinstance(value, dict) else [("", value)]:
            if not 0 <= weight <= 1000:
                raise ValueError(f"{name} {weight:g} is no weight; write a number from 0 to 1000: 0.5, 2".strip())
        return value


class ValidationSplit(Section):
    fraction: Number = Field(gt=0, lt=1, description="Share of the documents that is held out.")
    by: Literal["document", "chapter", "label"] = Field(
        default="document",
        description="What stays on one side of the split: a document; or, of a text that is read as many, a chapter: "
        "from one heading to the next, and without headings up to 40,000 characters. label: the share is held out of "
        "the texts of each label, those with the lowest hashes, at least one where there are two.",
    )


def _kind_of_validation(value: Any) -> str:
    if isinstance(value, dict | ValidationSplit):
        return "[section]"
    return "float" if isinstance(value, int | float) and not isinstance(value, bool) else "str"


Validation = Annotated[
    Annotated[float, Tag("float")] | Annotated[str, Tag("str")] | Annotated[ValidationSplit, Tag("[section]")],
    Discriminator(_kind_of_validation),
    BeforeValidator(number_if_it_is_one),
]


class DataConfig(Section):
    sources: list[SourceConfig] = Field(default=[], description="Where the text comes from; one source or many.")
    from_store: Name = Field(
        default="",
        description="A token store that is there already, in place of sources: what artel data import wrote.",
    )
    clean: CleanConfig = Field(
        default=CleanConfig(),
        description="Cleaning rules; each counted in the ledger. Questions and their documents are taken as they are: "
        "answers are located in them by character.",
    )
    dedup: DedupConfig = Field(default=DedupConfig(), description="Which repeated documents are dropped.")
    decontaminate: Decontaminate = Field(
        default=None,
        description="Benchmarks that must not be learned: documents that share 12 words in a row with one of them are "
        "dropped (contaminated), and each is listed with the benchmark's row. A list of files, tasks of "
        "lm-evaluation-harness, or both.",
    )
    validation: Validation = Field(
        default=0.05,
        description="Fraction of documents held out for validation, chosen by hash, at least one; or a path to "
        "validation texts; or {fraction: 0.05, by: chapter}, by which neighbouring pieces of a text stay together. Of "
        "texts with labels the fraction is of each label, unless by: document is written.",
    )
    block: Length = Field(
        default=1024, ge=2, description="Tokens in a block; the longest window or pair where samples stand alone."
    )
    packing: Literal["auto", "concatenate", "best_fit"] = Field(
        default="auto",
        description="How blocks are filled. concatenate: texts are joined and cut every `block` tokens (causal, "
        "masked); samples that stand alone have a row each. best_fit: several whole documents or conversations share a "
        "block where they fit, the rest is filler (Ding et al. 2024), and `train.batch` counts blocks. auto: "
        "concatenate; conversations are packed where two or more share a block on average, a run keeps 50 steps or "
        "more, and the model keeps them apart.",
    )
    document_mask: bool | None = Field(
        default=None,
        description="Whether tokens see only their own document, with positions from 0 in each (causal, masked); null: "
        "yes with best_fit.",
    )
    max_bad: Number = Field(
        default=0.01, ge=0, le=1, description="Largest share of records that cannot be used; each is listed."
    )
    max_document: Bytes = Field(
        default=100_000_000,
        ge=1,
        description="Largest file or line read as one document, in bytes; a larger one is an error.",
    )
    store: Name = Field(
        default="",
        description="Folder for stores, also s3://BUCKET/PREFIX; by default in the cache folder (ARTEL_CACHE).",
        json_schema_extra={"shapes_result": False},
    )

    @field_validator("store")
    @classmethod
    def _writable(cls, value: str) -> str:
        if "://" in value and not value.lower().startswith("s3://"):
            raise ValueError(f"{value} cannot be written to; write a folder, or s3://BUCKET/PREFIX")
        return value

    @field_validator("validation")
    @classmethod
    def _fraction(cls, value: float | str | ValidationSplit) -> float | str | ValidationSplit:
        if isinstance(value, str) and not value.strip():
            raise ValueError("an empty path names nothing; write 0.05, or the path of validation texts")
        if isinstance(value, float) and not 0 <= value < 1:
            raise ValueError(f"{value} is not a fraction from 0 to below 1, nor a path; write 0.05")
        return value

    @model_validator(mode="after")
    def _one_origin(self) -> DataConfig:
        shaping = ("sources", "clean", "dedup", "decontaminate", "validation")
        changed = [name for name in shaping if getattr(self, name) != type(self).model_fields[name].default]
        if self.from_store and changed:
            raise ValueError(
                f"from_store is a finished store, and {', '.join(changed)} would change nothing in it; leave them "
                "out, or from_store"
            )
        return self

    @property
    def held_out(self) -> float | None:
        """The fraction of the documents that is held out; None if validation texts are given by a path."""
        if isinstance(self.validation, ValidationSplit):
            return self.validation.fraction
        return None if isinstance(self.validation, str) else self.validation

    @property
    def by_chapter(self) -> bool:
        """True if chapters of a text stay on one side of the split."""
        return isinstance(self.validation, ValidationSplit) and self.validation.by == "chapter"

    @property
    def may_split_by_label(self) -> bool:
        """True if the fraction is held out of each label, where there are labels; never of all texts."""
        split = self.validation
        if isinstance(split, ValidationSplit):
            return split.by == "label"
        has_labels = bool(self.sources) and all(source.yields == "labels" for source in self.sources)
        return isinstance(split, float) and 0 < split < 1 and has_labels

    def holding_out(self, fraction: float) -> DataConfig:
        """The same, but for the fraction that is held out."""
        split = self.validation
        other = split.model_copy(update={"fraction": fraction}) if isinstance(split, ValidationSplit) else fraction
        return self.model_copy(update={"validation": other})

    @model_validator(mode="after")
    def _fits_its_sources(self) -> DataConfig:
        if self.by_chapter and not any(FORMATS[source.format].is_plain_text for source in self.sources):
            raise ValueError("only plain texts have chapters, and no source is one; write validation: 0.05")
        if isinstance(self.validation, ValidationSplit) and self.validation.by == "label":
            other = next((source.format for source in self.sources if source.yields != "labels"), None)
            if other is not None:
                raise ValueError(f"texts of format: {other} have no labels to split by; write validation: 0.05")
        for number, source in enumerate(self.sources):
            if self.dedup.near is not None and source.yields in ("questions", "preferences"):
                raise ValueError(
                    f"dedup.near would take {source.yields} that share a document or a prompt for copies, and "
                    f"sources.{number} holds such; leave dedup.near out"
                )
        return self
