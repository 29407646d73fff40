"""What a choice has to know of a text: how many tokens it has to learn from, and to be judged by."""

from __future__ import annotations

from dataclasses import dataclass

from artel.config import RunConfig
from artel.errors import InputError
from artel.planning.plan.batches import planned_data
from artel.planning.plan.length import planned_length

BLOCKS = (256, 128, 64)
"""Lengths of a block to choose from, in tokens; the fits were made with the first."""


@dataclass(frozen=True, slots=True)
class Text:
    tokens: int
    """Of its training part."""
    validation_tokens: int | None
    """0: none is held out; None: not known before it is prepared."""
    vocabulary: int
    note: str
    """Where the number of tokens is from."""


def text_of(run: RunConfig) -> Text:
    """By the token store where there is one, else by a sample of the text. Raises InputError where nothing tells."""
    if "block" not in run.data.model_fields_set:
        run = with_block(run, BLOCKS[-1])  # a small text has no larger one
    run = run.model_copy(update={"train": run.train.model_copy(update={"budget": None})})  # an epoch is asked for
    data = planned_data(run)
    if data.store is not None:
        vocabulary = data.tokenizer.vocabulary
        return Text(data.store.train.tokens, data.store.validation.tokens, vocabulary, "its token store")
    length = planned_length(run, data)
    if length is None or length.epoch_tokens is None:
        raise InputError.at("data.sources", "no sample tells how much text there is", "run artel prepare first")
    return Text(round(length.epoch_tokens), None, data.tokenizer.vocabulary, f"a sample: {length.note}")


def with_block(run: RunConfig, block: int) -> RunConfig:
    return run.model_copy(update={"data": run.data.model_copy(update={"block": block})})
