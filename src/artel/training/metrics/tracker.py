"""Where figures of a run go: what each such place is asked to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from artel.config import RunConfig
from artel.training.run_folder import RunFolder

Figures = dict[str, Any]


class Tracker:
    """Where figures go: those of a logged step, those of a validation. One of your own has these methods."""

    package: ClassVar[str] = ""
    """The module that it needs, which comes with the extra of that name."""
    keeps_report: ClassVar[bool] = False
    """Whether `finished` gets the run's report."""

    @classmethod
    def for_this_process(cls) -> type[Tracker]:
        """The class that shows figures where this process shows them."""
        return cls

    def __init__(self, run: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        """`step` is where the run stands, `steps` where it ends; None where `train.budget` ends it."""

    def training(self, figures: Figures) -> None: ...

    def validation(self, figures: Figures) -> None: ...

    def tasks(self, figures: Figures) -> None:
        """The figures of `validate.tasks` after a step."""

    def samples(self, lines: list[Figures]) -> None:
        """What the model made of `validate.prompts` after a step: the lines of samples.jsonl."""

    def finished(self, report: Path | None) -> None:
        """The run is done and its model is written. `report`: its page, a file that is removed after this call.

        Not called for a run that was stopped or failed.
        """

    def step(self, step: int) -> None:
        """A step is done, logged or not; called after each, so it must cost nothing."""

    def busy(self, what: str, share: float | None = None) -> None:
        """What is done that is no step (evaluating, compiling), and how much of it is done, from 0 to 1."""

    def hint(self) -> str:
        """A command that shows what was written, printed when the run is done; empty where there is none."""
        return ""

    def close(self) -> None: ...


def by_name(group: str, figures: Figures) -> Figures:
    """Numbers by the names that all trackers give them: `train/loss`, `validation/loss`."""
    numbers = {name: value for name, value in figures.items() if isinstance(value, int | float) and name != "step"}
    return {f"{group}/{name}": value for name, value in numbers.items()}


def validation_row(figures: Figures, training_loss: float | None) -> dict[str, str]:
    """A row of the table of validations, by titles: the step, the training loss and the objective's own figures.

    The training loss is a dash until it is logged for the first time.
    """
    metrics = figures["validation"]
    titles = ["validation loss", *(name.replace("_", " ") for name in list(metrics)[1:])]
    loss = "-" if training_loss is None else f"{training_loss:.4f}"
    row = {"step": f"{figures['step']}", "epoch": f"{figures['epoch']:.2f}", "training loss": loss}
    return row | dict(zip(titles, map(_short, metrics.values()), strict=True))


def tasks_text(figures: Figures) -> str:
    """The figures of tasks in a line: `counting/acc 0.5000`."""
    return " · ".join(f"{name} {_short(value)}" for name, value in figures["tasks"].items())


def _short(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"
