"""Read the run of a command, with all that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artel.config import RunConfig, RunFile, WrongRunFile, dump_run, read_run_file
from artel.config.yaml_lines import by_line
from artel.errors import InputError
from artel.launching.quiet_libraries import quiet_libraries

SECRETS_NOTE = (
    "the run file has secrets in its addresses: the run's folder has *** in their place, and each start needs them "
    "again; write ${NAME} instead, and set NAME in the environment"
)


def read_run(name: str, overrides: Mapping[str, Any], *, here: bool = True) -> RunConfig:
    """The run of a command's arguments; `here`: this machine trains it.

    Raises InputError with all that is wrong with the run, not only with its file.
    """
    return checked_run(read_run_file(name), overrides, here=here)


def checked_run(file: RunFile, overrides: Mapping[str, Any], *, here: bool = True) -> RunConfig:
    """The same for a run file that has been read."""
    try:
        return file.run(overrides)
    except WrongRunFile as error:
        quiet_libraries()
        from artel.planning import Start, further_problems

        raise InputError(by_line([*error.problems, *further_problems(error, Start(here=here))])) from None


def has_secrets(run: RunConfig) -> bool:
    """True where addresses in a run file hold secrets, which are not written into the run's folder."""
    return dump_run(run) != dump_run(run, secrets=True)
