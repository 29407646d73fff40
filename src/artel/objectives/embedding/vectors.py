"""Vectors of texts: several texts in a row if the model isolates them, otherwise one text per row."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from artel.config import EmbeddingConfig
from artel.errors import InputError
from artel.models import evaluation_mode
from artel.objectives.embedding.matches import MatchReader
from artel.objectives.length_groups import (
    LengthGroup,
    as_tensors,
    batches_by_length,
    group_inputs,
    group_rows,
    round_up,
)
from artel.tokens import Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Pooling = Literal["mean", "cls", "last"]

_PACKED_TOKENS = 2048
"""Approximate tokens of a packed row."""
_PROBE_TOKENS = 4  # tokens of a trial


def packed_rows(texts: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """Pack complete texts into rows. Return int64 tensors:

    `input_ids` (rows, length); `documents` (rows, length), the number of each token's text in its row, from 1, 0 for
    padding; `positions` (rows, length) of tokens in their text, from 0; `slots`, the numbers of texts in a row;
    `texts` (texts,), the index of each text in the flattened (rows, slots); `firsts` and `lasts` (texts,), the indices
    of first and last tokens in the flattened rows.
    """
    starts, length = _pack_lengths(list(map(len, texts)))
    num_rows = 1 + max(row for row, _ in starts)
    ids, documents, positions = (np.zeros((num_rows, length), dtype=np.int64) for _ in range(3))
    texts_in_row, slots = [0] * num_rows, []
    for index in sorted(range(len(texts)), key=starts.__getitem__):
        (row, start), end = starts[index], starts[index][1] + len(texts[index])
        texts_in_row[row] += 1
        slots.append((index, row, texts_in_row[row] - 1))
        ids[row, start:end] = texts[index]
        documents[row, start:end] = texts_in_row[row]
        positions[row, start:end] = np.arange(end - start)
    max_slots = max(texts_in_row)
    slot_indices = np.zeros(len(texts), dtype=np.int64)
    for index, row, slot in slots:
        slot_indices[index] = row * max_slots + slot
    firsts = np.array([row * length + start for row, start in starts], dtype=np.int64)
    arrays = {
        "input_ids": ids,
        "documents": documents,
        "positions": positions,
        "slots": np.arange(1, max_slots + 1),
        "texts": slot_indices,
        "firsts": firsts,
        "lasts": firsts + np.array([len(text) - 1 for text in texts]),
    }
    return as_tensors(arrays)


def _pack_lengths(lengths: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """Return ((row, start) of each text, the length of a row)."""
    filled = [0] * max(1, round(sum(lengths) / _PACKED_TOKENS))
    starts: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):  # the longest first
        row = filled.index(min(filled))  # into the emptiest row
        starts[index] = (row, filled[row])
        filled[row] += lengths[index]
    return starts, round_up(max(filled))


def packed_vectors(
    model: PreTrainedModel, rows: Mapping[str, torch.Tensor], pooling: Pooling, *, causal: bool
) -> torch.Tensor:
    """Return the pooled vectors of `packed_rows`, float32 (texts, size), with gradient.

    `causal`: True if tokens attend only to those before them.
    """
    import torch

    from artel.models.document_mask import document_inputs

    documents = rows["documents"]
    inputs: dict[str, Any] = document_inputs(model, documents, rows["positions"], causal=causal)
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    hidden = model(input_ids=rows["input_ids"], **inputs).last_hidden_state
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = hidden.float()
        if pooling != "mean":
            return hidden.flatten(0, 1)[rows["firsts" if pooling == "cls" else "lasts"]]
        # A matmul, not index_add: on a GPU index_add sums in a different order each time.
        membership = (documents[:, None] == rows["slots"][None, :, None]).float()
        sums = (membership @ hidden).flatten(0, 1)[rows["texts"]]
        return sums / membership.sum(dim=2).flatten()[rows["texts"]][:, None]


def group_vectors(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], groups: Sequence[LengthGroup], pooling: Pooling
) -> torch.Tensor:
    """Return the pooled vectors of `group_rows`, float32 (texts, size), with gradient."""
    import torch

    vectors = [
        _pool(model(**inputs).last_hidden_state, group.slice(tensors["attention_mask"]), pooling)
        for group, inputs in zip(groups, group_inputs(model, tensors, groups), strict=True)
    ]
    return torch.cat(vectors)[tensors["unsorted_indices"]]


def _pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Pool the last hidden states (rows, length, size) to float32 (rows, size)."""
    import torch

    with torch.autocast(hidden.device.type, enabled=False):
        hidden, counts = hidden.float(), mask.sum(dim=1)
        if pooling == "cls":
            return hidden[:, 0]
        if pooling == "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), counts - 1]
        return (mask[:, None].float() @ hidden)[:, 0] / counts[:, None]


def finalize_vectors(vectors: torch.Tensor, embedding: EmbeddingConfig) -> torch.Tensor:
    """Return the final vectors (texts, size), normalized if `embedding.normalize` is set."""
    import torch

    return torch.nn.functional.normalize(vectors, dim=1) if embedding.normalize else vectors


