"""A user's own code: modules named in the run file or on the command line, and the guard around calls into them.

Plugins are imported before the rest of the run file is checked. Anything may go wrong in a user's code, `sys.exit`
included: the error that people see names the function, its file and line, and is no fault of artel's.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import xxhash

from artel.errors import ArtelError, InputError, WorkError

_ARTEL = __package__
_OWN: set[str] = set()
"""Top-level names of the user's modules."""


@contextmanager
def guarded(where: str, what: str, fix: str = "", kind: type[ArtelError] = InputError) -> Iterator[None]:
    """Run a user's code inside the block. Whatever it raises becomes an error of `kind` at `where`.

    Errors of artel and Ctrl-C pass through.
    """
    try:
        yield
    except (ArtelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise kind.at(where, f"{what}: {raised(error)}", fix) from None


def raised(error: BaseException) -> str:
    """The type, message and place of an exception of a user's code: "ValueError: no city, in weather (tools.py:12)"."""
    text = message_of(error)
    name = type(error).__name__ if not isinstance(error, SystemExit) else "sys.exit was called"
    place = _own_place(error, called_artel=True)
    return (f"{name}: {text}" if text else name) + (f", in {place[1]} ({place[0]})" if place else "")


def message_of(error: BaseException) -> str:
    """The message of an exception whose class, and so its `__str__`, may be a user's."""
    try:
        return str(error)
    except BaseException as another:
        return f"its message cannot be shown ({type(another).__name__})"


def own_code_error(error: BaseException) -> WorkError | None:
    """Return the error to report for an exception that came from a user's code; None if it came from elsewhere."""
    place = _own_place(error)
    if place is None or isinstance(error, ArtelError | KeyboardInterrupt):
        return None
    return WorkError.at(place[0], f"your own code failed: {raised(error)}", "fix it there; it is not part of artel")


def _own_place(error: BaseException, *, called_artel: bool = False) -> tuple[str, str] | None:
    """(file:line, function) of a user's code that an exception came from, directly or in a package that it called.

    With `called_artel` also if artel raised it, called by the user's code.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in _OWN:
            return f"{frame.f_code.co_filename}:{line}", frame.f_code.co_name
        if package == _ARTEL and not called_artel:
            return None
    return None


def note_own(module: str) -> None:
    """Remember a module as the user's code, before it is imported."""
    _OWN.add(module.partition(".")[0])


def import_own_module(name: str, where: str, fix: str) -> ModuleType:
    """A module of the user's, looked for in the working folder too. Raises InputError at `where`."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file here must not stand in for a module that others import
    note_own(name)
    fix = f"{fix}; the module is looked for in {here} and on PYTHONPATH"
    with guarded(where, f"{name!r} cannot be imported", fix):
        return import_module(name)


def load_plugin(name: str) -> str:
    """Import a plugin. Raises ValueError, as validators of the run file do."""
    try:
        import_own_module(name, "plugins", "write package.module")
    except InputError as error:
        problem = error.problems[0]
        raise ValueError(f"{problem.what.replace('; ', ', ')}; {problem.fix}") from None
    return name


def code_digest(module: str) -> str:
    """A digest of a module's code: its file, or all files of the package that it belongs to."""
    file = Path(sys.modules[module].__file__ or "")
    files = sorted(file.parent.rglob("*.py")) if sys.modules[module].__package__ else [file]
    return xxhash.xxh3_64_hexdigest(b"\0".join(each.read_bytes() for each in files if each.is_file()))
