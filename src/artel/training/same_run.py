"""Compares a run file with the run in its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from artel.config import RunConfig, dump_run, load_run, result_differences
from artel.errors import InputError
from artel.messages import logger
from artel.preparing import PreparedText
from artel.storage import remove_leftovers, write_file
from artel.training.lengthening import change_length
from artel.training.packing import AUTO, with_packing
from artel.training.run_folder import RunFolder, check_same, differs_in_length, written_checkpoints


def check_same_run(config: RunConfig, prepared: PreparedText) -> None:
    """Raise InputError if a run to be resumed has changed keys that affect the result, and show the differences.

    The length may change if the finished steps stay the same (`lengthening.py`); a complete run is then incomplete
    again. Also writes RUN/config.yaml, and removes partial files of a killed start. Called once, by the first process,
    before the others start.
    """
    folder = RunFolder(Path(config.run))
    folder.check_checkpoint_ownership()
    checkpoints = written_checkpoints(folder.checkpoints)
    if folder.result.is_file() and not (folder.is_complete or checkpoints or config.checkpoint.copy_to):
        message = "lacks the weights of this run, which was complete, but there is no checkpoint to restore them from"
        raise InputError.at(str(folder.model), message, "restore them, or start over with --restart")
    if folder.config.is_file() and (folder.is_complete or checkpoints):
        file = _find_training_file(folder, config)
        earlier_run = load_run(str(file))
        if differs_in_length(earlier_run, config):
            folder.check_model_ownership()
            if change_length(folder.config, earlier_run, config, prepared, folder.model):
                folder.result.unlink(missing_ok=True)
        else:
            check_same(file, config, "choose another folder (run=…)")
    elif folder.rollouts.is_dir() and not _began_with(folder, config):
        logger.info("%s is removed: the run has no checkpoint, and other settings than before", folder.rollouts)
        shutil.rmtree(folder.rollouts)
    remove_leftovers(folder.path)
    write_file(folder.config, dump_run(config))


def _began_with(folder: RunFolder, config: RunConfig) -> bool:
    """True if the settings of the last start would have given the same run."""
    return folder.config.is_file() and not result_differences(load_run(str(folder.config)), config)


def _find_training_file(folder: RunFolder, config: RunConfig) -> Path:
    """Return the file with the training settings: config.yaml, or the newest checkpoint's if config.yaml was edited.

    config.yaml may name other paths, since the store's digest identifies texts, and models are moved.
    """
    saved = folder.newest_run_file()
    if saved is None or result_differences(load_run(str(folder.config)), config):
        return folder.config
    changed = result_differences(load_run(str(saved)), config)
    is_edited = any(not line.startswith(("data.", "model.from:", "tokenizer.from:")) for line in changed)
    return saved if is_edited else folder.config


def restore_packing(config: RunConfig, *, needs_checkpoint: bool = True) -> RunConfig:
    """Return the run with the `data.packing` of its first start, from RUN/config.yaml, if the run file says auto.

    `needs_checkpoint`: use that choice only if the run has checkpoints.
    """
    folder = RunFolder(Path(config.run))
    has_started = not needs_checkpoint or folder.is_complete or written_checkpoints(folder.checkpoints)
    if config.data.packing != AUTO or not folder.config.is_file() or not has_started:
        return config
    earlier = load_run(str(folder.config)).data.packing
    return config if earlier == AUTO else with_packing(config, earlier)


def restore_choice(config: RunConfig, *, needs_checkpoint: bool = True) -> RunConfig | None:
    """Return a run with `model.auto` with the choices of its first start, from RUN/config.yaml, or None.

    `needs_checkpoint`: use the choices only if the run has checkpoints. Keys set in the run file stay. If they differ,
    the comparison of the two files will refuse them.
    """
    folder = RunFolder(Path(config.run))
    if not folder.config.is_file() or (
        needs_checkpoint and not (folder.is_complete or written_checkpoints(folder.checkpoints))
    ):
        return None
    earlier_run = load_run(str(folder.config))
    if earlier_run.model.config is None:
        return None
    sections = {}
    for name in ("data", "train"):
        section, earlier_section = getattr(config, name), getattr(earlier_run, name)
        set_keys = {key: getattr(section, key) for key in section.model_fields_set}
        chosen = earlier_section if name == "train" else section.model_copy(update={"block": earlier_section.block})
        sections[name] = chosen.model_copy(update=set_keys)
    return config.model_copy(update={**sections, "model": earlier_run.model})
