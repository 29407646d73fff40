"""Read the run of a command, and report all of its problems together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artel.config import InvalidRunFile, RunConfig, RunFile, dump_run, read_run_file
from artel.config.yaml_lines import sort_by_line
from artel.errors import InputError
from artel.launching.quiet_libraries import quiet_libraries

SECRETS_NOTE = (
    "the run file has secrets in its addresses. The run's folder has *** instead, so each start needs them again; "
    "write ${NAME} instead, and set NAME in the environment"
)


def read_run(name: str, overrides: Mapping[str, Any], *, here: bool = True) -> RunConfig:
    """Return the run of a command's arguments. `here`: this machine trains it.

    Raise InputError with all problems of the run, not only those of its file.
    """
    return validate_run_file(read_run_file(name), overrides, here=here)


def validate_run_file(file: RunFile, overrides: Mapping[str, Any], *, here: bool = True) -> RunConfig:
    """Return the run of a run file that is already read. See `read_run`."""
    try:
        return file.run(overrides)
    except InvalidRunFile as error:
        quiet_libraries()
        from artel.planning import StartConditions, find_further_problems

        raise InputError(
            sort_by_line([*error.problems, *find_further_problems(error, StartConditions(trains_here=here))])
        ) from None


def has_secrets(config: RunConfig) -> bool:
    """True if addresses in the run file contain secrets, which are not written into the run's folder."""
    return dump_run(config) != dump_run(config, secrets=True)
