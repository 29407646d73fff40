"""Positions whose frequencies follow the longest text of a batch: an answer would depend on its neighbours."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def steady_length(model: PreTrainedModel) -> int | None:
    """Tokens up to which the frequencies of positions stay the same; None where they never change.

    With `rope_type: dynamic` or `longrope` transformers chooses them by the highest position of a forward pass
    (`dynamic_rope_update`), whichever text it belongs to.
    """
    config: Any = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    lengths = []
    for parameters in (rope, *rope.values()):  # of all layers, or of each type of them
        if not isinstance(parameters, dict):
            continue
        kind = str(parameters.get("rope_type"))
        if kind == "longrope":
            original = parameters.get("original_max_position_embeddings")
            lengths.append(original or config.max_position_embeddings)
        elif "dynamic" in kind:
            lengths.append(config.max_position_embeddings)
    return min(lengths, default=None)
