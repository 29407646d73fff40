"""What the head of a pretrained model tells before it is loaded: its labels, or that it gives a score."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from artel.config import RunConfig


def base_labels(run: RunConfig, auto_class: str) -> list[str]:
    """Return the labels of the pretrained model's head in the order of its rows; [] if it has no such head or no names.

    It reads config.json only, of a folder or from the hub's cache, and needs neither PyTorch nor the network. What is
    wrong with that file is reported where the model is loaded.
    """
    file = _config_file(run.model.from_)
    if file is None:
        return []
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        names = {int(number): str(label) for number, label in values["id2label"].items()}
        (saved_by,) = values["architectures"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return []
    has_head = str(saved_by).endswith(auto_class.removeprefix("AutoModel"))
    has_names = not all(re.fullmatch(r"LABEL_\d+", label) for label in names.values())
    return [names[number] for number in sorted(names)] if has_head and has_names else []


def in_order_of(labels: Sequence[str], base: Sequence[str]) -> list[str]:
    """Return the labels that `base` has, in its order, and then the others in theirs. Ignores case."""
    places = {label.casefold(): number for number, label in reversed(list(enumerate(base)))}
    return sorted(labels, key=lambda label: places.get(label.casefold(), len(base)))


def _config_file(name: str | None) -> Path | None:
    if name is None:
        return None
    file = Path(name, "config.json")
    if file.is_file():
        return file
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def gives_a_score(architecture: str, folder: str) -> bool:
    """Whether a model has one output for a text: a reward model, a reranker, a regression."""
    from artel.models.loading.model_folder import read_config

    return architecture.endswith("ForSequenceClassification") and read_config(folder)[0].num_labels == 1


def reads_conversations(folder: str) -> bool:
    """Whether its tokenizer has a chat template, as those of reward models do."""
    from artel.tokens import load_tokenizer

    return bool(load_tokenizer(folder).hf.chat_template)


def names_its_problem(folder: str) -> bool:
    """Whether its configuration says what the output is (`problem_type`): those of rerankers do not."""
    from artel.models.loading.model_folder import read_config

    return getattr(read_config(folder)[0], "problem_type", None) is not None
