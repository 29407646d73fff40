"""A model to be used: from a run, a folder or a hub id; or a run's model before any training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from artel.config import ModelConfig, RunConfig, load_run
from artel.errors import InputError, Problem
from artel.models import build_model, position_limit
from artel.objectives import objective_of
from artel.preparing import prepare
from artel.tokens import Tokenizer, load_tokenizer
from artel.training import RunFolder
from artel.training.checkpoint import load_weights


@dataclass(frozen=True, slots=True)
class Opened:
    model: PreTrainedModel
    tokenizer: Tokenizer

    @property
    def window(self) -> int | None:
        return position_limit(self.model)


def open_model(name: str) -> Opened:
    """The final model of a run, its newest checkpoint while it is not finished, or any Hugging Face model."""
    folder = RunFolder(Path(name))
    if (folder.model / "config.json").is_file():
        return _open_folder(str(folder.model))
    if folder.config.is_file() and (folder.checkpoints / "latest").exists():
        opened = _fresh(load_run(name), lambda _: None)
        load_weights(folder.checkpoints / "latest", opened.model)
        return opened
    if folder.config.is_file():
        raise InputError([Problem(name, "has no checkpoint yet", f"train it: artel train {folder.config}")])
    if folder.path.is_file():
        fix = "give the run's folder, or --untrained for the model before training"
        raise InputError([Problem(name, "is a file, not a run, a model folder or a hub id", fix)])
    return _open_folder(name)


def open_untrained(run: RunConfig, tell: Callable[[str], None]) -> Opened:
    """The run's model as it is before the first step, with its tokenizer (prepared when need be)."""
    return _fresh(run, tell)


def _open_folder(name: str) -> Opened:
    tokenizer = load_tokenizer(name, where=name)
    built = build_model(
        ModelConfig.model_validate({"from": name}), tokenizer, auto_class="AutoModelForCausalLM", block=1, seed=0
    )
    return Opened(built.model, tokenizer)


def _fresh(run: RunConfig, tell: Callable[[str], None]) -> Opened:
    tokenizer = prepare(run, tell).tokenizer()
    auto_class = objective_of(run).auto_class
    built = build_model(run.model, tokenizer, auto_class=auto_class, block=run.data.block, seed=run.seed)
    return Opened(built.model, tokenizer)
