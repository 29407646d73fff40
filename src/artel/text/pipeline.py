"""Turn sources into documents: read, clean, deduplicate, split. Every record is counted.

`clean_shard` applies the rules for single records. Finding duplicates needs all records: `read_documents` keeps the
digests of all earlier ones. A token store is built shard by shard, and its duplicates are found afterwards.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import xxhash

from artel.config import ClassifierConfig, CleanConfig, DataConfig, PiiConfig, SourceConfig
from artel.errors import InputError, Problem
from artel.messages import Phrase
from artel.registry import FORMATS
from artel.text.classifier import apply_classifier, check_classifier
from artel.text.cleaning.pii import find_pii, mask_pii
from artel.text.cleaning.quality import drop_reason
from artel.text.cleaning.rules import check_packages, clean, drop_lines
from artel.text.decontamination import BenchmarkIndex, check_benchmarks
from artel.text.dedup.exact import RepeatedUnits
from artel.text.dedup.near import check_near
from artel.text.formats.chat import build_record
from artel.text.ledger import Ledger, describe_drops
from artel.text.reading.subsets import check_sets
from artel.text.records import (
    Conversation,
    Document,
    DroppedRecord,
    LabeledText,
    Match,
    Message,
    Pair,
    Preference,
    Prompt,
    Question,
    Record,
    Rejected,
    TaggedText,
)
from artel.text.sources.find import check_sources
from artel.text.sources.inputs import InputShard, find_source, input_shards, read_shard
from artel.text.split import is_held_out, split_hash

TEXT_VERSION = 2
"""Part of the store key: increase it when the same files and settings give other documents."""

# Characters that are classified, or checked for benchmark n-grams, at a time.
_BATCH_CHARACTERS = 50_000

# A comma at the end of a word, with the white space before it: a double space would give away its position. Commas
# inside numbers or names (3,5) are not punctuation to restore.
_COMMA = re.compile(r"[^\S\n]*,(?=\s|$)")


@dataclass(frozen=True, slots=True)
class CleanedRecord:
    """A cleaned record that passed every rule for single records."""

    document: Document
    digest: bytes
    """128 bits; equal records have equal digests."""
    split_hash: int
    """The hash that chooses the split; 0 if validation texts are given by a path."""
    changes: Counter[str] = field(default_factory=Counter)
    """Changes that the user should know about, by name."""
    has_new_text: bool = True
    """False if too little text is left after removing text that occurred in earlier documents."""


def clean_shard(
    shard: InputShard,
    data: DataConfig,
    ledger: Ledger,
    units: RepeatedUnits | None = None,
    benchmarks: BenchmarkIndex | None = None,
) -> Iterator[CleanedRecord]:
    """Yield the cleaned records of an input shard. `ledger` counts the records that are dropped.

    `units` removes lines or paragraphs that occurred earlier. Documents that share n-grams with `benchmarks` are
    dropped, except for validation texts given by a path, which are not trained on.
    """
    records = _accepted_records(shard, data, ledger)
    if data.clean.classifier is not None:
        records = _good_records(records, data.clean.classifier, ledger)
    if benchmarks is not None and shard.key != "data.validation":
        records = _uncontaminated_records(records, benchmarks, ledger)
    for record, changes in records:
        digest = xxhash.xxh3_128_digest(_text_to_compare(record).encode())
        has_new_text = True
        document, hash_value = _assign_split(record, shard.key, data)  # by its full text, before repeats are removed
        if units is not None and record.fields is None:
            record = record._replace(text=units.remove_repeats(record.text, changes))
            has_new_text = len(record.text) >= data.clean.minimum
            document = replace(document, record=record)
        yield CleanedRecord(document, digest, hash_value, changes, has_new_text)


def _accepted_records(shard: InputShard, data: DataConfig, ledger: Ledger) -> Iterator[tuple[Record, Counter[str]]]:
    """Yield each cleaned record that no rule drops, with its changes."""
    source = find_source(data, shard.key)
    for item in read_shard(shard, data, ledger.add_encoding):
        ledger.read(item.set_name)
        if isinstance(item, Rejected):
            ledger.reject(item)
            continue
        if isinstance(item, DroppedRecord):
            ledger.drop(item.set_name, item.reason)
            continue
        changes: Counter[str] = Counter()
        record = _clean_record(item, source, data.clean, changes)
        reason = drop_reason(record, data.clean)
        if reason is None and isinstance(record.fields, Preference) and record.fields.chosen == record.fields.rejected:
            reason = "equal_answers"  # they differed before cleaning
        if reason is None and data.clean.pii is not None and _has_pii(record, data.clean.pii):
            reason = "pii"
        if reason is not None:
            ledger.drop(record.set_name, reason)
        else:
            yield record, changes


def _good_records(
    records: Iterable[tuple[Record, Counter[str]]], rule: ClassifierConfig, ledger: Ledger
) -> Iterator[tuple[Record, Counter[str]]]:
    """Yield the records that pass the classifier. Questions and texts with spans are not classified."""
    for batch in _group_batches(records):
        texts = ["" if isinstance(record.fields, Question | TaggedText) else record.text for record, _ in batch]
        for (record, changes), text, is_good in zip(batch, texts, apply_classifier(texts, rule), strict=True):
            if text and not is_good:
                ledger.drop(record.set_name, "quality")
            else:
                yield record, changes


def _has_pii(record: Record, rules: PiiConfig) -> bool:
    """True if a record has personal data of the kinds that drop it."""
    if not rules.drop or isinstance(record.fields, Question | TaggedText):
        return False
    texts = (record.fields.input, record.text) if isinstance(record.fields, Pair) else (record.text,)
    return any(find_pii(text, rules.drop) for text in texts)


def _uncontaminated_records(
    records: Iterable[tuple[Record, Counter[str]]], benchmarks: BenchmarkIndex, ledger: Ledger
) -> Iterator[tuple[Record, Counter[str]]]:
    """Yield the records that share no n-grams with benchmarks."""
    for batch in _group_batches(records):
        matches = benchmarks.find([record for record, _ in batch])
        for (record, changes), contaminated in zip(batch, matches, strict=True):
            if contaminated is not None:
                ledger.drop_contaminated(contaminated)
            else:
                yield record, changes


def _group_batches(records: Iterable[tuple[Record, Counter[str]]]) -> Iterator[list[tuple[Record, Counter[str]]]]:
    """Group records into batches of about _BATCH_CHARACTERS characters."""
    batch, num_characters = [], 0
    for record, changes in records:
        batch.append((record, changes))
        num_characters += len(record.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def read_documents(
    data: DataConfig, ledger: Ledger, max_bytes: int | None = None, benchmarks: BenchmarkIndex | None = None
) -> Iterator[Document]:
    """Yield every document of a run once, in the order of its sources. Memory holds only digests.

    Validation texts given by a path come first, so that a training document equal to one is the duplicate. `max_bytes`
    limits the text that is read, from each file in proportion to its size. Near-duplicates are kept. Raise InputError
    before reading (`check_text`), and if too much is unreadable or nothing is left.
    """
    check_text(data)
    seen: set[bytes] = set()
    units = RepeatedUnits(data.dedup.lines) if data.dedup.lines != "none" else None
    shards = input_shards(data)
    total_bytes = sum(shard.size for shard in shards)
    reads_all = max_bytes is None or total_bytes <= max_bytes
    problems: list[Problem] = []
    for key, source_shards in groupby(shards, key=lambda shard: shard.key):
        source_ledger = Ledger(on_reject=ledger.on_reject, on_contaminated=ledger.on_contaminated)
        for shard in source_shards:
            remaining_bytes = math.inf if reads_all or not shard.size else (max_bytes or 0) * shard.size / total_bytes
            for cleaned in clean_shard(shard, data, source_ledger, units, benchmarks):
                record = cleaned.document.record
                is_duplicate = cleaned.digest in seen
                if data.dedup.exact:
                    seen.add(cleaned.digest)
                if is_duplicate:
                    source_ledger.drop(record.set_name, "duplicate")
                elif not cleaned.has_new_text:
                    source_ledger.drop(record.set_name, "repeated")
                else:
                    source_ledger.keep(cleaned.document)
                    source_ledger.changes.update(cleaned.changes)
                    yield cleaned.document
                    remaining_bytes -= len(record.text.encode())
                    if remaining_bytes <= 0:
                        break
        problems += check_sets(find_source(data, key), key, set(source_ledger.sets))
        ledger.add(source_ledger)
    if reads_all:
        if problems:
            raise InputError(problems)
        check_ledger(data, ledger)


def check_text(data: DataConfig) -> None:
    """Raise InputError with all problems of the sources, or for a missing package, before any text is read."""
    check_sources(data)
    check_packages(data.clean)
    if data.clean.classifier is not None:
        check_classifier(data.clean.classifier)
    check_benchmarks(data)
    if data.dedup.near is not None:
        check_near()


def check_ledger(data: DataConfig, ledger: Ledger) -> None:
    """Raise InputError if too much was unreadable or nothing is left to train on. Add notes about drops for length."""
    total = ledger.total
    ledger.check_rejected(data.max_bad)
    if total.kept == 0:
        dropped = describe_drops(total.dropped) or "the sources have none"
        raise InputError.at("data.sources", f"no document is left: {dropped}", _suggest_fix(data, total.dropped))
    if total.splits["train"]["documents"] == 0 and data.held_out != 1.0:  # with 1, all documents are for evaluation
        what = "no document is left for training: all are in the validation split"
        raise InputError.at("data.validation", what, f"lower data.validation, or {suggest_more_documents(data)}")
    for reason in _LENGTH_NOTES:
        if (count := total.dropped[reason]) > total.read * _MAX_DROPPED_FRACTION:
            ledger.notes.append(Phrase(_LENGTH_NOTES[reason], count=count, read=total.read, block=data.block))


_MAX_DROPPED_FRACTION = 1 / 3
_LENGTH_NOTES = {
    "longer_than_block": "{count:,} of {read:,} documents are dropped, since they have more than {block:,} tokens: "
    "set a larger data.block, or use shorter texts",
    "longer_than_target": "{count:,} of {read:,} documents are dropped, since their outputs are too long: set a "
    "larger seq2seq.target, or use shorter outputs",
}

_FIXES = {
    "control_token": "remove the template's tokens from the texts, or use another chat.template",
    "unanswerable": "use questions with answers",
    "not_annotated": "annotate the texts, or use others",
    "excluded_set": "change include or exclude of data.sources",
    "answer_longer_than_window": "set a larger data.block, or use shorter answers",
    "question_too_long": "set a larger span_qa.question, or use shorter questions",
    "longer_than_target": "set a larger seq2seq.target, or use shorter outputs",
    **dict.fromkeys(("", "empty", "no_main_text"), "use files with text in them"),
}


def _suggest_fix(data: DataConfig, dropped: Counter[str]) -> str:
    """Suggest a fix for the most frequent reason for dropping, if no document is left."""
    reason = max(dropped, key=lambda name: dropped[name], default="")
    if reason == "longer_than_block":
        return f"write a larger data.block than {data.block:,}, or use shorter texts"
    default_fix = "use other documents, or change the key that drops them (docs/run-file.md)"
    return _FIXES.get(reason, default_fix)


def suggest_more_documents(data: DataConfig) -> str:
    """Suggest how to get more documents from the sources."""
    for index, source in enumerate(data.sources):
        if source.yields == "text" and FORMATS[source.format].is_plain_text and source.document != "line":
            choices = "line" if source.document == "paragraph" else "paragraph, or line where no line between is empty"
            return f"cut the text into more documents (data.sources.{index}.document={choices})"
    kinds = sorted({"documents" if source.yields == "text" else source.yields for source in data.sources})
    return f"give more {' and '.join(kinds)}"


def _assign_split(record: Record, key: str, data: DataConfig) -> tuple[Document, int]:
    if data.held_out is None:
        return Document(record, "validation" if key == "data.validation" else "train"), 0
    hash_value = split_hash(record.group or record.text)
    return Document(record, "validation" if is_held_out(hash_value, data.held_out) else "train"), hash_value


def _text_to_compare(record: Record) -> str:
    """Return the text that duplicates share. Records with different answers or roles are not duplicates."""
    if isinstance(record.fields, Pair | Conversation | Preference | LabeledText | TaggedText | Match):
        return repr(record.fields)
    if isinstance(record.fields, Prompt):  # columns often number the rows
        return repr((record.fields.messages, record.fields.text, record.fields.tools))
    if isinstance(record.fields, Question):
        return f"{record.text}\n{record.fields.answer_class} {record.fields.answers}"
    return record.text


def _clean_record(record: Record, source: SourceConfig, rules: CleanConfig, changes: Counter[str]) -> Record:
    if isinstance(record.fields, Question | TaggedText):  # their answers and entities are character spans
        return record
    if isinstance(record.fields, LabeledText | Match):
        return _clean_texts(record, record.fields, rules, changes)
    if isinstance(record.fields, Conversation | Preference | Prompt):
        return _clean_messages(record, record.fields, rules, changes)
    text = _clean_text(record.text, rules, changes)
    if isinstance(record.fields, Pair):
        pair = Pair(_clean_text(record.fields.input, rules, changes), text)
    elif source.pairs == "commas":
        pair = Pair(remove_commas(text), text)
        return record._replace(text=text, fields=pair, group=record.group or pair.input)
    else:
        return Record(drop_lines(text, rules, changes), record.origin, record.set_name, None, record.group)
    return record._replace(text=text, fields=pair, group=pair.input)


def _clean_text(text: str, rules: CleanConfig, changes: Counter[str]) -> str:
    text = clean(text, rules, changes)
    return mask_pii(text, rules.pii, changes) if rules.pii is not None and rules.pii.mask else text


def _clean_texts(record: Record, fields: LabeledText | Match, rules: CleanConfig, changes: Counter[str]) -> Record:
    """Return the record with each of its texts cleaned. If one becomes empty, so does the record."""
    texts = tuple(_clean_text(text, rules, changes) for text in fields.texts)
    group = texts[0] if record.group == fields.texts[0] else record.group
    return record._replace(text="\n".join(texts) if all(texts) else "", fields=fields.with_texts(texts), group=group)


def _mask_arguments(value: Any, rules: CleanConfig, changes: Counter[str]) -> Any:
    """Return the arguments of a call with personal data masked. Other rules do not apply to them."""
    if rules.pii is None or not rules.pii.mask:
        return value
    if isinstance(value, str):
        return mask_pii(value, rules.pii, changes)
    if isinstance(value, list):
        return [_mask_arguments(item, rules, changes) for item in value]
    if isinstance(value, dict):
        return {name: _mask_arguments(item, rules, changes) for name, item in value.items()}
    return value


def _clean_messages(
    record: Record, fields: Conversation | Preference | Prompt, rules: CleanConfig, changes: Counter[str]
) -> Record:
    """Return the record with its messages cleaned; with an empty text if a message becomes empty."""

    def clean_message(message: Message) -> Message:
        content, thought = (_clean_text(text, rules, changes) for text in (message.content, message.thought))
        calls = tuple(
            replace(call, arguments=_mask_arguments(call.arguments, rules, changes)) for call in message.tool_calls
        )
        return replace(message, content=content, thought=thought, tool_calls=calls)

    if isinstance(fields, Conversation):
        changes.update(fields.changes)
        messages = tuple(map(clean_message, fields.messages))
        fields = Conversation(messages, fields.tools)
    elif isinstance(fields, Prompt):
        changes.update(fields.changes)
        messages = tuple(map(clean_message, fields.messages))
        fields = Prompt(messages, _clean_text(fields.text, rules, changes), fields.tools, fields.columns)
    else:
        prompt = tuple(map(clean_message, fields.prompt))
        chosen, rejected = (answer and clean_message(answer) for answer in (fields.chosen, fields.rejected))
        messages = (*prompt, *(answer for answer in (chosen, rejected) if answer is not None))
        fields = replace(fields, prompt=prompt, chosen=chosen, rejected=rejected)
    if any(message.is_empty for message in messages):
        return record._replace(text="")
    return build_record(fields, record.origin, record.set_name)


def remove_commas(text: str) -> str:
    """Remove the commas before white space and at the end of the text."""
    return _COMMA.sub("", text)
