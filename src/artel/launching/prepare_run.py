"""Prepare the text of a run: `artel prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from artel.config import Overrides, RunConfig, RunFile, dump_run, with_location
from artel.errors import InputError, Problem
from artel.launching.background_check import CheckError, check_in_background, has_no_training_keys
from artel.launching.quiet_libraries import quiet_libraries
from artel.launching.read_run import SECRETS_NOTE, has_secrets, validate_run_file
from artel.messages import logger
from artel.preparing import prepare
from artel.storage import check_cache, write_file
from artel.training.run_folder import RunFolder, written_checkpoints

if TYPE_CHECKING:
    from artel.preparing import PreparedText


def prepare_run(file: RunFile, overrides: Overrides) -> PreparedText:
    """Return the token store of a run's text. Make it unless a complete one exists.

    Write RUN/ledger.json, which counts its documents, and RUN/config.yaml if the run is not trained yet. Raise
    InputError with all problems of text and run, or WorkError.
    """
    config = validate_run_file(file, overrides, here=False)
    folder = RunFolder(Path(config.run))
    folder.check_claim()
    if not config.data.store:
        check_cache()
    if has_secrets(config):
        logger.info(SECRETS_NOTE)
    try:
        with file.as_file() as name:
            prepared = prepare(config, verify=True, while_building=lambda: check_in_background(config, name, overrides))
    except CheckError:
        raise
    except InputError as error:  # reported with all other problems of the run
        text_problems = [with_location(problem, config) for problem in error.problems]
        raise InputError(dict.fromkeys([*text_problems, *_run_problems(config)])) from None
    if copied := folder.claim():
        logger.info(copied)
    write_file(folder.ledger, (prepared.folder / "ledger.json").read_bytes())
    if not (folder.starts.is_file() or folder.result.is_file() or written_checkpoints(folder.checkpoints)):
        write_file(folder.config, dump_run(prepared.config))  # commands that take a run's folder can open it
    for note in () if prepared.is_new else prepared.notes():
        logger.info(note)
    logger.info(prepared.summary())
    logger.info(str(prepared.folder))
    return prepared


def _run_problems(config: RunConfig) -> tuple[Problem, ...]:
    """Return the problems found by the checks of the run."""
    if has_no_training_keys(config):
        return ()
    quiet_libraries()
    from artel.planning import StartConditions, check_run

    try:
        check_run(config, StartConditions(trains_here=False))
    except InputError as error:
        return tuple(error.problems)
    return ()
