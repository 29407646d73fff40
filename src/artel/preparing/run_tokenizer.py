"""The tokenizer of a run: loaded from a folder or the hub, or trained on the run's own text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artel.config import RunConfig
from artel.errors import InputError
from artel.messages import logger
from artel.preparing.document_lists import create_ledger
from artel.preparing.progress import reporting
from artel.preparing.workspace import Workspace
from artel.storage import new_folder
from artel.text import read_documents
from artel.tokens import Tokenizer, load_tokenizer, train_tokenizer
from artel.tokens.tokenizer.train import TRAINING_BYTES, describe_vocabulary

if TYPE_CHECKING:
    from artel.objectives.base import Objective


def tokenizer_name(config: RunConfig) -> str | None:
    """Return the folder or hub id of the tokenizer; None if it is trained."""
    return tokenizer_location(config)[1]


def tokenizer_location(config: RunConfig) -> tuple[str, str | None]:
    """Return the run-file key of the tokenizer, and its folder or hub id, None if it is trained."""
    if config.tokenizer.train is not None:
        return "tokenizer.train", None
    if config.tokenizer.from_:
        return "tokenizer.from", config.tokenizer.from_
    if config.model.from_:
        return "model.from", config.model.from_
    from artel.objectives import objective_type

    return objective_type(config).default_tokenizer(config) or ("tokenizer.train", None)


def check_tokenizer_folder(config: RunConfig) -> None:
    """Raise InputError if the tokenizer's folder does not exist."""
    key, name = tokenizer_location(config)
    if name is None or Path(name).exists():
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1:  # not a hub id
        raise InputError.at(key, f"{name} is not a folder", "use a folder with a tokenizer, or a hub id")


def tokenizer_files(config: RunConfig) -> list[Any]:
    """Return the identity of the tokenizer: its name, or path, size and modification time of each of its files."""
    name = tokenizer_name(config)
    if name is None or not Path(name).is_dir():
        return [name]
    prefixes = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "chat_template")
    files = sorted(file for file in Path(name).iterdir() if file.name.startswith(prefixes))
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def run_tokenizer(workspace: Workspace, save_rejected: Callable[[Path], object]) -> Tokenizer:
    """Save the run's tokenizer, with the objective's special tokens, in the workspace. Load it from there.

    Raise InputError if no tokenizer can be loaded or trained, or if it does not fit the objective. If too many records
    are rejected, `save_rejected` gets the file that lists them.
    """
    from artel.objectives import build_objective, objective_type

    config = workspace.config
    if not workspace.tokenizer_path.exists():
        objective = objective_type(config)
        rejected = workspace.path / "rejected.jsonl"
        try:
            tokenizer = _load_or_train(workspace, objective, rejected)
        except InputError:
            if rejected.is_file() and rejected.stat().st_size:  # too many: there will be no selection to list them
                save_rejected(rejected)
            raise
        build_objective(config, tokenizer)
        with new_folder(workspace.tokenizer_path) as partial:
            tokenizer.save(partial)
    return load_tokenizer(str(workspace.tokenizer_path))


def _load_or_train(workspace: Workspace, objective: type[Objective], rejected: Path) -> Tokenizer:
    config = workspace.config
    key, name = tokenizer_location(config)
    if name is not None:
        return load_tokenizer(name, key, runs_code=name == config.model.trust_remote_code)
    from artel.config import TokenizerTraining

    logger.info("training the tokenizer")
    training = config.tokenizer.train or TokenizerTraining()
    training = training.model_copy(
        update={"special": list(dict.fromkeys([*objective.special_tokens(config), *training.special]))}
    )
    with rejected.open("wb") as stream:
        ledger = create_ledger(config, stream)
        num_read = 0

        def texts() -> Iterator[str]:
            nonlocal num_read
            benchmarks = workspace.benchmark_index()
            for document in read_documents(config.data, ledger, TRAINING_BYTES, benchmarks):
                num_read += 1
                if document.split == "train":
                    yield document.record.text

        with reporting(lambda: f"training the tokenizer: {num_read:,} documents read"):
            tokenizer = train_tokenizer(texts(), training, encoder=objective.adds_special_tokens)
    if note := describe_vocabulary(training.vocab, tokenizer.vocabulary, training.pattern):
        logger.info(note)
    return tokenizer
