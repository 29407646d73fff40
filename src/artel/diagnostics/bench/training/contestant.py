"""A contestant of `artel bench train`: a process of its own that trains in turns with the others.

    python contestant.py WORK.json FUNCTION

FUNCTION is `module:function`, a function `train(work: Work, after_step: AfterStep) -> None` that trains in whatever way
it likes, in a loop of its own or of a library. This is all that is asked of it:

- It begins with the weights of `work.model`, a folder that `from_pretrained` opens (float32, no code).
- Step k, from 0, is one optimizer step on the mean loss over all targets of `work.batch_of(k)`; it may cut the batch
  into pieces. Clipping, optimizer and learning rate are those of `work`; nothing is left out, nothing is added.
- After each step it calls `after_step(loss)` with that step's mean loss in nats, a number or a tensor with one; a
  tensor is read later, so that a GPU need not be waited for. The call returns when it is this contestant's turn to take
  another step. It never says that it is over: when all is measured, the process is ended.
- It computes on `work.device` in `work.precision`, with `work.threads` threads on a CPU, which are set already; only
  one GPU is visible. What it writes goes below `work.folder`.

This file is a script and imports nothing of artel, so that no peer's start and memory has artel's packages in it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

AfterStep = Callable[[Any], None]


@dataclass(frozen=True)
class Work:
    """What is trained, and how: the same for all contestants."""

    folder: str
    """Where all lies that the contestants read, and where they may write."""
    objective: str
    """`causal` or `masked`."""
    batch: int
    """Rows in a global batch."""
    length: int
    """Tokens in a row; none is padding."""
    device: str
    """`cpu` or `cuda`."""
    precision: str
    """`fp32`, `bf16`, `fp16` or `fp8`: what layers compute in; trainer_default and _tuned keep to fp32 and bf16."""
    optimizer: str
    """`adamw`, `adamw8bit`, `adafactor` or `sgd`; its defaults in PyTorch or transformers but for what follows."""
    threads: int
    learning_rate: float = 5e-5
    """The same at every step: no warmup, no decay. This and what follows are TrainingArguments' own defaults."""
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of the gradient of a step."""

    @classmethod
    def read(cls, file: str) -> Work:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
        return cls(**{**values, "betas": tuple(values["betas"])})

    @property
    def model(self) -> str:
        """A folder with config.json and model.safetensors, the weights that all begin with."""
        return str(Path(self.folder) / "model")

    @cached_property
    def inputs(self) -> np.ndarray:
        """int32 (rows, length), memory-mapped: token ids, in the order of training."""
        return np.load(Path(self.folder) / "inputs.npy", mmap_mode="r")

    @cached_property
    def targets(self) -> np.ndarray:
        """int32 (rows, length), memory-mapped: what is predicted at each place of `inputs`; -100 where nothing is.

        They are shifted already: of a causal model the target of a token is the next one.
        """
        return np.load(Path(self.folder) / "targets.npy", mmap_mode="r")

    def batch_of(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step, counted from 0, int64 (batch, length) each, on the CPU."""
        rows = slice(step * self.batch, (step + 1) * self.batch)
        inputs, targets = (torch.from_numpy(part[rows].astype(np.int64)) for part in (self.inputs, self.targets))
        return inputs, targets


def function_of(name: str) -> Callable[[Work, AfterStep], None]:
    """The function `module:function`, or `FILE.py:function`; modules are looked for in the working folder too.

    Raises ImportError or AttributeError, and whatever the module itself raises when it is imported.
    """
    module, _, function = name.rpartition(":")
    if module.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    else:
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)  # last: a file here must not stand in for a module that others import
        found = importlib.import_module(module)
    return getattr(found, function)


class Turns:
    """What a contestant calls after each step. Its first step is a turn by itself; the others are asked for.

    A turn is so many steps, or fewer where the time runs out, but one at least; the device has finished all work before
    the clock starts and before it stops. Then the contestant sleeps until the next line of `commands`.
    """

    def __init__(self, commands: TextIO, answers: TextIO, device: str) -> None:
        self._commands, self._answers = commands, answers
        self._on_gpu = device == "cuda"
        self._wanted, self._limit = 1, math.inf
        self._losses: list[Any] = []
        self._started = time.perf_counter()

    def __call__(self, loss: Any) -> None:
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if len(self._losses) < self._wanted and time.perf_counter() - self._started < self._limit:
            return
        self._synchronise()
        seconds = time.perf_counter() - self._started
        self._tell({"seconds": seconds, "losses": [float(each) for each in self._losses]})
        self._losses.clear()
        if self._on_gpu:
            torch.cuda.empty_cache()  # what this one does not hold, the next one may need
        command = self._commands.readline()
        if not command:
            os._exit(0)  # whoever asked is gone
        asked = json.loads(command)
        self._wanted, self._limit = asked["steps"], asked["seconds"]
        self._synchronise()
        self._started = time.perf_counter()

    def _synchronise(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _tell(self, turn: dict[str, Any]) -> None:
        more = {"peak_memory": peak_memory(self._on_gpu), "compile_seconds": compile_seconds()}
        self._answers.write(json.dumps(turn | more) + "\n")
        self._answers.flush()


def peak_memory(on_gpu: bool) -> int:
    """Bytes: the most that PyTorch had allocated on the GPU; on a CPU the largest resident size of this process."""
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        # Not getrusage: its figure begins with the size that the parent had when it started this process.
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def compile_seconds() -> float:
    """Seconds that torch.compile has taken in this process, by its own count."""
    utils = sys.modules.get("torch._dynamo.utils")
    return float(utils.calculate_time_spent()["total_wall_time"]) if utils is not None else 0.0


def main(file: str, function: str) -> None:
    # What libraries print must not come among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    commands = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    work = Work.read(file)
    torch.set_num_threads(work.threads)
    try:
        function_of(function)(work, Turns(commands, answers, work.device))
        reason = "it returned before it was ended"
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    answers.write(json.dumps({"failed": reason}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
