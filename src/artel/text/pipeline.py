"""Sources to documents: read, clean, drop duplicates, split. Every record is counted.

`clean_shard` does what concerns one record alone. Whether it is a duplicate depends on all others: `read_documents`
keeps digests of everything before it; a token store is made shard by shard, and its duplicates are found afterwards.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import xxhash

from artel.config import ClassifierConfig, CleanConfig, DataConfig, PiiConfig, SourceConfig
from artel.errors import InputError, Problem
from artel.registry import FORMATS
from artel.text.classifier import are_good, check_classifier
from artel.text.cleaning.pii import find_pii, mask_pii
from artel.text.cleaning.quality import drop_reason
from artel.text.cleaning.rules import check_packages, clean, without_lines
from artel.text.decontamination import BenchmarkIndex, check_benchmarks
from artel.text.dedup.exact import RepeatedUnits, SeenDigests
from artel.text.dedup.near import check_near
from artel.text.formats.chat import record_of
from artel.text.ledger import Ledger, describe_drops
from artel.text.reading.subsets import check_sets
from artel.text.records import (
    Conversation,
    Document,
    Dropped,
    Labeled,
    Match,
    Message,
    Pair,
    Preference,
    Question,
    Record,
    Rejected,
    Tagged,
)
from artel.text.sources.find import check_sources
from artel.text.sources.inputs import InputShard, input_shards, source_at
from artel.text.sources.read import read_shard
from artel.text.split import is_held_out, split_hash

# A comma at the end of a word; one inside a number or a name (3,5) is not punctuation that readers would restore. White
# space before it goes too: a double space would give away its position.
_COMMA = re.compile(r"[^\S\n]*,(?=\s|$)")
TEXT_VERSION = 2
"""Increased when the same files and settings give other documents. 2: white space inside a text stays (before: lines
without trailing spaces, at most two blank ones), encodings are judged by all of a file, tables without quoting, form
feeds end lines, padded rows of conversations lose their nulls, lists of marks are no labels."""

# Characters of records in which n-grams of benchmarks are looked for together.
_TOGETHER = 50_000


@dataclass(frozen=True, slots=True)
class CleanedRecord:
    """A record that is cleaned and passed every rule that concerns it alone."""

    document: Document
    digest: bytes
    """128 bits; equal records have equal digests."""
    split_hash: int
    """The hash that chooses the split; 0 if validation texts are given by a path."""
    changed: Counter[str] = field(default_factory=Counter)
    """What was done to it that the user should know, by name."""
    has_new_text: bool = True
    """False if too little text is left without what earlier documents have."""


def clean_shard(
    shard: InputShard,
    data: DataConfig,
    ledger: Ledger,
    units: RepeatedUnits | None = None,
    benchmarks: BenchmarkIndex | None = None,
) -> Iterator[CleanedRecord]:
    """Yield the cleaned records of an input shard. `ledger` counts those that are dropped for what they are.

    `units` removes the lines or paragraphs that occurred earlier. Documents that share n-grams with `benchmarks` are
    dropped, but for validation texts given by a path, which nothing is learned from.
    """
    records = _passed(shard, data, ledger)
    if data.clean.classifier is not None:
        records = _good(records, data.clean.classifier, ledger)
    if benchmarks is not None and shard.key != "data.validation":
        records = _uncontaminated(records, benchmarks, ledger)
    for record, changed in records:
        digest = xxhash.xxh3_128_digest(_identity(record).encode())
        has_new_text = True
        document, hashed = _split(record, shard.key, data)  # by its whole text: not by what stood before it
        if units is not None and record.fields is None:
            record = record._replace(text=units.without(record.text, changed))
            has_new_text = len(record.text) >= data.clean.minimum
            document = replace(document, record=record)
        yield CleanedRecord(document, digest, hashed, changed, has_new_text)


def _passed(shard: InputShard, data: DataConfig, ledger: Ledger) -> Iterator[tuple[Record, Counter[str]]]:
    """Yield each cleaned record that no rule drops, and what was changed in it."""
    source = source_at(data, shard.key)
    for item in read_shard(shard, data, ledger.add_encoding):
        ledger.read(item.set_name)
        if isinstance(item, Rejected):
            ledger.reject(item)
            continue
        if isinstance(item, Dropped):
            ledger.drop(item.set_name, item.reason)
            continue
        changed: Counter[str] = Counter()
        record = _cleaned(item, source, data.clean, changed)
        reason = drop_reason(record, data.clean)
        if reason is None and isinstance(record.fields, Preference) and record.fields.chosen == record.fields.rejected:
            reason = "equal_answers"  # they differed before cleaning
        if reason is None and data.clean.pii is not None and _has_pii(record, data.clean.pii):
            reason = "pii"
        if reason is not None:
            ledger.drop(record.set_name, reason)
        else:
            yield record, changed


def _good(
    records: Iterable[tuple[Record, Counter[str]]], rule: ClassifierConfig, ledger: Ledger
) -> Iterator[tuple[Record, Counter[str]]]:
    """The records that pass the run's classifier, which says nothing of questions and of texts with marked spans."""
    for together in _groups(records):
        texts = ["" if isinstance(record.fields, Question | Tagged) else record.text for record, _ in together]
        for (record, changed), text, is_good in zip(together, texts, are_good(texts, rule), strict=True):
            if text and not is_good:
                ledger.drop(record.set_name, "quality")
            else:
                yield record, changed


