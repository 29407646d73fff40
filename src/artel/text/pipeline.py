"""Sources to documents: read, clean, keep what is unique, split; each record counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from artel.config import CleanConfig, DataConfig, SourceConfig
from artel.errors import InputError, Problem
from artel.text.clean import clean
from artel.text.ledger import Ledger
from artel.text.pairs import without_commas
from artel.text.records import Conversation, Document, Message, Pair, Preference, Question, Record, Rejected
from artel.text.sources import all_sources, check_sources, is_url, local_files, read_source
from artel.text.sources.conversations import converter_file, record_of
from artel.text.split import in_validation
from artel.text.unique import Unique


def read_documents(data: DataConfig, ledger: Ledger) -> Iterator[Document]:
    """Every document of a run, in the order of its sources; memory holds digests only.

    Validation texts given by a path come first, so that equal training documents are the duplicates. Raises InputError
    before anything is read (`check_sources`), and at the end when too much was unreadable or nothing was left.
    """
    check_sources(data)
    unique = Unique()
    for where, source in all_sources(data):
        for item in read_source(source, where, data):
            ledger.read(item.set_name)
            if isinstance(item, Rejected):
                ledger.reject(item)
                continue
            document = _document(item, where, source, data, unique, ledger)
            if document is not None:
                ledger.keep(document)
                yield document
    _judge(data, ledger)


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
    record: Record, where: str, source: SourceConfig, data: DataConfig, unique: Unique, ledger: Ledger
) -> Document | None:
    record = _cleaned(record, source, data.clean)
    text = record.text
    reason = None
    if not text:
        reason = "empty"
    elif len(text) < data.clean.minimum:
        reason = "too_short"
    elif isinstance(record.fields, Preference) and record.fields.chosen == record.fields.rejected:
        reason = "equal_answers"  # cleaned, nothing is left between them
    elif data.dedup.exact and not unique.is_new(_compared(record)):
        reason = "duplicate"
    if reason is not None:
        ledger.drop(record.set_name, reason)
        return None
    if isinstance(data.validation, str):
        return Document(record, "validation" if where == "data.validation" else "train")
    return Document(record, "validation" if in_validation(record.group or text, data.validation) else "train")


def _compared(record: Record) -> str:
    """What must be equal for a record to be a duplicate: the same question with another answer is none.

    Nor is the same text told by other roles, or the same answer rejected instead of chosen.
    """
    if isinstance(record.fields, Conversation | Preference):
        return repr(record.fields)
    if isinstance(record.fields, Question):
        return f"{record.text}\n{record.fields.answer_class} {record.fields.answers}"
    return record.text


def _cleaned(record: Record, source: SourceConfig, rules: CleanConfig) -> Record:
    if isinstance(record.fields, Question):  # its answers are counted in its characters
        return record
    if isinstance(record.fields, Conversation | Preference):
        return _cleaned_turns(record, record.fields, rules)
    text = clean(record.text, rules)
    if isinstance(record.fields, Pair):
        pair = Pair(clean(record.fields.input, rules), text)
    elif source.pairs == "commas":
        pair = Pair(without_commas(text), text)
    else:
        return replace(record, text=text)
    return replace(record, text=text, fields=pair, group=pair.input)


def _cleaned_turns(record: Record, fields: Conversation | Preference, rules: CleanConfig) -> Record:
    """The record with its turns cleaned. Where nothing is left of a turn, nothing is left of the record.

    The turns around an empty one would answer what was not said.
    """

    def cleaned(message: Message) -> Message:
        return replace(message, content=clean(message.content, rules), thought=clean(message.thought, rules))

    if isinstance(fields, Conversation):
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
