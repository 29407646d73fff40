"""RUN/tensorboard: event files of TensorBoard."""

from __future__ import annotations

import shlex
import shutil
import threading
from itertools import groupby
from operator import itemgetter

from artel.config import RunConfig
from artel.training.metrics.other_runs import read_samples
from artel.training.metrics.tracker import Figures, Tracker, by_name
from artel.training.run_folder import RunFolder


class TensorBoardTracker(Tracker):
    """Scalars by the names of metrics.jsonl; in the folder text, the run file and the samples as tables.

    A resumed run adds a file, which begins with the step from which on TensorBoard forgets the scalars of the files
    before. It does not forget texts: their folder is written anew.
    """

    package = "tensorboard"

    def __init__(self, run: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _hook_threads()
        self._folder = folder.path / "tensorboard"
        shutil.rmtree(self._folder / "text", ignore_errors=True)
        self._scalars = SummaryWriter(str(self._folder), purge_step=step + 1)
        self._texts = SummaryWriter(str(self._folder / "text"))
        self._texts.add_text("run file", f"```yaml\n{folder.config.read_text(encoding='utf-8')}```", 0)
        for _, lines in groupby(read_samples(folder), itemgetter("step")):
            self.samples(list(lines))

    def training(self, figures: Figures) -> None:
        self._write("train", figures, figures["step"])

    def validation(self, figures: Figures) -> None:
        self._write("validation", figures["validation"], figures["step"])

    def tasks(self, figures: Figures) -> None:
        self._write("validation", figures["tasks"], figures["step"])

    def samples(self, lines: list[Figures]) -> None:
        rows = [f"| {_cell(line['prompt'])} | {_cell(line['text'])} |" for line in lines]
        table = "\n".join(["| prompt | text |", "|---|---|", *rows])
        self._texts.add_text("samples", table, lines[0]["step"])

    def hint(self) -> str:
        return f"tensorboard --logdir {shlex.quote(str(self._folder))}"

    def close(self) -> None:
        self._scalars.close()
        self._texts.close()

    def _write(self, group: str, figures: Figures, step: int) -> None:
        for name, value in by_name(group, figures).items():
            self._scalars.add_scalar(name, value, step)


def _hook_threads() -> None:
    """A writer's thread that fails tells the next call, and needs no traceback besides."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            before(arguments)

    threading.excepthook = hook


def _cell(text: str) -> str:
    """A text as a cell of a Markdown table, in which nothing is markup."""
    escaped = "".join(f"&#{ord(letter)};" if letter in "\\`*_{}[]<>()#+-.!|&~$" else letter for letter in text)
    return " <br> ".join(escaped.splitlines())
