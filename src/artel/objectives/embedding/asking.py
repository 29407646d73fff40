"""The vectors of texts that a model is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.config import EmbeddingConfig
from artel.errors import InputError
from artel.models.evaluating import evaluating
from artel.objectives.embedding.matches import MatchReader
from artel.objectives.embedding.rows import finished, group_vectors
from artel.objectives.length_groups import group_rows, together
from artel.tokens import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TextEncoder:
    """Texts to vectors. The end of a text of over `block` tokens is not read."""

    def __init__(self, tokenizer: Tokenizer, reader: MatchReader, config: EmbeddingConfig, block: int) -> None:
        self._tokenizer, self._reader, self._config, self._block = tokenizer, reader, config, block

    def rows(self, texts: Sequence[Any], kind: str) -> list[tuple[np.ndarray, bool]]:
        """Each text as the model reads it, int64 (tokens,), and whether it was cut. Raises InputError.

        A text may be given as ids, with its special tokens. `kind`: query or document, for the prompt of each; none
        when empty.
        """
        encoded = iter(self._encoded([text for text in texts if isinstance(text, str)], kind))
        rows: list[tuple[np.ndarray, bool]] = []
        for text in texts:
            if isinstance(text, str):
                ids = next(encoded)
                row = self._reader.framed(ids)
                rows.append((row, len(row) < len(ids) + self._reader.frame.size))
            else:
                rows.append((np.array(text[: self._block], dtype=np.int64), len(text) > self._block))
        return rows

    def _encoded(self, texts: Sequence[str], kind: str) -> list[np.ndarray]:
        """The ids of each text behind the prompt of its kind, without special tokens, int64. Raises InputError."""
        prompts = self._config.prompts
        prompt = {"query": prompts.query, "document": prompts.document, "": ""}.get(kind)
        if prompt is None:
            what = f"{kind!r} is no kind of text"
            raise InputError.at("input_type", what, "write query or document, or leave it out")
        encoded = list(self._tokenizer.encode([prompt + text for text in texts]))
        for number, ids in enumerate(encoded):
            if not len(ids):
                raise InputError.at("input", f"text {number} has no token", "give a text with words in it")
        return encoded

    def vectors(
        self, model: PreTrainedModel, rows: Sequence[np.ndarray], *, dimensions: int | None = None
    ) -> np.ndarray:
        """float32 (rows, size), or of each vector the first `dimensions`. Raises InputError."""

        size = model.config.get_text_config().hidden_size
        if dimensions is not None and not 0 < dimensions <= size:
            what = f"a vector has {size} numbers, and {dimensions} are asked for"
            raise InputError.at("dimensions", what, f"write a number from 1 to {size}")
        result = np.empty((len(rows), dimensions or size), dtype=np.float32)
        with evaluating(model):
            for chosen in together([len(row) for row in rows]):
                grouped = group_rows([rows[row] for row in chosen], 1, self._tokenizer.pad_id)
                tensors = {name: tensor.to(model.device) for name, tensor in grouped.tensors.items()}
                outputs = group_vectors(model, tensors, grouped.groups, self._config.pooling)[:, :dimensions]
                result[chosen] = finished(outputs, self._config).cpu().numpy()
        return result
