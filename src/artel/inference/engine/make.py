"""The engine for a model: the one that suits its device and what it computes."""

from __future__ import annotations

from transformers import PreTrainedModel

from artel.errors import InputError
from artel.inference.engine.base import Engine, reason
from artel.inference.engine.paged import BatchingEngine
from artel.inference.engine.positions import steady_length
from artel.inference.engine.room import USUAL, answers_at_once
from artel.inference.engine.sequential import SequentialEngine
from artel.inference.engine.slot_model import CannotSlot
from artel.inference.engine.slots import SlotEngine
from artel.tokens import Tokenizer


def make_engine(
    model: PreTrainedModel, tokenizer: Tokenizer, requests: int | None, context: int, *, share_beginnings: bool = True
) -> Engine:
    """Several requests at once where the model can be batched, else one after another.

    `requests` are computed at once at most, by default as many as suit the model and the machine; each has at most
    `context` tokens of prompt and answer. Prompts that begin alike share what was computed of their beginning, unless
    the model changes meanwhile. Raises InputError where `context` has no room in memory.
    """
    steady = steady_length(model)
    if steady is not None and context > steady:
        far = f"beyond {steady:,} tokens its positions follow the longest text (rope_type)"
        return SequentialEngine(model, tokenizer, f"one request after another: {far}")
    why = []
    if model.device.type == "cpu":
        try:
            return SlotEngine(model, requests or answers_at_once(model), context, share_beginnings)
        except CannotSlot as error:
            why.append(reason(error))
    try:
        engine = BatchingEngine(model, requests or USUAL, context, share_beginnings)
    except InputError:
        raise
    except Exception as error:  # transformers has many kinds for what it cannot batch
        return SequentialEngine(model, tokenizer, f"one request after another: {'; '.join([*why, reason(error)])}")
    if why:
        engine.note += f" by transformers' batching ({why[0]})"
    return engine
