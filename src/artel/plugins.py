"""A user's own modules, named in the run file: they are imported before the rest of the file is checked."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import xxhash

from artel.errors import ArtelError, InputError


def import_own_module(name: str, where: str, fix: str) -> ModuleType:
    """A module of the user's, looked for in the working folder too. Raises InputError at `where`."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file here must not stand in for a module that others import
    try:
        return import_module(name)
    except ArtelError:
        raise
    except (Exception, SystemExit) as error:  # the module is the user's: anything may go wrong in it
        what = f"{name!r} cannot be imported: {type(error).__name__}: {error}"
        raise InputError.at(where, what, f"{fix}; the module is looked for in {here} and on PYTHONPATH") from None


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