def _has_pii(record: Record, rules: PiiConfig) -> bool:
    """True if a record has personal data of a kind that drops it."""
    if not rules.drop or isinstance(record.fields, Question | Tagged):
        return False
    texts = (record.fields.input, record.text) if isinstance(record.fields, Pair) else (record.text,)
    return any(find_pii(text, rules.drop) for text in texts)


def _uncontaminated(
    records: Iterable[tuple[Record, Counter[str]]], benchmarks: BenchmarkIndex, ledger: Ledger
) -> Iterator[tuple[Record, Counter[str]]]:
    """The records that share nothing with benchmarks. Some are looked through together, in the order they come."""
    for together in _groups(records):
        for (record, changed), contaminated in zip(
            together, benchmarks.find([record for record, _ in together]), strict=True
        ):
            if contaminated is not None:
                ledger.contaminate(contaminated)
            else:
                yield record, changed


def _groups(records: Iterable[tuple[Record, Counter[str]]]) -> Iterator[list[tuple[Record, Counter[str]]]]:
    """The records in groups of about _TOGETHER characters."""
    group, characters = [], 0
    for record, changed in records:
        group.append((record, changed))
        characters += len(record.text)
        if characters >= _TOGETHER:
            yield group
            group, characters = [], 0
    if group:
        yield group


def read_documents(
    data: DataConfig, ledger: Ledger, max_bytes: int | None = None, benchmarks: BenchmarkIndex | None = None
) -> Iterator[Document]:
    """Yield every document of a run once, in the order of its sources; memory holds only digests.

    Validation texts given by a path come first, so that of equal documents the training one is the duplicate. With
    `max_bytes` about that much text is read, from each file in proportion to its size. Near-duplicates are kept. Raises
    InputError before anything is read (`check_text`), and if too much was unreadable or nothing was left.
    """
    check_text(data)
    seen = SeenDigests()
    units = RepeatedUnits(data.dedup.lines) if data.dedup.lines != "none" else None
    shards = input_shards(data)
    total = sum(shard.size for shard in shards)
    reads_all = max_bytes is None or total <= max_bytes
    problems: list[Problem] = []
    for key, source_shards in groupby(shards, key=lambda shard: shard.key):
        source_ledger = Ledger(on_reject=ledger.on_reject, on_contaminated=ledger.on_contaminated)
        for shard in source_shards:
            remaining = math.inf if reads_all or not shard.size else (max_bytes or 0) * shard.size / total
            for cleaned in clean_shard(shard, data, source_ledger, units, benchmarks):
                record = cleaned.document.record
                if data.dedup.exact and not seen.add(cleaned.digest):
                    source_ledger.drop(record.set_name, "duplicate")
                elif not cleaned.has_new_text:
                    source_ledger.drop(record.set_name, "repeated")
                else:
                    source_ledger.keep(cleaned.document)
                    source_ledger.changed.update(cleaned.changed)
                    yield cleaned.document
                    remaining -= len(record.text.encode())
                    if remaining <= 0:
                        break
        problems += check_sets(source_at(data, key), key, set(source_ledger.sets))
        ledger.add(source_ledger)
    if reads_all:
        if problems:
            raise InputError(problems)
        check_ledger(data, ledger)


