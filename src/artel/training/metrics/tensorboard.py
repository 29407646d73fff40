"""RUN/tensorboard: event files of TensorBoard."""

from __future__ import annotations

import shlex
import shutil
import threading
from itertools import groupby
from operator import itemgetter

from artel.config import RunConfig
from artel.training.metrics.tracker import Metrics, Tracker, add_prefix, read_samples
from artel.training.run_folder import RunFolder


class TensorBoardTracker(Tracker):
    """Scalars under the names of metrics.jsonl. The folder `text` holds the run file and tables of samples.

    A resumed run adds a file whose first step tells TensorBoard to drop later scalars of earlier files. TensorBoard
    does not drop texts, so their folder is written again.
    """

    package = "tensorboard"

    def __init__(self, config: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _hook_threads()
        self._folder = folder.path / "tensorboard"
        shutil.rmtree(self._folder / "text", ignore_errors=True)
        self._scalars = SummaryWriter(str(self._folder), purge_step=step + 1)
        self._texts = SummaryWriter(str(self._folder / "text"))
        self._texts.add_text("run file", f"```yaml\n{folder.config.read_text(encoding='utf-8')}```", 0)
        for _, lines in groupby(read_samples(folder), itemgetter("step")):
            self.log_samples(list(lines))

    def log_training(self, metrics: Metrics) -> None:
        self._write("train", metrics, metrics["step"])

    def log_validation(self, metrics: Metrics) -> None:
        self._write("validation", metrics["validation"], metrics["step"])

    def log_tasks(self, metrics: Metrics) -> None:
        self._write("validation", metrics["tasks"], metrics["step"])

    def log_samples(self, lines: list[Metrics]) -> None:
        rows = [f"| {_escape_cell(line['prompt'])} | {_escape_cell(line['text'])} |" for line in lines]
        table = "\n".join(["| prompt | text |", "|---|---|", *rows])
        self._texts.add_text("samples", table, lines[0]["step"])

    def hint(self) -> str:
        return f"tensorboard --logdir {shlex.quote(str(self._folder))}"

    def close(self) -> None:
        self._scalars.close()
        self._texts.close()

    def _write(self, group: str, metrics: Metrics, step: int) -> None:
        for name, value in add_prefix(group, metrics).items():
            self._scalars.add_scalar(name, value, step)


def _hook_threads() -> None:
    """Suppress tracebacks of TensorBoard's writer thread. Its next call raises the error."""
    original = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            original(arguments)

    threading.excepthook = hook


def _escape_cell(text: str) -> str:
    """Escape all markup in a text, for a cell of a Markdown table."""
    escaped = "".join(
        f"&#{ord(character)};" if character in "\\`*_{}[]<>()#+-.!|&~$" else character for character in text
    )
    return " <br> ".join(escaped.splitlines())
