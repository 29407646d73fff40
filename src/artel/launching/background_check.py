"""Check a run in a separate process while this one prepares the text.

The checks import PyTorch, which takes as long as preparing 100 MB of text. If this process has imported PyTorch, it
checks the run itself. The process that reads the texts checks them. A run file without training keys needs no check.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from artel.errors import ArtelError, InputError, Problem, WorkError
from artel.launching.quiet_libraries import quiet_libraries
from artel.launching.worker import end_with_launcher, module_command
from artel.messages import logger
from artel.storage.unexpected_errors import worker_error

if TYPE_CHECKING:
    from artel.config import Overrides, RunConfig


class CheckError(InputError):
    """All problems found by the checks."""


class CheckResult(Protocol):
    def __call__(self, *, wait: bool = False) -> None:
        """Raise the problems found, if the checks have ended. With `wait`, wait for their end first."""


@contextmanager
def check_in_background(config: RunConfig, name: str, overrides: Overrides) -> Iterator[CheckResult]:
    """Check the run of `name` and `overrides` while the block runs. The block calls the yielded CheckResult."""
    if has_no_training_keys(config):
        yield lambda *, wait=False: None
        return
    if "torch" in sys.modules:
        logger.info("checking the run and its model")
        try:
            _check_run(config)
        except InputError as error:
            raise CheckError(error.problems) from None
        yield lambda *, wait=False: None
        return
    # In its own session, so that Ctrl-C reaches only this process, which then ends the other one.
    command = [*module_command("artel.launching.background_check"), str(os.getpid()), name, *overrides.words]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    is_known = False

    def result(*, wait: bool = False) -> None:
        nonlocal is_known
        if is_known or (process.poll() is None and not wait):
            return
        output = process.communicate()[0]
        is_known = True
        if process.returncode:
            raise _read_error(process.returncode, output)

    try:
        yield result
    finally:
        if not is_known:
            process.kill()
            process.communicate()


def has_no_training_keys(config: RunConfig) -> bool:
    """True if only keys of the text and its tokenizer differ from their defaults."""
    defaults = type(config).model_construct()
    text_keys = {"run", "seed", "data", "prepare", "tokenizer"}
    has_defaults = config.model_dump(exclude=text_keys) == defaults.model_dump(exclude=text_keys)
    return has_defaults and (config.data.block, config.data.from_store) == (
        defaults.data.block,
        defaults.data.from_store,
    )


def _read_error(status: int, output: bytes) -> ArtelError:
    if not output:  # it was killed
        fix = "run artel config check to see what it lacks, e.g. memory"
        return WorkError.at("the check of the run", f"exited with status {status}", fix)
    problems = [
        Problem(where, what, fix, tuple(quoted)) for where, what, fix, quoted in json.loads(output.splitlines()[-1])
    ]
    return CheckError(problems) if status == InputError.exit_code else WorkError(problems)


def _check_run(config: RunConfig) -> None:
    from artel.planning import StartConditions, check_run

    check_run(config, StartConditions(trains_here=False, checks_texts=False))


def main() -> None:
    """Run the checks in this process: print problems as JSON, and exit with the status of the error."""
    os.nice(10)  # preparing the text has priority
    parent, name, *words = sys.argv[1:]
    end_with_launcher(int(parent))
    try:
        quiet_libraries()
        from artel.config import Overrides, load_run

        _check_run(load_run(name, Overrides.parse(words)))
    except BaseException as error:  # the waiting process reports it
        failure = worker_error(error, "check")
        print(json.dumps([[problem.where, problem.what, problem.fix, problem.quoted] for problem in failure.problems]))
        sys.exit(failure.exit_code)


if __name__ == "__main__":
    main()
