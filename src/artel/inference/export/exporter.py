"""What writes a model in another form than a Hugging Face folder: registered in `artel.registry.EXPORTERS`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from artel.config import load_run
from artel.registry import EXPORTERS
from artel.training import RunFolder


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What the command line says beside the name of the exporter."""

    gguf_type: str = "f16"
    llama_cpp: str | None = None


class Exporter(Protocol):
    def __init__(self, options: ExportOptions) -> None:
        """Called before a model is loaded. Raises InputError where a program that is needed is not there."""

    def write(self, model: Path, folder: Path) -> None:
        """Write into `folder` what `model` holds, a Hugging Face folder of which this is a copy. Raises WorkError."""


def open_exporter(exporter: str, name: str, options: ExportOptions) -> Exporter:
    """The exporter of that name, of artel or of a plugin of the run `name`. Raises InputError."""
    if exporter not in EXPORTERS and RunFolder(Path(name)).config.is_file():
        load_run(name)  # its plugins register theirs
    kind: type[Exporter] = EXPORTERS[exporter]
    return kind(options)
