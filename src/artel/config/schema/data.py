"""The section `data`: sources, splits and blocks."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from artel.config.schema.base import (
    ColumnOrField,
    Name,
    OneOrMore,
    Paths,
    Section,
    parse_if_number,
    parse_unless_mapping,
    runtime_only,
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
        description="File, glob, folder or URL (http(s)://, s3://BUCKET/KEY, hf://datasets/OWNER/NAME/FILE; globs "
        "too), or a list of them. {stdlib} is the folder of Python's standard library, {books} that of two novels "
        "shipped with artel, {rows} that of rows passed from Python.",
    )
    format: FormatName = Field(
        default="auto",
        description="Format of the files. auto: by suffix, otherwise text (.gz .zst .xz .bz2 may follow .jsonl .json "
        ".txt .csv; .gz may follow .warc). csv: tables with a header; warc: crawled pages; pairs: csv, jsonl or "
        "parquet with an input and an output; nq: Natural Questions; squad: SQuAD json; chat: conversations in json or "
        "jsonl; preference: prompts with a chosen and a rejected answer; matches: queries with positive and negative "
        "texts, pairs with a score, or groups of lines with the same meaning; prompts: prompts to answer, with columns "
        "for rewards; labels: texts with labels in csv, jsonl or parquet, or files in folders named by their labels; "
        "conll: words and tags in columns; entities: json or jsonl with character spans or tagged words (doccano, "
        "Label Studio, spaCy, Hugging Face), and files with conll's suffixes; gym: prompts of a task of reasoning-gym; "
        "dummy: generated.",
    )
    name: str = Field(default="", description="Name of this source in the ledger (default: the path).")
    license: str = runtime_only(
        "", "License of these texts by its name on the hub, e.g. cc-by-4.0. Written to the model card (artel push)."
    )
    document: Literal["auto", "file", "line", "paragraph"] = Field(
        default="auto",
        description="text, labels (files in folders): unit of a document: a file, a line, or a paragraph (separated by "
        "blank lines). auto: a file; but a text of at least 20 kB that is more than data.validation of all text is "
        "cut into documents of about 4,000 characters, at blank lines or else at line ends, so that a fraction can be "
        "held out.",
    )
    encoding: str = Field(
        default="auto", description="Encoding of the files: auto, utf-8, windows-1251, koi8-r, cp866 …"
    )
    field: str = Field(default="text", description="jsonl, parquet, csv, labels: field or column of the text.")
    second: str = Field(default="", description="labels: field or column of the second text, if texts are pairs.")
    label: Annotated[list[str], OneOrMore] = Field(
        default=["label"],
        min_length=1,
        description="labels: field or column of a label, a list of labels or a number to predict; or columns of 0 and "
        "1 named by their labels, e.g. [toxic, insult].",
    )
    separator: str = Field(
        default="", description="labels: separator of several labels in one string, e.g. ',' or '|'."
    )
    set_field: str = Field(
        default="",
        description="jsonl, parquet, csv: field with the name of a record's set, NAME or OUTER.NAME; the ledger counts "
        "each set. auto: The Pile's meta.pile_set_name, if a record has it.",
    )
    include: list[str] = Field(default=[], description="Keep only records of these sets (see set_field).")
    exclude: list[str] = Field(default=[], description="Drop records of these sets (see set_field).")
    profile: Literal["none", "lib.ru", "gutenberg"] = Field(
        default="none",
        description="Remove the header and footer of a known site: lib.ru (html), gutenberg (text). Files without its "
        "markers are kept unchanged.",
    )
    extract: Literal["all", "main"] = Field(
        default="all",
        description="html, warc: extract all text of a page, or the main text without menus and boilerplate "
        "(trafilatura; needs artel-lm[pages]).",
    )
    weight: Annotated[float | dict[str, Number], BeforeValidator(parse_unless_mapping)] = Field(
        default=1.0,
        description="Occurrences of each training document per epoch: 2 is twice, 0.5 every second document, chosen by "
        "the run's seed. Or a weight per set, e.g. {Wikipedia (en): 3, Github: 0.5}; other sets have weight 1.",
    )
    budget_bytes: Bytes | None = Field(
        default=None, ge=1, description="Maximum training text of this source, e.g. 2G, sampled by the run's seed."
    )
    pairs: Literal["none", "commas"] = Field(
        default="none",
        description="Create pairs from plain texts. commas: the input is the text without commas, the output the text.",
    )
    input: str = Field(default="input", description="pairs: column or field of the input.")
    output: str = Field(default="output", description="pairs: column or field of the output.")
    outputs: Name = Field(default="", description="pairs: file with the outputs, line by line, if it is separate.")
    converter: str = Field(
        default="auto",
        description="chat, preference, prompts: schema of the rows: auto (by its fields), messages, alpaca, sharegpt, "
        "dialog, character, oasst, xlam, completion; or module:function, your function from a row to messages.",
    )
    tools: list[dict[str, Any]] = Field(
        default=[],
        description="chat, preference, prompts: functions that the assistant may call, for rows without their own "
        "`tools`: [{name: get_weather, description: …, parameters: {type: object, properties: {city: {type: "
        "string}}}}].",
    )
    mapping: dict[str, str] = Field(
        default={},
        description="chat, preference, prompts, matches: field names in the file, e.g. {instruction: question, output: "
        "answer}.",
    )
    rows: str = Field(
        default="",
        description="Records to use, as a quoted slice, e.g. '[:1000]', '[10%:]' or '[-500:]' (default: all).",
    )
    fill: dict[str, str] = Field(
        default={},
        description="chat, preference, prompts: values for {{name}} in the texts, e.g. {name: Artel, author: you}.",
    )
    words: Annotated[str, ColumnOrField] = Field(
        default="",
        description="conll: column of the words, counted from 0 (default: the first; in .conllu files FORM); entities: "
        "field with the list of words (default: tokens or words), if a row has no text.",
    )
    tags: Annotated[str, ColumnOrField] = Field(
        default="",
        description="conll: column of the tags, counted from 0 (default: -1, the last; in .conllu files the part of "
        "speech); entities: field with the spans (default: entities, spans, labels or label) or with the tags of the "
        "words (default: ner_tags, tags …).",
    )
    tag_names: list[str] = Field(
        default=[],
        description="entities: names of numeric tags in their order, e.g. [O, B-PER, I-PER]. Parquet files of Hugging "
        "Face datasets contain them.",
    )
    kind: Literal["text", "questions", "entities", "words"] = Field(
        default="text",
        description="dummy: kind of records to generate (text, questions, entities). conll, entities: words if each "
        "word has its own tag (e.g. part of speech); otherwise tags mark entities (B-PER I-PER O).",
    )
    documents: Annotated[Count, at_most(10**8, "nobody needs so much made-up text")] = Field(
        default=1000, ge=1, description="dummy: number of documents to generate."
    )

    @property
    def yields(self) -> str:
        """Kind of this source's records: text, pairs, questions, conversations, preferences, prompts …"""
        kinds = FORMATS[self.format].yields
        kind = self.kind if self.kind in kinds else kinds[0]
        return "pairs" if kind == "text" and self.pairs != "none" else kind

    @model_validator(mode="after")
    def _check_format(self) -> SourceConfig:
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
    def _check_tools(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for item in value:
            function = item.get("function", item)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(
                    f"{str(item)[:80]} is not a function; write {{name: …, description: …, parameters: {{…}}}}"
                )
        return value

    @field_validator("weight")
    @classmethod
    def _check_weight(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        for name, weight in value.items() if isinstance(value, dict) else [("", value)]:
            if not 0 <= weight <= 1000:
                raise ValueError(
                    f"{name} {weight:g} is not a weight; write a number from 0 to 1000, e.g. 0.5 or 2".strip()
                )
        return value


class ValidationSplit(Section):
    fraction: Number = Field(gt=0, lt=1, description="Fraction of the documents to hold out.")
    by: Literal["document", "chapter", "label"] = Field(
        default="document",
        description="Unit of the split: a document, or a chapter of a text that is read as many documents (from one "
        "heading to the next; without headings up to 40,000 characters). label: hold out the fraction of each label's "
        "texts, those with the lowest hashes; at least one if there are two.",
    )


def _validation_tag(value: Any) -> str:
    if isinstance(value, dict | ValidationSplit):
        return "[section]"
    return "float" if isinstance(value, int | float) and not isinstance(value, bool) else "str"


Validation = Annotated[
    Annotated[float, Tag("float")] | Annotated[str, Tag("str")] | Annotated[ValidationSplit, Tag("[section]")],
    Discriminator(_validation_tag),
    BeforeValidator(parse_if_number),
]


class DataConfig(Section):
    sources: list[SourceConfig] = Field(default=[], description="Sources of the text.")
    from_store: Name = Field(
        default="", description="Existing token store to use instead of sources, as written by artel data import."
    )
    clean: CleanConfig = Field(
        default=CleanConfig(),
        description="Cleaning rules, each counted in the ledger. Questions and their documents are not cleaned, "
        "because answers are located by character.",
    )
    dedup: DedupConfig = Field(default=DedupConfig(), description="Removal of repeated documents and lines.")
    decontaminate: Decontaminate = Field(
        default=None,
        description="Benchmarks that must not be in the training text: documents that share 12 consecutive words with "
        "one are dropped (contaminated) and listed with the benchmark's row. A list of files, tasks of "
        "lm-evaluation-harness, or both.",
    )
    validation: Validation = Field(
        default=0.05,
        description="Fraction of documents to hold out for validation, chosen by hash, at least one; or the path of "
        "validation texts; or {fraction: 0.05, by: chapter}, which keeps neighboring pieces of a text together. For "
        "texts with labels, the fraction applies to each label, unless by: document is set.",
    )
    block: Length = Field(
        default=1024, ge=2, description="Tokens per block; for samples that are not packed, the maximum length."
    )
    packing: Literal["auto", "concatenate", "best_fit"] = Field(
        default="auto",
        description="How to fill blocks. concatenate: join texts and cut them every `block` tokens (causal, masked); "
        "other samples have a row each. best_fit: pack several complete documents or conversations into a block and "
        "pad the rest (Ding et al. 2024); `train.batch` then counts blocks. auto: concatenate; conversations are "
        "packed if at least two share a block on average, the run keeps at least 50 steps, and the model can separate "
        "them.",
    )
    document_mask: bool | None = Field(
        default=None,
        description="Restrict attention to the token's own document, with positions from 0 in each (causal, masked); "
        "null: true with best_fit.",
    )
    max_bad: Number = Field(
        default=0.01, ge=0, le=1, description="Maximum fraction of invalid records; each is listed."
    )
    max_document: Bytes = Field(
        default=100_000_000,
        ge=1,
        description="Maximum bytes of a file or line read as one document; a larger one is an error.",
    )
    store: Name = Field(
        default="",
        description="Folder for token stores, or s3://BUCKET/PREFIX (default: in the cache folder, ARTEL_CACHE).",
        json_schema_extra={"shapes_result": False},
    )

    @field_validator("store")
    @classmethod
    def _check_store(cls, value: str) -> str:
        if "://" in value and not value.lower().startswith("s3://"):
            raise ValueError(f"{value} is not writable; write a folder, or s3://BUCKET/PREFIX")
        return value

    @field_validator("validation")
    @classmethod
    def _check_validation(cls, value: float | str | ValidationSplit) -> float | str | ValidationSplit:
        if isinstance(value, str) and not value.strip():
            raise ValueError("the path is empty; write 0.05, or the path of validation texts")
        if isinstance(value, float) and not 0 <= value < 1:
            raise ValueError(f"{value} is neither a fraction (at least 0, below 1) nor a path; write e.g. 0.05")
        return value

    @model_validator(mode="after")
    def _check_origin(self) -> DataConfig:
        shaping = ("sources", "clean", "dedup", "decontaminate", "validation")
        changed = [name for name in shaping if getattr(self, name) != type(self).model_fields[name].default]
        if self.from_store and changed:
            raise ValueError(
                f"from_store is an existing store, which {', '.join(changed)} would not change; remove them, or "
                "from_store"
            )
        return self

    @property
    def held_out(self) -> float | None:
        """Fraction of the documents to hold out, or None if validation texts are given by a path."""
        if isinstance(self.validation, ValidationSplit):
            return self.validation.fraction
        return None if isinstance(self.validation, str) else self.validation

    @property
    def splits_by_chapter(self) -> bool:
        """True if chapters of a text stay on one side of the split."""
        return isinstance(self.validation, ValidationSplit) and self.validation.by == "chapter"

    @property
    def may_split_by_label(self) -> bool:
        """True if the fraction is held out of each label, if there are labels, and not of all texts."""
        split = self.validation
        if isinstance(split, ValidationSplit):
            return split.by == "label"
        has_labels = bool(self.sources) and all(source.yields == "labels" for source in self.sources)
        return isinstance(split, float) and 0 < split < 1 and has_labels

    def with_held_out(self, fraction: float) -> DataConfig:
        """Return a copy with another fraction to hold out."""
        split = self.validation
        new_split = split.model_copy(update={"fraction": fraction}) if isinstance(split, ValidationSplit) else fraction
        return self.model_copy(update={"validation": new_split})

    @model_validator(mode="after")
    def _check_sources(self) -> DataConfig:
        if self.splits_by_chapter and not any(FORMATS[source.format].is_plain_text for source in self.sources):
            raise ValueError("by: chapter needs plain text, but no source has any; write validation: 0.05")
        if isinstance(self.validation, ValidationSplit) and self.validation.by == "label":
            other_format = next((source.format for source in self.sources if source.yields != "labels"), None)
            if other_format is not None:
                raise ValueError(f"by: label needs labels, but format: {other_format} has none; write validation: 0.05")
        for index, source in enumerate(self.sources):
            if self.dedup.near is not None and source.yields in ("questions", "preferences"):
                raise ValueError(
                    f"dedup.near would drop {source.yields} that share a document or a prompt, which "
                    f"sources.{index} contains; remove dedup.near"
                )
        return self
