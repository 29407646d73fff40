"""`artel prepare`: text in, a token store out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from artel.cli.common import AsJson, OverrideWords, RunName, print_json, tell
from artel.errors import InputError, Problem
from artel.launching.quiet_libraries import quiet_libraries

if TYPE_CHECKING:
    from artel.config import RunConfig


def prepare(name: RunName, overrides: OverrideWords = None, as_json: AsJson = False) -> None:
    """Clean, unique, split and tokenize a run's text, unless that was done before and nothing is missing.

    Example: artel prepare run.yaml data.block=512
    """
    from artel.config import Overrides, located
    from artel.launching.background_check import Refused, checking_in_background
    from artel.launching.read_run import SECRETS_NOTE, has_secrets, read_run
    from artel.preparing import prepare as prepare_store
    from artel.storage import check_cache, write_file
    from artel.training.run_folder import RunFolder

    values = Overrides.parse(overrides)
    run = read_run(name, values, here=False)
    folder = RunFolder(Path(run.run))
    folder.check_claim()
    if not run.data.store:
        check_cache()
    if has_secrets(run):
        tell(SECRETS_NOTE)
    try:
        prepared = prepare_store(run, tell, verify=True, while_making=lambda: checking_in_background(run, name, values))
    except Refused:
        raise
    except InputError as error:  # together with all else that is wrong with the run
        text_problems = [located(problem, run) for problem in error.problems]
        raise InputError(dict.fromkeys([*text_problems, *_other_problems(run)])) from None
    ledger = prepared.ledger()
    folder.claim()
    write_file(folder.ledger, (prepared.folder / "ledger.json").read_bytes())
    for note in () if prepared.made else prepared.notes():
        tell(note)
    tell(prepared.summary(), str(prepared.folder))
    if as_json:
        result = {name: ledger[name] for name in ("documents", "tokens", "bytes")}
        print_json({**result, "store": str(prepared.folder), "made": prepared.made})


def _other_problems(run: RunConfig) -> tuple[Problem, ...]:
    """What the checks of the run find."""
    from artel.launching.background_check import has_no_training_keys

    if has_no_training_keys(run):
        return ()
    quiet_libraries()
    from artel.planning import Start, check_run

    try:
        check_run(run, Start(here=False))
    except InputError as error:
        return tuple(error.problems)
    return ()