def check_text(data: DataConfig, tell: Callable[[str], None] = lambda _: None) -> None:
    """Raise InputError for everything wrong with the sources, or a missing package, before any text is read.

    `tell` is called about sources that cannot be reached and are known from an earlier start.
    """
    check_sources(data, tell)
    check_packages(data.clean)
    if data.clean.classifier is not None:
        check_classifier(data.clean.classifier)
    check_benchmarks(data)
    if data.dedup.near is not None:
        check_near()


def check_ledger(data: DataConfig, ledger: Ledger) -> None:
    """Raise InputError if too much was unreadable, nothing was left, or nothing was left for training.

    The ledger gets a note where over a third was dropped for its length.
    """
    total = ledger.total
    ledger.check_rejected(data.max_bad)
    if total.kept == 0:
        dropped = describe_drops(total.dropped) or "none were there"
        raise InputError.at("data.sources", f"no document is left: {dropped}", _remedy(data, total.dropped))
    if total.splits["train"]["documents"] == 0 and data.held_out != 1.0:  # with 1 all of it is for evaluation
        what = "no document is left for training: all fell into the validation part"
        raise InputError.at("data.validation", what, f"write a smaller data.validation, or {more_documents(data)}")
    for reason, (what, fix) in _LENGTHS.items():
        if total.dropped[reason] > total.read * _MANY:
            count = f"{total.dropped[reason]:,} of {total.read:,} documents"
            ledger.notes.append(f"{count} are dropped, since {what.format(block=data.block)}: {fix}")


_MANY = 1 / 3
_LENGTHS = {
    "longer_than_block": ("they have more than {block:,} tokens", "write a larger data.block, or give shorter texts"),
    "longer_than_target": ("their outputs are too long", "write a larger seq2seq.target, or give shorter outputs"),
}

_REMEDIES = {
    "control_token": "take the tokens that the chat template writes out of the texts, or write another chat.template",
    "unanswerable": "give questions with answers",
    "not_annotated": "annotate the texts, or give others",
    "excluded_set": "change include or exclude of data.sources",
    "answer_longer_than_window": "write a larger data.block, or give shorter answers",
    "question_too_long": "write a larger span_qa.question, or give shorter questions",
}


def _remedy(data: DataConfig, dropped: Counter[str]) -> str:
    """What to write where nothing is left, by the reason for which most was dropped."""
    reason = max(dropped, key=lambda name: dropped[name], default="")
    if reason == "longer_than_block":
        return f"write a larger data.block than {data.block:,}, or give shorter texts"
    if reason == "longer_than_target":
        return "write a larger seq2seq.target, or give shorter outputs"
    if reason in ("", "empty", "no_main_text"):
        return "give files with text in them"
    other = "give other documents, or change the key that drops them (docs/run-file.md)"
    return _REMEDIES.get(reason, other)


def more_documents(data: DataConfig) -> str:
    """A remedy: how to get more documents from sources of this kind."""
    for number, source in enumerate(data.sources):
        if source.yields == "text" and FORMATS[source.format].is_plain_text and source.document != "line":
            cuts = "line" if source.document == "paragraph" else "paragraph, or line where no line between is empty"
            return f"cut the text into more documents (data.sources.{number}.document={cuts})"
    kinds = sorted({"documents" if source.yields == "text" else source.yields for source in data.sources})
    return f"give more {' and '.join(kinds)}"


def _split(record: Record, key: str, data: DataConfig) -> tuple[Document, int]:
    if data.held_out is None:
        return Document(record, "validation" if key == "data.validation" else "train"), 0
    hashed = split_hash(record.group or record.text)
    return Document(record, "validation" if is_held_out(hashed, data.held_out) else "train"), hashed


