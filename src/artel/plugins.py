"""User code: import modules named in the run file or on the command line, and guard calls into them.

Plugins are imported before artel checks the rest of the run file. User code may raise anything or call `sys.exit`. The
error then names the function with its file and line, and says that it is not part of artel.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import xxhash

from artel.errors import ArtelError, InputError, WorkError

_ARTEL = __package__
_USER_MODULES: set[str] = set()
"""Top-level names of the user's modules."""


@contextmanager
def guard_user_code(where: str, what: str, fix: str = "", kind: type[ArtelError] = InputError) -> Iterator[None]:
    """Run user code inside the block. Anything it raises becomes an error of `kind` at `where`.

    Errors of artel and Ctrl-C pass through.
    """
    try:
        yield
    except (ArtelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise kind.at(where, f"{what}: {describe_exception(error)}", fix) from None


def describe_exception(error: BaseException) -> str:
    """Describe an exception of user code: "ValueError: no city, in weather (tools.py:12)"."""
    text = exception_message(error)
    name = type(error).__name__ if not isinstance(error, SystemExit) else "sys.exit was called"
    location = _user_location(error, called_artel=True)
    return (f"{name}: {text}" if text else name) + (f", in {location[1]} ({location[0]})" if location else "")


def exception_message(error: BaseException) -> str:
    """Return the message of an exception whose class, with its `__str__`, may be user code."""
    try:
        return str(error)
    except BaseException as str_error:
        return f"its message cannot be shown ({type(str_error).__name__})"


def user_code_error(error: BaseException) -> WorkError | None:
    """Return the error to report for an exception raised by user code, or None if it came from elsewhere."""
    location = _user_location(error)
    if location is None or isinstance(error, ArtelError | KeyboardInterrupt):
        return None
    return WorkError.at(
        location[0], f"your own code failed: {describe_exception(error)}", "fix it there; it is not part of artel"
    )


def _user_location(error: BaseException, *, called_artel: bool = False) -> tuple[str, str] | None:
    """Return (file:line, function) of the user code that raised, directly or through a package that it called.

    With `called_artel`, also if artel raised it while called by user code.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in _USER_MODULES:
            return f"{frame.f_code.co_filename}:{line}", frame.f_code.co_name
        if package == _ARTEL and not called_artel:
            return None
    return None


def register_user_module(module: str) -> None:
    """Register a module as user code, before it is imported."""
    _USER_MODULES.add(module.partition(".")[0])


def import_user_module(name: str, where: str, fix: str) -> ModuleType:
    """Import a user module, also from the working folder. Raise InputError at `where` if that fails."""
    working_folder = str(Path.cwd())
    if working_folder not in sys.path:
        sys.path.append(working_folder)  # last, so that its files never shadow installed modules
    register_user_module(name)
    fix = f"{fix}; the module is searched in {working_folder} and PYTHONPATH"
    with guard_user_code(where, f"{name!r} cannot be imported", fix):
        return import_module(name)


def import_user_file(path: Path) -> ModuleType:
    """Run a user's Python file as a module. It may import from its folder. Raise InputError if that fails."""
    digest = xxhash.xxh3_64_hexdigest(os.fsencode(path.absolute()))  # files in two folders may have the same name
    spec = spec_from_file_location(f"artel_user_{path.stem}_{digest}", path)
    assert spec is not None
    assert spec.loader is not None
    register_user_module(spec.name)
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look their module up there
    folder = str(path.parent.absolute())
    sys.path.insert(0, folder)  # the file may import from its folder, as with `python FILE`
    try:
        with guard_user_code(str(path), "cannot be run", f"try it: python {path.name}"):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


def load_plugin(name: str) -> str:
    """Import a plugin. Raise ValueError if that fails, like validators of the run file."""
    try:
        import_user_module(name, "plugins", "write package.module")
    except InputError as error:
        problem = error.problems[0]
        raise ValueError(f"{problem.what.replace('; ', ', ')}; {problem.fix}") from None
    return name


def code_digest(module: str) -> str:
    """Return a digest of a module's code: its file, or all files of its package."""
    file = Path(sys.modules[module].__file__ or "")
    files = sorted(file.parent.rglob("*.py")) if sys.modules[module].__package__ else [file]
    return xxhash.xxh3_64_hexdigest(b"\0".join(file.read_bytes() for file in files if file.is_file()))
