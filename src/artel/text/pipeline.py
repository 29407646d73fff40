"""Sources to documents: read, clean, keep what is unique, split; each record counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from artel.config import CleanConfig, DataConfig, SourceConfig
from artel.errors import InputError, Problem
from artel.storage import cache_folder
from artel.text.clean import check_packages, clean, without_lines
from artel.text.ledger import Ledger
from artel.text.near import NearDuplicates
from artel.text.pairs import without_commas
from artel.text.quality import why_dropped
from artel.text.records import Conversation, Document, Dropped, Message, Pair, Preference, Question, Record, Rejected
from artel.text.repeats import RepeatedUnits
from artel.text.sources import all_sources, check_sources, is_url, local_files, read_source
from artel.text.sources.conversations import converter_file, record_of
from artel.text.split import in_validation
from artel.text.unique import Unique


def read_documents(data: DataConfig, ledger: Ledger, near: NearDuplicates | None = None) -> Iterator[Document]:
    """Every document of a run, in the order of its sources; memory holds digests only.

    Validation texts given by a path come first, so that equal training documents are the duplicates. Near-duplicates,
    where `data.dedup.near` is set, are found by reading everything once before; who reads the documents several times
    gives the same `near` each time, and they are found once. Raises InputError before anything is read
    (`check_sources`, a package that is missing), and when too much was unreadable or nothing was left.
    """
    check_sources(data)
    check_packages(data.clean)
    if data.dedup.near is not None:
        near = near or NearDuplicates(data.dedup.near)
        if not near.found:
            near.find(_compared_texts(data), Path(data.store) if data.store else cache_folder())
    for place, document in enumerate(_unique_documents(data, ledger)):
        record = document.record
        reason = near.reason(place, record.text, record.origin) if near is not None else None
        if reason is not None:
            ledger.drop(record.set_name, reason)
            continue
        ledger.keep(document)
        yield document
    _judge(data, ledger)


def _compared_texts(data: DataConfig) -> Iterator[tuple[str, bool]]:
    """The text of each document, and whether it stays however alike: validation texts given by a path do."""
    ledger = Ledger()
    given = isinstance(data.validation, str)
    for document in _unique_documents(data, ledger):
        yield document.record.text, given and document.part == "validation"
    ledger.judge(data.max_bad)


def _unique_documents(data: DataConfig, ledger: Ledger) -> Iterator[Document]:
    """Every document that is cleaned and no exact duplicate; the ledger holds what was read and dropped."""
    unique = Unique()
    units = RepeatedUnits(data.dedup.lines) if data.dedup.lines != "none" else None
    for where, source in all_sources(data):
        for item in read_source(source, where, data):
            ledger.read(item.set_name)
            if isinstance(item, Rejected):
                ledger.reject(item)
                continue
            if isinstance(item, Dropped):
                ledger.drop(item.set_name, item.reason)
                continue
            document = _document(item, where, source, data, unique, units, ledger)
            if document is not None:
                yield document


def source_fingerprint(data: DataConfig) -> list[Any]:
    """What the sources are, without reading them: (path, size, time of change) of each file, and each URL.

    The file of a converter of the user's own is one of them.
    """
    found: list[Any] = []
    for where, source in all_sources(data):
        found += [name for name in source.path if is_url(name)]
        for file in (*local_files(source, where), *converter_file(source, where)):
            status = file.stat()
            found.append([str(file.resolve()), status.st_size, status.st_mtime_ns])
    return found


def _document(
    record: Record,
    where: str,
    source: SourceConfig,
    data: DataConfig,
    unique: Unique,
    units: RepeatedUnits | None,
    ledger: Ledger,
) -> Document | None:
    changed: Counter[str] = Counter()
    record = _cleaned(record, source, data.clean, changed)
    reason = why_dropped(record, data.clean)
    if reason is None and isinstance(record.fields, Preference) and record.fields.chosen == record.fields.rejected:
        reason = "equal_answers"  # cleaned, nothing is left between them
    if reason is None and data.dedup.exact and not unique.is_new(_compared(record)):
        reason = "duplicate"
    if reason is None and units is not None and record.fields is None:
        record = replace(record, text=units.without(record.text, changed))
        reason = "repeated" if len(record.text) < data.clean.minimum else None
    if reason is not None:
        ledger.drop(record.set_name, reason)
        return None
    ledger.changed.update(changed)
    if isinstance(data.validation, str):
        return Document(record, "validation" if where == "data.validation" else "train")
    return Document(record, "validation" if in_validation(record.group or record.text, data.validation) else "train")


def _compared(record: Record) -> str:
    """What must be equal for a record to be a duplicate: the same question with another answer is none.

    Nor is the same text told by other roles, or the same answer rejected instead of chosen.
    """
    if isinstance(record.fields, Conversation | Preference):
        return repr(record.fields)
    if isinstance(record.fields, Question):
        return f"{record.text}\n{record.fields.answer_class} {record.fields.answers}"
    return record.text


def _cleaned(record: Record, source: SourceConfig, rules: CleanConfig, changed: Counter[str]) -> Record:
    if isinstance(record.fields, Question):  # its answers are counted in its characters
        return record
    if isinstance(record.fields, Conversation | Preference):
        return _cleaned_turns(record, record.fields, rules, changed)
    text = clean(record.text, rules, changed)
    if isinstance(record.fields, Pair):
        pair = Pair(clean(record.fields.input, rules, changed), text)
    elif source.pairs == "commas":
        pair = Pair(without_commas(text), text)
    else:
        return replace(record, text=without_lines(text, rules, changed))
    return replace(record, text=text, fields=pair, group=pair.input)


def _cleaned_turns(
    record: Record, fields: Conversation | Preference, rules: CleanConfig, changed: Counter[str]
) -> Record:
    """The record with its turns cleaned. Where nothing is left of a turn, nothing is left of the record.

    The turns around an empty one would answer what was not said.
    """

    def cleaned(message: Message) -> Message:
        content, thought = (clean(text, rules, changed) for text in (message.content, message.thought))
        return replace(message, content=content, thought=thought)

    if isinstance(fields, Conversation):
        changed.update({"turns_left_out": fields.left_out} if fields.left_out else {})
        turns = tuple(map(cleaned, fields.messages))
        fields = Conversation(turns)
    else:
        prompt = tuple(map(cleaned, fields.prompt))
        chosen, rejected = (answer and cleaned(answer) for answer in (fields.chosen, fields.rejected))
        turns = (*prompt, *(answer for answer in (chosen, rejected) if answer is not None))
        fields = Preference(prompt, chosen, rejected)
    if not all(message.content for message in turns):
        return replace(record, text="")
    return record_of(fields, record.origin, record.set_name)


def _judge(data: DataConfig, ledger: Ledger) -> None:
    total = ledger.total
    ledger.judge(data.max_bad)
    if total.kept == 0:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in total.dropped.items()) or "none were there"
        raise InputError([Problem("data.sources", f"no document is left: {dropped}", "give files with text in them")])
    if ledger.parts["train"]["documents"] == 0 and data.validation != 1.0:  # 1: all of it is there to be judged
        raise InputError(
            [Problem("data.validation", "no document is left for training: all fell into the validation part",
                     "write a smaller data.validation, or cut the text into more documents (data.sources.0.document)")]
        )  # fmt: skip