def _identity(record: Record) -> str:
    """The text by which duplicates are found.

    The same question with another answer is no duplicate; nor is the same text with other roles, or the same answer
    rejected instead of chosen.
    """
    if isinstance(record.fields, Pair | Conversation | Preference | Labeled | Tagged | Match):
        return repr(record.fields)
    if isinstance(record.fields, Question):
        return f"{record.text}\n{record.fields.answer_class} {record.fields.answers}"
    return record.text


def _cleaned(record: Record, source: SourceConfig, rules: CleanConfig, changed: Counter[str]) -> Record:
    if isinstance(record.fields, Question | Tagged):  # their answers and names are spans of their characters
        return record
    if isinstance(record.fields, Labeled | Match):
        return _cleaned_texts(record, record.fields, rules, changed)
    if isinstance(record.fields, Conversation | Preference):
        return _cleaned_messages(record, record.fields, rules, changed)
    text = _cleaned_text(record.text, rules, changed)
    if isinstance(record.fields, Pair):
        pair = Pair(_cleaned_text(record.fields.input, rules, changed), text)
    elif source.pairs == "commas":
        pair = Pair(without_commas(text), text)
        return record._replace(text=text, fields=pair, group=record.group or pair.input)
    else:
        return Record(without_lines(text, rules, changed), record.origin, record.set_name, None, record.group)
    return record._replace(text=text, fields=pair, group=pair.input)


def _cleaned_text(text: str, rules: CleanConfig, changed: Counter[str]) -> str:
    text = clean(text, rules, changed)
    return mask_pii(text, rules.pii, changed) if rules.pii is not None and rules.pii.mask else text


def _cleaned_texts(record: Record, fields: Labeled | Match, rules: CleanConfig, changed: Counter[str]) -> Record:
    """The record with each of its texts cleaned; if nothing is left of one, nothing is left of the record."""
    texts = tuple(_cleaned_text(text, rules, changed) for text in fields.texts)
    group = texts[0] if record.group == fields.texts[0] else record.group
    return record._replace(text="\n".join(texts) if all(texts) else "", fields=fields.with_texts(texts), group=group)


def _masked(value: Any, rules: CleanConfig, changed: Counter[str]) -> Any:
    """The arguments of a call with personal data masked; they are no text that other rules could clean."""
    if rules.pii is None or not rules.pii.mask:
        return value
    if isinstance(value, str):
        return mask_pii(value, rules.pii, changed)
    if isinstance(value, list):
        return [_masked(item, rules, changed) for item in value]
    if isinstance(value, dict):
        return {name: _masked(item, rules, changed) for name, item in value.items()}
    return value


def _cleaned_messages(
    record: Record, fields: Conversation | Preference, rules: CleanConfig, changed: Counter[str]
) -> Record:
    """The record with its messages cleaned.

    If nothing is left of a message, nothing is left of the record: the messages around it would answer what was not
    said.
    """

    def cleaned(message: Message) -> Message:
        content, thought = (_cleaned_text(text, rules, changed) for text in (message.content, message.thought))
        calls = tuple(replace(call, arguments=_masked(call.arguments, rules, changed)) for call in message.tool_calls)
        return replace(message, content=content, thought=thought, tool_calls=calls)

    if isinstance(fields, Conversation):
        changed.update(fields.counted)
        messages = tuple(map(cleaned, fields.messages))
        fields = Conversation(messages, fields.tools)
    else:
        prompt = tuple(map(cleaned, fields.prompt))
        chosen, rejected = (answer and cleaned(answer) for answer in (fields.chosen, fields.rejected))
        messages = (*prompt, *(answer for answer in (chosen, rejected) if answer is not None))
        fields = replace(fields, prompt=prompt, chosen=chosen, rejected=rejected)
    if any(message.is_empty for message in messages):
        return record._replace(text="")
    return record_of(fields, record.origin, record.set_name)


def without_commas(text: str) -> str:
    """The text without the commas before white space and at its end."""
    return _COMMA.sub("", text)
