"""Prepare the text of a run: what `artel prepare` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from artel.config import Overrides, RunConfig, RunFile, dump_run, located
from artel.errors import InputError, Problem
from artel.launching.background_check import Refused, checking_in_background, has_no_training_keys
from artel.launching.quiet_libraries import quiet_libraries
from artel.launching.read_run import SECRETS_NOTE, checked_run, has_secrets
from artel.preparing import prepare
from artel.storage import check_cache, write_file
from artel.training.run_folder import RunFolder, written_checkpoints

if TYPE_CHECKING:
    from artel.preparing import Prepared


def prepare_run(file: RunFile, overrides: Overrides, announce: Callable[[str], None]) -> Prepared:
    """The token store of a run's text, made unless it was made before and nothing of it is missing.

    RUN/ledger.json counts its documents, and RUN/config.yaml describes the run until it is trained. Raises InputError
    with all that is wrong with text and run, WorkError.
    """
    run = checked_run(file, overrides, here=False)
    folder = RunFolder(Path(run.run))
    folder.check_claim()
    if not run.data.store:
        check_cache()
    if has_secrets(run):
        announce(SECRETS_NOTE)
    try:
        with file.named() as name:
            prepared = prepare(
                run, announce, verify=True, while_making=lambda: checking_in_background(run, name, overrides)
            )
    except Refused:
        raise
    except InputError as error:  # together with all else that is wrong with the run
        text_problems = [located(problem, run) for problem in error.problems]
        raise InputError(dict.fromkeys([*text_problems, *_other_problems(run)])) from None
    if copied := folder.claim():
        announce(copied)
    write_file(folder.ledger, (prepared.folder / "ledger.json").read_bytes())
    if not (folder.starts.is_file() or folder.result.is_file() or written_checkpoints(folder.checkpoints)):
        write_file(folder.config, dump_run(prepared.config))  # commands that take a run's folder can open it
    for note in () if prepared.made else prepared.notes():
        announce(note)
    announce(prepared.summary())
    announce(str(prepared.folder))
    return prepared


def _other_problems(run: RunConfig) -> tuple[Problem, ...]:
    """What the checks of the run find."""
    if has_no_training_keys(run):
        return ()
    quiet_libraries()
    from artel.planning import Start, check_run

    try:
        check_run(run, Start(here=False))
    except InputError as error:
        return tuple(error.problems)
    return ()
