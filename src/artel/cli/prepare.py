"""`artel prepare`: text in, a token store out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from artel.cli.beside import Refused, checking_beside, says_nothing_of_training
from artel.cli.common import AsJson, Overrides, RunName, print_json, quiet_libraries, read_run, tell, tell_of_secrets
from artel.errors import InputError, Problem

if TYPE_CHECKING:
    from artel.config import RunConfig


def prepare(name: RunName, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Clean, unique, split and tokenise a run's text, unless it was done before and is still whole.

    Example: artel prepare run.yaml data.block=512
    """
    from artel.config import located
    from artel.preparing import prepare as prepare_store
    from artel.storage import check_cache, write_file
    from artel.training.run_folder import RunFolder

    run = read_run(name, overrides, here=False)
    folder = RunFolder(Path(run.run))
    folder.check_claim()
    if not run.data.store:
        check_cache()
    tell_of_secrets(run)
    try:
        prepared = prepare_store(
            run, tell, verify=True, while_making=lambda: checking_beside(run, name, overrides or [])
        )
    except Refused:
        raise
    except InputError as error:  # with what is wrong with the texts, all else
        of_texts = [located(problem, run) for problem in error.problems]
        raise InputError(dict.fromkeys([*of_texts, *_problems(run)])) from None
    ledger = prepared.ledger()
    folder.claim()
    write_file(folder.ledger, (prepared.folder / "ledger.json").read_bytes())
    for note in () if prepared.made else prepared.notes():
        tell(note)
    tell(prepared.summary(), str(prepared.folder))
    if as_json:
        result = {name: ledger[name] for name in ("documents", "tokens", "bytes")}
        print_json({**result, "store": str(prepared.folder), "made": prepared.made})


def _problems(run: RunConfig) -> tuple[Problem, ...]:
    """What the checks find, at once: the text is not read anyway."""
    if says_nothing_of_training(run):
        return ()
    quiet_libraries()
    from artel.planning import Start, check_run

    try:
        check_run(run, Start(here=False))
    except InputError as error:
        return tuple(error.problems)
    return ()
