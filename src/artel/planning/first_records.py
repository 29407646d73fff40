"""Check the first records of a run: read them as `artel prepare` does, and report what it would refuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from artel.config import RunConfig
from artel.errors import InputError
from artel.objectives import DocumentSamples, Objective, build_objective, objective_type
from artel.planning.outline import local_tokenizer
from artel.preparing import check_sources_and_outputs, has_store
from artel.preparing.build_store import objective_notes
from artel.storage import is_remote
from artel.text import Document, DroppedRecord, Ledger, Rejected, check_ledger, read_documents
from artel.text.reading.files import is_url
from artel.text.sources.find import list_sources
from artel.text.sources.inputs import input_shards

_MAX_BYTES = 2 * 2**20
"""Maximum bytes of text to read: a second or two."""
_MAX_REJECTED = 1000
"""Number of unusable records after which reading stops. They do not count towards `_MAX_BYTES`."""
_BATCH_DOCUMENTS = 256
"""Documents encoded in one batch."""


def check_records(config: RunConfig) -> list[str]:
    """Read a run's first records, and make samples of them if the tokenizer is local. Return notes for the user.

    Raise InputError for problems that `artel prepare` would refuse. It detects too many rejected records only if it
    reads all of them. Other checks report problems of the sources, the tokenizer and the objective.
    """
    if config.data.from_store or config.model.auto or has_store(config):
        return []
    if any(is_url(path) or is_remote(path) for _, source in list_sources(config.data) for path in source.path):
        return ["remote sources are not checked yet: artel prepare fetches and reads them"]
    try:
        check_sources_and_outputs(config)
        objective = _load_objective(config)
    except InputError:
        return []
    objective_class = objective_type(config)
    records = _read_records(config)
    is_undecided = bool(objective_class.undecided(config))
    if objective is not None and not is_undecided:
        records.make_samples(objective)
    if records.is_complete:
        check_ledger(config.data, records.ledger)
        if is_undecided:
            has_own_validation = config.data.held_out is not None
            training = (item.record for item in records.documents if has_own_validation or item.split == "train")
            objective_class.decide(config, training)
    if objective is None:
        return records.notes()
    review_notes = objective.review(records.observed) if records.is_complete else []
    return [*records.notes(), *review_notes, *objective_notes(objective, records.documents)]


def _load_objective(config: RunConfig) -> Objective | None:
    """Return the run's objective. None if its tokenizer is not local. Raise InputError if it cannot run."""
    if problems := objective_type(config).problems(config):
        raise InputError(problems)
    tokenizer = local_tokenizer(config)
    return None if tokenizer is None else build_objective(config, tokenizer)


@dataclass(slots=True)
class _Records:
    """Records that were read, and their counts."""

    documents: list[Document]
    rejected: list[Rejected]
    num_read: int
    """Number of records read, usable or not."""
    ledger: Ledger
    """Counts of the records that were read."""
    is_complete: bool
    observed: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(origin, `DocumentSamples.observed`) of documents, for the objective's review."""

    def make_samples(self, objective: Objective) -> None:
        """Make samples of the documents. Count documents that give none."""
        documents = iter(self.documents)
        while chunk := list(islice(documents, _BATCH_DOCUMENTS)):
            for document, result in zip(chunk, objective.samples(chunk), strict=True):
                if not isinstance(result, DocumentSamples):
                    self._discard(document, result)
                elif result.observed:
                    self.observed.append((document.record.origin, result.observed))

    def _discard(self, document: Document, result: Rejected | DroppedRecord) -> None:
        set_name = document.record.set_name
        counts = self.ledger.get_counts(set_name)
        counts.kept -= 1
        counts.splits[document.split]["documents"] -= 1
        if isinstance(result, Rejected):
            self.ledger.reject(result)
        else:
            self.ledger.drop(set_name, result.reason)

    def notes(self) -> list[str]:
        """Return a note about unusable records, if there are any."""
        if not self.rejected:
            return []
        first = self.rejected[0]
        total = f"{self.ledger.total.read:,}" if self.is_complete else f"the first {self.num_read:,}"
        return [f"{len(self.rejected):,} of {total} records cannot be used, the first {first.origin}: {first.detail}"]


class _TooManyRejected(Exception):
    """Stops reading a text with many unusable records."""


def _read_records(config: RunConfig) -> _Records:
    """Read up to `_MAX_BYTES` of text, or up to `_MAX_REJECTED` unusable records.

    Raise InputError if no document can be read.
    """
    rejected: list[Rejected] = []
    data = config.data.model_copy(update={"max_bad": 1.0})  # checked later, when documents without samples are known
    is_short = sum(shard.size for shard in input_shards(data)) <= _MAX_BYTES

    def reject(item: Rejected) -> None:
        rejected.append(item)
        if not is_short and len(rejected) >= _MAX_REJECTED:
            raise _TooManyRejected

    ledger = Ledger(on_reject=reject)
    documents = []
    remaining_bytes = _MAX_BYTES
    try:
        for document in read_documents(data, ledger, _MAX_BYTES):
            documents.append(document)
            remaining_bytes -= len(document.record.text.encode())
            if remaining_bytes < 0:
                break
    except _TooManyRejected:
        remaining_bytes = -1
    except InputError:
        ledger.check_rejected(config.data.max_bad)  # the likely reason if there are no documents
        raise
    ledger.on_reject = rejected.append
    return _Records(documents, rejected, len(documents) + len(rejected), ledger, is_short and remaining_bytes >= 0)