def is_causal(model: PreTrainedModel) -> bool:
    """True if a token's state does not depend on later tokens (a decoder). Runs the model on a few tokens."""
    import torch

    device = model.get_input_embeddings().weight.device
    vocabulary = model.config.get_text_config().vocab_size
    ids = (vocabulary // 2 + torch.arange(_PROBE_TOKENS, device=device)) % vocabulary
    changed_ids = torch.cat([ids[:-1], (ids[-1:] + 1) % vocabulary])
    states = _last_hidden_states(model, {"input_ids": torch.stack([ids, changed_ids])})
    return bool(torch.equal(states[0, 0], states[1, 0]))


def isolates_texts(model: PreTrainedModel, *, causal: bool) -> bool:
    """True if texts in one row get the same vectors as in separate rows. Runs the model on a few tokens.

    Also False if sharing rows saves no work. It saves work with FlexAttention, and with per-document attention on a
    CPU.
    """
    import torch

    from artel.models.attention_masks import takes_block_masks, takes_document_numbers
    from artel.models.document_mask import document_inputs
    from artel.models.half_base import hidden_dtype

    if not (takes_block_masks(model) or takes_document_numbers(model)):
        return False
    device = model.get_input_embeddings().weight.device
    vocabulary = model.config.get_text_config().vocab_size
    ids = (vocabulary // 2 + torch.arange(2 * _PROBE_TOKENS - 1, device=device)[None]) % vocabulary
    numbers = torch.arange(ids.shape[1], device=device)[None]
    try:
        inputs = document_inputs(model, 1 + numbers // _PROBE_TOKENS, numbers % _PROBE_TOKENS, causal=causal)
        packed = _last_hidden_states(model, {"input_ids": ids, **inputs})
        separate = torch.cat(
            [_last_hidden_states(model, {"input_ids": text}) for text in ids.split(_PROBE_TOKENS, dim=1)], dim=1
        )
    except InputError:
        raise
    except Exception:  # architectures without such masks fail in various ways
        return False
    difference = float((packed - separate).abs().max() / separate.abs().max())
    # The bounds of `check_documents`, for the same reason.
    exact = hidden_dtype(model) == torch.float32 and not getattr(model, "is_quantized", False)
    return difference < (1e-4 if exact else 0.05)


def _last_hidden_states(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the last hidden states, float32 (rows, length, size), without dropout."""
    with evaluation_mode(model):
        states: torch.Tensor = model(**inputs).last_hidden_state
        return states.float()


class TextEncoder:
    """Turns texts into vectors. Texts are cut to `block` tokens."""

    def __init__(self, tokenizer: Tokenizer, reader: MatchReader, embedding: EmbeddingConfig, block: int) -> None:
        self._tokenizer, self._reader, self._embedding, self._block = tokenizer, reader, embedding, block

    def rows(self, texts: Sequence[Any], input_type: str) -> list[tuple[np.ndarray, bool]]:
        """Return the ids of each text, int64 (tokens,), and True if it was cut.

        A text may also be ids with special tokens. `input_type`: query or document, which selects the prompt; empty for
        no prompt. Raise InputError if a text has no token, or `input_type` is unknown.
        """
        encoded = iter(self._encode([text for text in texts if isinstance(text, str)], input_type))
        rows: list[tuple[np.ndarray, bool]] = []
        for text in texts:
            if isinstance(text, str):
                ids = next(encoded)
                row = self._reader.add_special_tokens(ids)
                rows.append((row, len(row) < len(ids) + self._reader.frame.size))
            else:
                rows.append((np.array(text[: self._block], dtype=np.int64), len(text) > self._block))
        return rows

    def _encode(self, texts: Sequence[str], input_type: str) -> list[np.ndarray]:
        """Return the ids of each text after its prompt, without special tokens."""
        prompts = self._embedding.prompts
        prompt = {"query": prompts.query, "document": prompts.document, "": ""}.get(input_type)
        if prompt is None:
            what = f"{input_type!r} is not a kind of text"
            raise InputError.at("input_type", what, "use query or document, or remove it")
        encoded = list(self._tokenizer.encode([prompt + text for text in texts]))
        for index, ids in enumerate(encoded):
            if not len(ids):
                raise InputError.at("input", f"text {index} has no token", "use a text with words in it")
        return encoded

    def vectors(
        self, model: PreTrainedModel, rows: Sequence[np.ndarray], *, dimensions: int | None = None
    ) -> np.ndarray:
        """Return vectors, float32 (rows, size), or their first `dimensions` numbers.

        Raise InputError if the vectors have fewer numbers than `dimensions`.
        """
        vector_size = model.config.get_text_config().hidden_size
        if dimensions is not None and not 0 < dimensions <= vector_size:
            what = f"a vector has {vector_size} numbers, but {dimensions} are requested"
            raise InputError.at("dimensions", what, f"write a number from 1 to {vector_size}")
        result = np.empty((len(rows), dimensions or vector_size), dtype=np.float32)
        with evaluation_mode(model):
            for indices in batches_by_length([len(row) for row in rows]):
                grouped = group_rows([rows[row] for row in indices], 1, self._tokenizer.pad_id)
                tensors = {name: tensor.to(model.device) for name, tensor in grouped.tensors.items()}
                outputs = group_vectors(model, tensors, grouped.groups, self._embedding.pooling)[:, :dimensions]
                result[indices] = finalize_vectors(outputs, self._embedding).cpu().numpy()
        return result
