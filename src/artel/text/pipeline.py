"""Sources to documents: read, clean, keep what is unique, split; each record counted.

What a record becomes by itself is `clean_part`'s; whether it is a duplicate takes all others. Here one is known by
having read everything before it (`read_documents`); a store is made part by part, and its duplicates are found after.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import xxhash

from artel.config import CleanConfig, DataConfig, SourceConfig
from artel.errors import InputError, Problem
from artel.text.cleaning.quality import why_dropped
from artel.text.cleaning.rules import check_packages, clean, without_lines
from artel.text.dedup.exact import Unique
from artel.text.dedup.near import check_near
from artel.text.dedup.repeats import RepeatedUnits
from artel.text.formats.conversations import record_of
from artel.text.ledger import Ledger, in_words
from artel.text.pairs import without_commas
from artel.text.records import Conversation, Document, Dropped, Message, Pair, Preference, Question, Record, Rejected
from artel.text.sources import Part, check_sets, check_sources, parts_of, read_part, source_of
from artel.text.split import is_held_out, split_hash


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A record that is cleaned and passed every rule that looks at it alone."""

    document: Document
    digest: bytes
    """128 bits of what equal records have in common."""
    split_hash: int
    """What the split goes by; 0 where validation texts are given by a path."""
    changed: Counter[str] = field(default_factory=Counter)
    """What was done to it that its user should know, by name."""
    is_left: bool = True
    """False when too little is left of it beside what stood in earlier documents."""


def clean_part(part: Part, data: DataConfig, ledger: Ledger, units: RepeatedUnits | None = None) -> Iterator[Cleaned]:
    """The records of a part, cleaned; what is dropped for what it is by itself is counted in `ledger`.

    `units` takes away the lines or paragraphs that stood before.
    """
    source = source_of(data, part.where)
    for item in read_part(part, data, ledger.guess):
        ledger.read(item.set_name)
        if isinstance(item, Rejected):
            ledger.reject(item)
            continue
        if isinstance(item, Dropped):
            ledger.drop(item.set_name, item.reason)
            continue
        changed: Counter[str] = Counter()
        record = _cleaned(item, source, data.clean, changed)
        reason = why_dropped(record, data.clean)
        if reason is None and isinstance(record.fields, Preference) and record.fields.chosen == record.fields.rejected:
            reason = "equal_answers"  # cleaned, nothing is left between them
        if reason is not None:
            ledger.drop(record.set_name, reason)
            continue
        digest = xxhash.xxh3_128_digest(_compared(record).encode())
        is_left = True
        if units is not None and record.fields is None:
            record = record._replace(text=units.without(record.text, changed))
            is_left = len(record.text) >= data.clean.minimum
        document, hashed = _split(record, part.where, data)
        yield Cleaned(document, digest, hashed, changed, is_left)


def read_documents(data: DataConfig, ledger: Ledger, most_bytes: int | None = None) -> Iterator[Document]:
    """Every document of a run, in the order of its sources, each but once; memory holds digests only.

    Validation texts given by a path come first, so that equal training documents are the duplicates. With `most_bytes`
    about so much text is taken, from each file in proportion to its size. Near-duplicates are not looked for. Raises
    InputError before anything is read (`check_text`), and when too much was unreadable or nothing was left.
    """
    check_text(data)
    unique = Unique()
    units = RepeatedUnits(data.dedup.lines) if data.dedup.lines != "none" else None
    parts = parts_of(data)
    total = sum(part.size for part in parts)
    everything = most_bytes is None or total <= most_bytes
    problems: list[Problem] = []
    for where, files in groupby(parts, key=lambda part: part.where):
        own = Ledger(on_reject=ledger.on_reject)
        for file in files:
            left = math.inf if everything or not file.size else (most_bytes or 0) * file.size / total
            for found in clean_part(file, data, own, units):
                record = found.document.record
                if data.dedup.exact and not unique.is_new(found.digest):
                    own.drop(record.set_name, "duplicate")
                elif not found.is_left:
                    own.drop(record.set_name, "repeated")
                else:
                    own.keep(found.document)
                    own.changed.update(found.changed)
                    yield found.document
                    left -= len(record.text.encode())
                    if left <= 0:
                        break
        problems += check_sets(source_of(data, where), where, set(own.sets))
        ledger.add(own)
    if everything:
        if problems:
            raise InputError(problems)
        judge(data, ledger)


def check_text(data: DataConfig, tell: Callable[[str], None] = lambda _: None) -> None:
    """Raise InputError for all that is wrong with the sources, or a package that is missing, before any is read.

    `tell` hears of sources that are out of reach and known from an earlier start.
    """
    check_sources(data, tell)
    check_packages(data.clean)
    if data.dedup.near is not None:
        check_near()


def judge(data: DataConfig, ledger: Ledger) -> None:
    """Raise InputError when too much was unreadable, nothing was left, or nothing of it for training."""
    total = ledger.total
    ledger.judge(data.max_bad)
    if total.kept == 0:
        dropped = in_words(total.dropped) or "none were there"
        raise InputError.at("data.sources", f"no document is left: {dropped}", "give files with text in them")
    if total.parts["train"]["documents"] == 0 and data.validation != 1.0:  # 1: all of it is there to be judged
        raise InputError.at(
            "data.validation",
            "no document is left for training: all fell into the validation part",
            f"write a smaller data.validation, or {more_documents(data)}",
        )


def more_documents(data: DataConfig) -> str:
    """What to write or to give so that there are more documents, by what they are."""
    for number, source in enumerate(data.sources):
        if source.yields == "text" and source.format in ("auto", "text") and source.document != "line":
            cuts = "line" if source.document == "paragraph" else "paragraph, or line where no line between is empty"
            return f"cut the text into more documents (data.sources.{number}.document={cuts})"
    kinds = sorted({"documents" if source.yields == "text" else source.yields for source in data.sources})
    return f"give more {' and '.join(kinds)}"


def _split(record: Record, where: str, data: DataConfig) -> tuple[Document, int]:
    if isinstance(data.validation, str):
        return Document(record, "validation" if where == "data.validation" else "train"), 0
    hashed = split_hash(record.group or record.text)
    return Document(record, "validation" if is_held_out(hashed, data.validation) else "train"), hashed


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
        return Record(without_lines(text, rules, changed), record.origin, record.set_name, None, record.group)
    return record._replace(text=text, fields=pair, group=pair.input)


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
        return record._replace(text="")
    return record_of(fields, record.origin, record.set_name)
