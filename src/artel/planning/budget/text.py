"""What a choice has to know of a text: how many tokens it has to learn from, and to be judged by."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from artel.config import RunConfig
from artel.errors import InputError
from artel.planning.plan.batches import planned_data
from artel.planning.plan.length import planned_length
from artel.preparing import prepare
from artel.text import Ledger, read_documents

BLOCKS = (256, 128, 64)
"""Lengths of a block to choose from, in tokens; the fits were made with the first."""
_DOCUMENTS = 200  # of a text that is not prepared, whose bytes and characters are counted


@dataclass(frozen=True, slots=True)
class Text:
    tokens: int
    """Of its training part."""
    validation_tokens: int | None
    """0: none is held out; None: not known before it is prepared."""
    vocabulary: int
    note: str
    """Where the number of tokens is from."""
    bytes_per_character: float | None = None
    """Of the text in UTF-8; None: not known."""


def text_of(run: RunConfig) -> Text:
    """By the token store where there is one, else by a sample of the text. Raises InputError where nothing tells."""
    if "block" not in run.data.model_fields_set:
        run = with_block(run, BLOCKS[-1])  # a small text has no larger one
    run = run.model_copy(update={"train": run.train.model_copy(update={"budget": None})})  # an epoch is asked for
    data = planned_data(run)
    if data.store is not None:
        vocabulary = data.tokenizer.vocabulary
        letters = _bytes_per_character(prepare(run).ledger()["parts"])
        return Text(data.store.train.tokens, data.store.validation.tokens, vocabulary, "its token store", letters)
    length = planned_length(run, data)
    if length is None or length.epoch_tokens is None:
        raise InputError.at("data.sources", "no sample tells how much text there is", "run artel prepare first")
    texts = [document.record.text for document in islice(read_documents(run.data, Ledger()), _DOCUMENTS)]
    counts = {"bytes": sum(len(text.encode()) for text in texts), "characters": sum(map(len, texts))}
    letters = _bytes_per_character({"train": counts})
    return Text(round(length.epoch_tokens), None, data.tokenizer.vocabulary, f"a sample: {length.note}", letters)


def _bytes_per_character(parts: dict[str, Any]) -> float | None:
    """Of the splits of a ledger (`parts`) together; None where it has no characters: imported tokens have none."""
    size, characters = (sum(counts.get(unit, 0) for counts in parts.values()) for unit in ("bytes", "characters"))
    return size / characters if size and characters else None


def with_block(run: RunConfig, block: int) -> RunConfig:
    return run.model_copy(update={"data": run.data.model_copy(update={"block": block})})
