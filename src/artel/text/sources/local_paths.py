"""The local paths of a run's sources: what is written there later would be read too."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from artel.config import DataConfig
from artel.errors import InputError
from artel.registry import FORMATS
from artel.storage import is_remote, user_path
from artel.text.reading.file_names import is_url
from artel.text.sources.find import all_sources, files_of, local_path
from artel.text.sources.walk import may_match_inside


@dataclass(frozen=True, slots=True)
class SourcePath:
    """A file, folder or glob of a source."""

    key: str
    """The key in the run file."""
    path: str
    files: tuple[Path, ...]
    """The files that exist now."""

    def would_read(self, folder: Path) -> bool:
        """True if files in `folder`, a real path that need not exist, would be read by the source."""
        path = local_path(self.path, self.key)
        parts = path.parts
        fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        if path.is_dir():
            fixed = len(parts)
        elif path.exists() or fixed == len(parts):
            return False
        base = Path(os.path.realpath(Path(*parts[:fixed])))
        if not folder.is_relative_to(base):
            return False
        return fixed == len(parts) or may_match_inside(folder.relative_to(base).parts, parts[fixed:])


def source_paths(data: DataConfig) -> Iterator[SourcePath]:
    """Yield each local path of each source; paths that cannot be found are skipped, since other checks report them."""
    for source_key, source in all_sources(data):
        key = source_key if source_key == "data.validation" else f"{source_key}.path"
        for path in source.path if FORMATS[source.format].has_files else []:
            if not is_url(path) and not is_remote(path):
                with suppress(InputError):
                    yield SourcePath(key, path, tuple(files_of(source, path, key)))
        if source.outputs and source_key != "data.validation":
            key = f"{source_key}.outputs"
            with suppress(InputError):
                yield SourcePath(key, source.outputs, (user_path(source.outputs, key),))
