"""The checks of a run in a process of their own, beside the work on its text.

They need PyTorch, which takes seconds to import: as long as preparing a hundred megabytes of text. Texts are checked
before, by the process that reads them; a run file that says nothing of training has nothing to be checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from artel.cli.common import quiet_libraries
from artel.errors import ArtelError, InputError, Problem, WorkError
from artel.interpreter import python_of
from artel.launching.worker import end_with_launcher
from artel.storage.unexpected_errors import told_of_worker

if TYPE_CHECKING:
    from artel.config import RunConfig


class Refused(InputError):
    """What the checks have found: all there is to say."""


class Answer(Protocol):
    def __call__(self, *, wait: bool = False) -> None:
        """Raise what the checks have found, if they are over; with `wait` when they are."""


@contextmanager
def checking_beside(run: RunConfig, name: str, overrides: Sequence[str]) -> Iterator[Answer]:
    """Check the run that `name` and `overrides` describe while the block runs; the block asks for the answer."""
    if says_nothing_of_training(run):
        yield lambda *, wait=False: None
        return
    # A session of its own: Ctrl-C is for this process, which ends the other one.
    command = [*python_of("artel.cli.beside"), str(os.getpid()), name, *overrides]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    is_known = False

    def answer(*, wait: bool = False) -> None:
        nonlocal is_known
        if is_known or (process.poll() is None and not wait):
            return
        written = process.communicate()[0]
        is_known = True
        if process.returncode:
            raise _error(process.returncode, written)

    try:
        yield answer
    finally:
        if not is_known:
            process.kill()
            process.communicate()


def says_nothing_of_training(run: RunConfig) -> bool:
    """Whether every key is as it is by default, but those of the text and its tokenizer."""
    plain = type(run).model_construct()
    of_text = {"run", "seed", "data", "prepare", "tokenizer"}
    same = run.model_dump(exclude=of_text) == plain.model_dump(exclude=of_text)
    return same and (run.data.block, run.data.from_store) == (plain.data.block, plain.data.from_store)


def _error(status: int, written: bytes) -> ArtelError:
    if not written:  # ended by force
        fix = "look for what it lacked, as memory: artel config check"
        return WorkError.at("the check of the run", f"ended with status {status}", fix)
    problems = [
        Problem(where, what, fix, tuple(quoted)) for where, what, fix, quoted in json.loads(written.splitlines()[-1])
    ]
    return Refused(problems) if status == InputError.exit_code else WorkError(problems)


def _check(name: str, overrides: Sequence[str]) -> None:
    quiet_libraries()
    from artel.config import load_run
    from artel.planning import Start, check_run

    check_run(load_run(name, overrides), Start(here=False, texts=False))


def main() -> None:
    """The process beside: what is wrong as JSON on standard output, and the exit status of its kind."""
    os.nice(10)  # the text comes first
    parent, name, *overrides = sys.argv[1:]
    end_with_launcher(int(parent))
    try:
        _check(name, overrides)
    except BaseException as error:  # the process that waits for this one says it
        known = told_of_worker(error, "check")
        print(json.dumps([[each.where, each.what, each.fix, each.quoted] for each in known.problems]))
        sys.exit(known.exit_code)


if __name__ == "__main__":
    main()
