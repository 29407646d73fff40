"""A contestant of `artel bench train`: a process of its own that trains in turns with the others.

    python contestant.py WORK.json FUNCTION

FUNCTION is `module:function` or `FILE.py:function`, a function `train(work: Work, after_step: AfterStep) -> None` that
trains in its own loop or with a library. Its contract:

- It begins with the weights in `work.model`, a folder for `from_pretrained` (float32, no code).
- Step k, from 0, is one optimizer step on the mean loss over all targets of `work.batch_of(k)`; it may split the batch
  into micro-batches. Clipping, optimizer and learning rate are those of `work`; nothing is left out or added.
- After each step it calls `after_step(loss)` with the mean loss of that step in nats, a number or a scalar tensor. A
  tensor is read later, so that nobody waits for a GPU. The call returns when it is this contestant's turn to do another
  step. The function never returns: its process is killed after the last turn.
- It computes on `work.device` in `work.precision`, with `work.threads` threads on a CPU, which are set already; only
  one GPU is visible. A function that computes in another precision has it as an attribute: `train.precision = "bf16"`.
- It writes only below `work.folder`.

benchmarks/peers/trainer.py, in artel's repository, has transformers' Trainer as an example. This file is a script and
imports nothing of artel, so that the start and the memory of a peer contain none of artel's packages.
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
    """The model, data and settings of a training run, the same for all contestants."""

    folder: str
    """What the contestants read is here, and they may write here."""
    objective: str
    """`causal` or `masked`."""
    batch: int
    """Rows in a global batch."""
    length: int
    """Tokens in a row, without padding."""
    device: str
    """`cpu` or `cuda`."""
    precision: str
    """`fp32`, `bf16`, `fp16` or `fp8`: what the layers compute in."""
    optimizer: str
    """`adamw`, `adamw8bit`, `adafactor` or `sgd`; PyTorch's or transformers' defaults except for what follows."""
    threads: int
    learning_rate: float = 5e-5
    """Constant: no warmup, no decay. This and what follows are the defaults of TrainingArguments."""
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest gradient norm."""

    @classmethod
    def read(cls, file: str) -> Work:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
        return cls(**{**values, "betas": tuple(values["betas"])})

    @property
    def model(self) -> str:
        """A folder with config.json and model.safetensors, the first weights."""
        return str(Path(self.folder) / "model")

    @cached_property
    def inputs(self) -> np.ndarray:
        """int32 (rows, length), memory-mapped: token ids in training order."""
        return np.load(Path(self.folder) / "inputs.npy", mmap_mode="r")

    @cached_property
    def targets(self) -> np.ndarray:
        """int32 (rows, length), memory-mapped: the target at each position of `inputs`; -100 where there is none.

        They are shifted already: in a causal model the target of a token is the next token.
        """
        return np.load(Path(self.folder) / "targets.npy", mmap_mode="r")

    def batch_of(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step, counted from 0: int64 (batch, length) on the CPU."""
        rows = slice(step * self.batch, (step + 1) * self.batch)
        arrays = (self.inputs[rows], self.targets[rows])
        inputs, targets = (torch.from_numpy(array.astype(np.int64)) for array in arrays)
        return inputs, targets


def function_of(name: str) -> Callable[[Work, AfterStep], None]:
    """The function `module:function` or `FILE.py:function`; modules are looked for in the working folder too.

    Raises ImportError, AttributeError, and whatever the module raises on import.
    """
    module, _, function = name.rpartition(":")
    if module.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        assert spec is not None
        assert spec.loader is not None
        imported = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(imported)
    else:
        folder = str(Path.cwd())
        if folder not in sys.path:
            sys.path.append(folder)  # last: a file there must not take the place of a module that others import
        imported = importlib.import_module(module)
    return getattr(imported, function)


class Turns:
    """The callback after each step. The first step is a turn by itself; each further turn begins with a command.

    A turn has the number of steps in its command, or fewer where the time runs out, at least one. The device is idle
    when the clock starts and when it stops. Then the contestant sleeps until the next line of `commands`.
    """

    def __init__(self, commands: TextIO, answers: TextIO, device: str) -> None:
        self._commands, self._answers = commands, answers
        self._on_gpu = device == "cuda"
        self._steps, self._limit = 1, math.inf
        self._losses: list[Any] = []
        self._started = time.perf_counter()

    def __call__(self, loss: Any) -> None:
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if len(self._losses) < self._steps and time.perf_counter() - self._started < self._limit:
            return
        self._synchronize()
        seconds = time.perf_counter() - self._started
        self._answer({"seconds": seconds, "losses": [float(loss) for loss in self._losses]})
        self._losses.clear()
        if self._on_gpu:
            torch.cuda.empty_cache()  # the next contestant may need the memory
        command = self._commands.readline()
        if not command:
            os._exit(0)  # artel bench has ended
        turn = json.loads(command)
        self._steps, self._limit = turn["steps"], turn["seconds"]
        self._synchronize()
        self._started = time.perf_counter()

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _answer(self, turn: dict[str, Any]) -> None:
        more = {"peak_memory": peak_memory(self._on_gpu), "compile_seconds": compile_seconds()}
        self._answers.write(json.dumps(turn | more) + "\n")
        self._answers.flush()


def peak_memory(on_gpu: bool) -> int:
    """In bytes: the most that PyTorch has allocated on the GPU; on a CPU the largest resident size of this process."""
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        # Not getrusage: its value begins with the size that the parent had when it started this process.
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def compile_seconds() -> float:
    """Seconds in torch.compile in this process, by its own count."""
    utils = sys.modules.get("torch._dynamo.utils")
    return float(utils.calculate_time_spent()["total_wall_time"]) if utils is not None else 0.0


def main(file: str, function: str) -> None:
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    commands = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    work = Work.read(file)
    torch.set_num_threads(work.threads)
    try:
        function_of(function)(work, Turns(commands, answers, work.device))
        reason = "it returned before it was stopped"
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    answers.write(json.dumps({"failed": reason}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
