"""A contestant of benchmarks/train_speed.py: a process that trains in turns with the others.

benchmarks/gpu_table.py runs the same functions alone, by measured.py.

    python contestant.py WORK.json FUNCTION

FUNCTION is `module:function` or `FILE.py:function`: `train(work: Work, after_step: AfterStep) -> None`, a training loop
of its own or of a library. Its contract:

- It starts from the weights in `work.model`, a folder for `from_pretrained` (float32, no code).
- Step k, from 0, is one optimizer step on the mean loss over all targets of `work.batch_of(k)`, in micro-batches if
  it likes. Clipping, optimizer and learning rate are those of `work`.
- After each step it calls `after_step(loss)` with the mean loss in nats, a number or a scalar tensor. It never returns:
  its process is killed after the last turn. If packing decides how many tokens a step has, it calls
  `after_step(loss, tokens)`.
- It computes on `work.device` in `work.precision`, with `work.threads` threads on a CPU (already set). A function that
  computes in another precision has an attribute: `train.precision = "bf16"`.
- It writes only below `work.folder`.

This script imports nothing of artel, so that the start and the memory of a peer contain none of artel's packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
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

AfterStep = Callable[..., None]


@dataclass(frozen=True)
class Work:
    """The model, data and settings of a training run, the same for all contestants."""

    folder: str
    """Holds what the contestants read; they may write here."""
    objective: str
    """`causal` or `masked`; in gpu_table.py also `chat`, `preference` or `policy`, whose texts are in `folder`."""
    batch: int
    """Rows in a global batch: blocks, pairs of answers or prompts."""
    length: int
    """Tokens in a row, without padding; the longest sample of texts."""
    device: str
    """`cpu` or `cuda`."""
    precision: str
    optimizer: str
    threads: int
    learning_rate: float = 5e-5
    """Constant. This and the following are the defaults of TrainingArguments."""
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest gradient norm."""
    lora: int = 0
    """Rank of adapters on all linear layers but the head, on weights as the folder has them. 0: all weights train."""
    answers: int = 0
    """`policy`: answers to each prompt."""
    new_tokens: int = 0
    """`policy`: the longest answer."""

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
        """int32 (rows, length), memory-mapped: shifted targets, -100 where there is none."""
        return np.load(Path(self.folder) / "targets.npy", mmap_mode="r")

    def batch_of(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of a step: int64 (batch, length) on the CPU."""
        rows = slice(step * self.batch, (step + 1) * self.batch)
        inputs, targets = (torch.from_numpy(array[rows].astype(np.int64)) for array in (self.inputs, self.targets))
        return inputs, targets


def function_of(name: str) -> Callable[[Work, AfterStep], None]:
    """Import `module:function` or `FILE.py:function`; modules are looked up in the working folder too."""
    module, _, function = name.rpartition(":")
    if module.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        assert spec is not None
        assert spec.loader is not None
        imported = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(imported)
    else:
        sys.path.append(str(Path.cwd()))  # last, so that a file there shadows no library
        imported = importlib.import_module(module)
    return getattr(imported, function)


class Turns:
    """The callback after each step. The first step is a turn; each further turn starts with a command.

    The device is idle when the clock starts and when it stops. Between turns the contestant sleeps.
    """

    def __init__(self, commands: TextIO, answers: TextIO, device: str) -> None:
        self._commands, self._answers = commands, answers
        self._on_gpu = device == "cuda"
        self._steps, self._limit = 1, float("inf")
        self._losses: list[Any] = []
        self._started = time.perf_counter()

    def __call__(self, loss: Any, tokens: int = 0) -> None:
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if len(self._losses) < self._steps and time.perf_counter() - self._started < self._limit:
            return
        if self._on_gpu:
            torch.cuda.synchronize()
        turn: dict[str, Any] = {"seconds": time.perf_counter() - self._started}
        turn["losses"] = [float(loss) for loss in self._losses]
        if self._on_gpu:
            turn["peak_memory"] = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()  # the next contestant may need the memory
        else:
            turn["peak_memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        utils = sys.modules.get("torch._dynamo.utils")
        turn["compile_seconds"] = utils.calculate_time_spent()["total_wall_time"] if utils else 0.0
        self._answers.write(json.dumps(turn) + "\n")
        self._answers.flush()
        self._losses.clear()
        command = self._commands.readline()
        if not command:
            os._exit(0)  # train_speed.py has ended
        self._steps, self._limit = json.loads(command)
        self._started = time.perf_counter()


def main(file: str, function: str) -> None:
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    commands = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    work = Work(**json.loads(Path(file).read_text(encoding="utf-8")))
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
