"""Export to other formats: the interface of exporters. `artel.registry.EXPORTERS` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from artel.config import Section, load_run, read_settings
from artel.registry import EXPORTERS
from artel.training import RunFolder


class Exporter(Protocol):
    """Writes a model in another format than a Hugging Face folder."""

    def __init__(self, settings: Any) -> None:
        """Called before a model is loaded, with the settings that the registry names, or an empty section.

        Raise InputError if a program is missing.
        """

    def write(self, model: Path, folder: Path) -> None:
        """Convert the Hugging Face folder `model`, a temporary copy, into `folder`. Raise WorkError if a tool fails."""


def open_exporter(exporter: str, name: str, settings: Mapping[str, Any]) -> Exporter:
    """Return an exporter of artel or of a plugin of the run `name`. Raise InputError if it or a setting is unknown."""
    if exporter not in EXPORTERS and RunFolder(Path(name)).config.is_file():
        load_run(name)  # its plugins register their exporters
    exporter_class: type[Exporter] = EXPORTERS[exporter]
    return exporter_class(read_settings(EXPORTERS.get_settings(exporter) or Section, settings, f"--to {exporter}"))
