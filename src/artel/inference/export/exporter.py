"""What writes a model in another form than a Hugging Face folder: registered in `artel.registry.EXPORTERS`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from artel.config import Section, load_run, read_settings
from artel.registry import EXPORTERS
from artel.training import RunFolder


class Exporter(Protocol):
    def __init__(self, settings: Any) -> None:
        """Called before a model is loaded, with the settings that the registry names, or an empty section.

        Raises InputError where a program that is needed is not there.
        """

    def write(self, model: Path, folder: Path) -> None:
        """Write into `folder` what `model` holds, a Hugging Face folder of which this is a copy. Raises WorkError."""


def open_exporter(exporter: str, name: str, settings: Mapping[str, Any]) -> Exporter:
    """The exporter of that name, of artel or of a plugin of the run `name`. Raises InputError."""
    if exporter not in EXPORTERS and RunFolder(Path(name)).config.is_file():
        load_run(name)  # its plugins register theirs
    kind: type[Exporter] = EXPORTERS[exporter]
    return kind(read_settings(EXPORTERS.settings_of(exporter) or Section, settings, f"--to {exporter}"))
