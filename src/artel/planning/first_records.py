"""The first records of a run, read as `artel prepare` reads them: what it would refuse is said before it begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from artel.config import RunConfig
from artel.errors import InputError
from artel.objectives import DocumentSamples, Objective, objective_of, objective_type
from artel.planning.outline import tokenizer_here
from artel.preparing import check_texts, has_store
from artel.preparing.build_store import notes_of
from artel.storage import is_remote
from artel.text import Document, Dropped, Ledger, Rejected, check_ledger, read_documents
from artel.text.reading.files import is_url
from artel.text.sources.find import all_sources
from artel.text.sources.inputs import input_shards

_BYTES = 2 * 2**20
"""Text that is read at most, in a second or two."""
_REJECTED = 1000
"""Records that cannot be used, after which no more are read of a longer text: they count for no text."""
_TOGETHER = 256
"""Documents that are encoded together."""


def check_records(run: RunConfig) -> list[str]:
    """Read a run's first records, and make samples of them where the tokenizer is here. Returns sentences for the user.

    Raises InputError for what `artel prepare` would refuse in them; that too many are rejected is known only where all
    were read. What is wrong with the sources, the tokenizer or the objective is said by other checks.
    """
    if run.data.from_store or run.model.auto or has_store(run):
        return []
    if any(is_url(path) or is_remote(path) for _, source in all_sources(run.data) for path in source.path):
        return ["records were not read: artel prepare fetches and reads them"]
    try:
        check_texts(run)
        objective = _objective(run)
    except InputError:
        return []
    kind, records = objective_type(run), _read(run)
    is_undecided = bool(kind.undecided(run))
    if objective is not None and not is_undecided:
        records.make_samples(objective)
    if records.are_all:
        check_ledger(run.data, records.ledger)
        if is_undecided:
            is_one_set = run.data.held_out is not None
            learned = (one.record for one in records.documents if is_one_set or one.split == "train")
            kind.decide(run, learned)
    if objective is None:
        return records.notes()
    reviewed = objective.review(records.observed) if records.are_all else []
    return [*records.notes(), *reviewed, *notes_of(objective, records.documents)]


def _objective(run: RunConfig) -> Objective | None:
    """The run's objective; None where its tokenizer is not here. Raises InputError."""
    if problems := objective_type(run).problems(run):
        raise InputError(problems)
    tokenizer = tokenizer_here(run)
    return None if tokenizer is None else objective_of(run, tokenizer)


@dataclass(slots=True)
class _Records:
    """What was read of a run."""

    documents: list[Document]
    rejected: list[Rejected]
    read: int
    """Documents, and records that are none."""
    ledger: Ledger
    """Of all records, if all were read."""
    are_all: bool
    observed: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """What an objective reviews: (origin, `DocumentSamples.observed`) of documents that have it."""

    def make_samples(self, objective: Objective) -> None:
        """Make samples of the documents, and count those of which none can be made. Raises InputError."""
        documents = iter(self.documents)
        while chunk := list(islice(documents, _TOGETHER)):
            for document, result in zip(chunk, objective.samples(chunk), strict=True):
                if not isinstance(result, DocumentSamples):
                    self._leave_out(document, result)
                elif result.observed:
                    self.observed.append((document.record.origin, result.observed))

    def _leave_out(self, document: Document, result: Rejected | Dropped) -> None:
        set_name = document.record.set_name
        counts = self.ledger.of(set_name)
        counts.kept -= 1
        counts.splits[document.split]["documents"] -= 1
        if isinstance(result, Rejected):
            self.ledger.reject(result)
        else:
            self.ledger.drop(set_name, result.reason)

    def notes(self) -> list[str]:
        """A sentence about the records that cannot be used, if there are any."""
        if not self.rejected:
            return []
        first = self.rejected[0]
        read = f"{self.ledger.total.read:,}" if self.are_all else f"the first {self.read:,}"
        return [f"{len(self.rejected):,} of {read} records cannot be used, the first {first.origin}: {first.detail}"]


class _EnoughRejected(Exception):
    """Ends the reading of a text of which many records cannot be used."""


def _read(run: RunConfig) -> _Records:
    """The records of a run up to `_BYTES` of text, or `_REJECTED` that cannot be used. Raises InputError."""
    rejected: list[Rejected] = []
    data = run.data.model_copy(update={"max_bad": 1.0})  # counted with those of which no sample can be made
    is_short = sum(shard.size for shard in input_shards(data)) <= _BYTES

    def reject(item: Rejected) -> None:
        rejected.append(item)
        if not is_short and len(rejected) >= _REJECTED:
            raise _EnoughRejected

    ledger = Ledger(on_reject=reject)
    documents, left = [], _BYTES
    try:
        for document in read_documents(data, ledger, _BYTES):
            documents.append(document)
            left -= len(document.record.text.encode())
            if left < 0:
                break
    except _EnoughRejected:
        left = -1
    except InputError:
        ledger.check_rejected(run.data.max_bad)  # where nothing is left, that is why
        raise
    ledger.on_reject = rejected.append
    return _Records(documents, rejected, len(documents) + len(rejected), ledger, is_short and left >= 0)
