"""Prints the files that a batch passes from training/loop.py to the loss, in order.

    python scripts/walk_a_batch.py
    python scripts/walk_a_batch.py --check    exits with 1 if docs/architecture.md prints something else

Trains a small GPT-2 in a temporary folder and follows its third step with a profile hook, until models/loss.py is
reached, which calls the model and computes its loss. A file is on the way when a function of it takes or returns the
batch, as samples, rows or tensors. All calls from one visit of a file to another file are one entrance. Returns, and
properties of the batch, do not count.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import artel
from artel.config import load_run
from artel.objectives import Batch
from artel.parallel import World
from artel.preparing import prepare
from artel.tokens import Rows, Sample
from artel.training.loop import train

PACKAGE = Path(artel.__file__).parent
PAGE = Path(__file__).resolve().parents[1] / "docs/architecture.md"
STEP = 2  # the third: by then everything is imported and every cache is filled
LOSS = "models/loss.py"
PROPERTIES = {each.fget.__code__ for each in vars(Batch).values() if isinstance(each, property)}
RUN = """
run: run
data: {sources: [{format: dummy, documents: 300}], validation: 0, block: 32, store: store}
tokenizer: {train: {vocab: 400}}
model: {config: {model_type: gpt2, n_layer: 2, n_embd: 32, n_head: 2}}
train: {steps: 4, batch: 4, micro_batch: 4, compile: "off", threads: 1}
validate: {every: never}
checkpoint: {every: never}
"""


@dataclass
class Visit:
    """A file while one or more of its functions run, called from within one visit of another file."""

    file: str
    children: dict[str, Visit] = field(default_factory=dict)
    has_batch: bool = False


class Walk:
    """Follows the calls of one step."""

    def __init__(self) -> None:
        self.root = Visit("training/loop.py")
        self.visits = [self.root]
        """In the order in which they began."""
        self._visits: dict[FrameType, Visit] = {}
        self._loss_reached = False

    def hook(self, frame: FrameType, event: str, argument: Any) -> None:
        if (
            self._loss_reached
            or event not in ("call", "return")
            or frame.f_code in PROPERTIES
            or not frame.f_code.co_filename.startswith(str(PACKAGE))
        ):
            return
        file = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
        if event == "call":
            visit = self._enter(frame, file)
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            visit.has_batch |= any(is_of_batch(frame.f_locals.get(name)) for name in names)
            self._loss_reached = file == LOSS and visit.has_batch
        elif frame in self._visits:
            self._visits[frame].has_batch |= is_of_batch(argument)

    def _enter(self, frame: FrameType, file: str) -> Visit:
        caller = frame.f_back
        while caller is not None and caller not in self._visits and not is_loop(caller):
            caller = caller.f_back
        above = self._visits.get(caller, self.root) if caller is not None else self.root
        visit = above if above.file == file else above.children.get(file)
        if visit is None:
            visit = above.children[file] = Visit(file)
            self.visits.append(visit)
        self._visits[frame] = visit
        return visit

    def files_on_the_way(self) -> list[str]:
        """The files that the batch passes, in the order in which it enters them."""
        return [visit.file for visit in self.visits if on_the_way(visit)]


def is_loop(frame: FrameType) -> bool:
    return frame.f_code is train.__code__


def is_of_batch(value: Any) -> bool:
    """True for a batch, before and after it is made of samples."""
    if isinstance(value, list | tuple):
        return any(is_of_batch(item) for item in value)
    return isinstance(value, Batch | Rows | Sample | np.ndarray | torch.Tensor)


def on_the_way(visit: Visit) -> bool:
    return visit.has_batch or any(on_the_way(child) for child in visit.children.values())


def walk() -> list[str]:
    """Train, and follow a step. Returns the files that its batch passes, in order."""
    steps = Walk()

    def follow(run: Any) -> None:
        sys.setprofile(steps.hook if run.step == STEP else None)

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("run.yaml").write_text(RUN)
        config = load_run("run.yaml", [])
        world = World(0, 1, 0, torch.device("cpu"))
        try:
            train(config, prepare(config), world, callbacks=[follow])
        finally:
            sys.setprofile(None)
            os.chdir(PACKAGE)
    return steps.files_on_the_way()


def quiet(message: str) -> None:
    pass


def main() -> int:
    way = "".join(f"{number:2}  {file}\n" for number, file in enumerate(walk(), 1))
    if sys.argv[1:] != ["--check"]:
        print(way, end="")
        return 0
    page = PAGE.read_text(encoding="utf-8")
    if f"<!-- python scripts/walk_a_batch.py -->\n```text\n{way}```" in page:
        return 0
    print(f"docs/architecture.md: a batch goes another way now; write it there:\n{way}", end="")
    return 1


if __name__ == "__main__":
    sys.exit(main())
