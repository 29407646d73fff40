"""How a model is asked: a text to begin with, and lines of Python for model cards, by transformers alone.

Each objective puts its own together.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import numpy as np

from artel.tokens import Tokenizer

_TOKENS, _WORDS = 40, 12


def in_python(text: str) -> str:
    """A text as a literal of Python, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def first_words(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """The beginning of a text, given as ids (tokens,) without special tokens, in one line."""
    return " ".join(tokenizer.decode(ids[:_TOKENS]).split()[:_WORDS])


def generation_usage(room: int, ends: Collection[int] = ()) -> list[str]:
    """Let `model` write after `inputs`, `room` tokens at most, until one of the ids `ends` if there are any."""
    stop = f", eos_token_id={sorted(ends)}" if ends else ""
    return [
        f"outputs = model.generate(**inputs, max_new_tokens={max(1, min(100, room))}, do_sample=True, top_k=50{stop})",
        'written = outputs[0, inputs["input_ids"].shape[1] :]',
        "print(tokenizer.decode(written, skip_special_tokens=True))",
    ]
