"""A run to look at: its metrics, its ledger, what its model wrote."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from artel.api.process import tell
from artel.config import RunConfig, load_run, near_name
from artel.errors import InputError
from artel.notebooks import html_table
from artel.storage import check_regular

if TYPE_CHECKING:
    from artel.training import RunFolder


class Run:
    """The folder of a run: one that is at work, one that is complete, or one that was stopped.

    Everything is read anew each time it is asked for, so a run can be watched while it trains.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises InputError where there is no such folder."""
        from artel.training import RunFolder  # which imports NumPy

        self.folder = Path(folder)
        """The run's folder."""
        self._files: RunFolder = RunFolder(self.folder)
        if not self.folder.is_dir():
            near = near_name(str(self.folder))
            fix = f"did you mean {near}?" if near else "give the folder of a run, as runs/NAME"
            raise InputError.at(str(self.folder), "there is no such folder", fix)

    @property
    def config(self) -> RunConfig:
        """The run as resolved, every key with its value. Raises InputError before the run has begun."""
        return load_run(str(self.folder))

    @property
    def metrics(self) -> Any:
        """A row a step that was logged or validated: a DataFrame of pandas, or of polars, else a list of dicts.

        Columns are those of metrics.jsonl: `step`, `epoch`, `loss` (nats a target token, the mean since the row
        before), `gradient_norm`, `learning_rate`, `tokens` (so far), `tokens_per_second`, `mfu` (0 to 1, where the
        device's peak is known); and `validation_…` for each of the objective's figures. A cell without a value is
        empty (NaN, null, absent). pandas is taken where both are installed, unless only polars is imported.

        Raises InputError before anything is logged, and where the file is damaged.
        """
        return table(self._rows(), _library())

    @property
    def ledger(self) -> dict[str, Any]:
        """What became of every document of the text: `documents` read, kept, and dropped by reason; the same by `sets`;
        `tokens` and `bytes` of the `parts`, train and validation. Raises InputError before the text is prepared."""
        ledger: dict[str, Any] = orjson.loads(self._read(self._files.ledger, "artel.prepare(run)"))
        return ledger

    @property
    def samples(self) -> list[dict[str, Any]]:
        """What the model wrote after `validate.prompts` at each validation: `step`, `prompt`, `text`; oldest first."""
        if not self._files.samples.exists():
            return []
        return [orjson.loads(line) for line in self._read(self._files.samples, "").splitlines()]

    @property
    def result(self) -> dict[str, Any]:
        """The summary of a complete run: `steps`, `tokens`, `train_loss`, `validation`, `tokens_per_second`,
        `wall_seconds`, `peak_memory_gib`. Raises InputError before that."""
        if not self._files.result.exists():
            raise InputError.at(str(self.folder), "is not complete", "artel.train(run) trains it to its end")
        return self._files.read_result()

    def __repr__(self) -> str:
        return f"artel.Run({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        return html_table(self._summary(), caption=str(self.folder))

    def _summary(self) -> list[tuple[str, str]]:
        """What a notebook shows of the run."""
        if not self._files.metrics.exists():
            return [("steps", "none yet")]
        rows = self._rows()
        newest: dict[str, Any] = {}
        for row in rows:
            newest |= {name: value for name, value in row.items() if value is not None}
        state = "complete" if self._files.is_complete else "not complete"
        shown = [("steps", f"{newest.get('step', 0):,} ({state})")]
        for name, value in newest.items():
            if name != "step":
                text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
                shown.append((name.replace("_", " "), text))
        return shown

    def _rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, those of one step together."""
        from artel.reports.report import read_metrics

        by_step: dict[int, dict[str, Any]] = {}
        for line in read_metrics(self._files.metrics, tell):
            row = by_step.setdefault(line["step"], {})
            row |= {name: value for name, value in line.items() if name != "validation"}
            row |= {f"validation_{name}": value for name, value in line.get("validation", {}).items()}
        return list(by_step.values())

    def _read(self, file: Path, fix: str) -> bytes:
        check_regular(file)
        try:
            return file.read_bytes()
        except FileNotFoundError:
            raise InputError.at(str(file), "there is no such file yet", fix) from None
        except OSError as error:
            raise InputError.at(str(file), f"cannot be read: {error.strerror}", "it must be a file") from None


def table(rows: list[dict[str, Any]], library: str | None) -> Any:
    """Rows as a DataFrame of a library, or as they are."""
    if library == "pandas":
        return import_module("pandas").DataFrame(rows)
    if library == "polars":
        return import_module("polars").DataFrame(rows, infer_schema_length=None)
    return rows


def _library() -> str | None:
    """The library for DataFrames: one that is imported, else one that is installed; pandas where both are."""
    installed = [name for name in ("pandas", "polars") if find_spec(name) is not None]
    loaded = [name for name in installed if name in sys.modules]
    return next(iter([*loaded, *installed]), None)
