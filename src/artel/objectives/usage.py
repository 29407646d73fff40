"""Building blocks for examples of use: Python lines for model cards that need only transformers."""

from __future__ import annotations

import json
from collections.abc import Collection

import numpy as np

from artel.tokens import Tokenizer

_TOKENS, _WORDS = 40, 12


def in_python(text: str) -> str:
    """Return a text as a Python literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def first_words(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Return the first words of a text in one line. `ids`: (tokens,), without special tokens."""
    return " ".join(tokenizer.decode(ids[:_TOKENS]).split()[:_WORDS])


def generation_usage(max_tokens: int, ends: Collection[int] = ()) -> list[str]:
    """Return Python that lets `model` continue `inputs`, up to `max_tokens` or one of the ids `ends`."""
    stop = f", eos_token_id={sorted(ends)}" if ends else ""
    length = max(1, min(100, max_tokens))
    return [
        f"outputs = model.generate(**inputs, max_new_tokens={length}, do_sample=True, top_k=50{stop})",
        'written = outputs[0, inputs["input_ids"].shape[1] :]',
        "print(tokenizer.decode(written, skip_special_tokens=True))",
    ]
