"""Figures below the cell of a notebook: a progress bar, and a table of the validations."""

from __future__ import annotations

from artel.config import RunConfig
from artel.training.metrics.tracker import Figures, Tracker, tasks_text, validation_row
from artel.training.run_folder import RunFolder

_PARTS = 1000  # of the bar of a run on a budget


class NotebookTracker(Tracker):
    """transformers' own display for notebooks, as its Trainer has it: one output, which is written anew."""

    def __init__(self, run: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        from transformers.utils.notebook import NotebookTrainingTracker

        self._loss: float | None = None
        self._used = 0.0
        self._step, self._steps = step, steps
        self._bar = NotebookTrainingTracker(_PARTS if steps is None else steps)
        self._bar.update(self._completed(), comment="begins")

    def step(self, step: int) -> None:
        self._step = step
        self._bar.update(self._completed())

    def busy(self, what: str, share: float | None = None) -> None:
        self._bar.update(self._completed(), force_update=True, comment=what if share is None else f"{what} {share:.0%}")

    def training(self, figures: Figures) -> None:
        self._loss, self._used = figures["loss"], figures.get("budget_used", 0.0)
        text = f"loss {figures['loss']:.4f}, {figures['tokens_per_second']:,.0f} tokens/s"
        self._bar.update(self._completed(), comment=text)

    def validation(self, figures: Figures) -> None:
        self._bar.write_line(validation_row(figures, self._loss))

    def tasks(self, figures: Figures) -> None:
        self._bar.update(self._completed(), force_update=True, comment=tasks_text(figures))

    def close(self) -> None:
        self._bar.update(self._completed(), force_update=True, comment=f"loss {self._loss:.4f}")

    def _completed(self) -> int:
        return self._step if self._steps is not None else round(_PARTS * self._used)
