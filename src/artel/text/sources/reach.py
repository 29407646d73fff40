"""Where the sources of a run are looked for on this machine: what is written there later would be read too."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from artel.config import DataConfig
from artel.errors import InputError
from artel.storage import is_remote, own_path
from artel.text.reading.file_names import is_url
from artel.text.sources.find import all_sources, files_of, given_path
from artel.text.sources.walk import may_hold


@dataclass(frozen=True, slots=True)
class Reach:
    """A path of a source: a file, a folder or a glob."""

    where: str
    """The key in the run file."""
    path: str
    files: tuple[Path, ...]
    """Those that are there now."""

    def holds(self, folder: Path) -> bool:
        """Whether files in `folder`, a real path that need not exist, would be among those of the source."""
        given = given_path(self.path, self.where)
        parts = given.parts
        fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        if given.is_dir():
            fixed = len(parts)
        elif given.exists() or fixed == len(parts):
            return False
        real = Path(os.path.realpath(Path(*parts[:fixed])))
        if not folder.is_relative_to(real):
            return False
        return fixed == len(parts) or may_hold(folder.relative_to(real).parts, parts[fixed:])


def reaches_of(data: DataConfig) -> Iterator[Reach]:
    """Each path of each source that lies on this machine; none of those that cannot be found, which others tell of."""
    for where, source in all_sources(data):
        key = where if where == "data.validation" else f"{where}.path"
        for path in source.path if source.format != "dummy" else []:
            if not is_url(path) and not is_remote(path):
                with suppress(InputError):
                    yield Reach(key, path, tuple(files_of(source, path, key)))
        if source.outputs and where != "data.validation":
            key = f"{where}.outputs"
            with suppress(InputError):
                yield Reach(key, source.outputs, (own_path(source.outputs, key),))
