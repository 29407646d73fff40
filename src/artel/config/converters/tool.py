"""What each converter declares: the tool, how its configurations are recognized, and how one becomes a run file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from artel.config.converters.keys import Converted


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool whose configurations `artel config convert` reads; registered in `artel.registry.TOOLS`."""

    name: str
    recognizes: Callable[[str], bool]
    """(text) → whether it is of this tool, also where it is broken. The first tool that says so converts it."""
    convert: Callable[[str, str], Converted]
    """(text, its file's name for messages) → the run file. Raises InputError with all problems."""
    is_no_run_file: bool = False
    """True where what it recognizes cannot be a run file: other verbs then say to convert it."""
