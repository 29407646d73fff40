"""Memory that runs out in the midst of a run: the step is tried again with less, and less is remembered.

The global batch stays what it is; it is cut into more micro-batches. A process alone goes on by itself. One of several
cannot call its peers back from the sums in which they wait for it: it notes in the run's folder that all must do with
less, and ends, so that a launcher starts all of them again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from artel.errors import ArtelError, OutOfMemory, WorkError
from artel.models.activation_checkpointing import recompute
from artel.objectives import Batch
from artel.training.memory.micro_batch import MicroBatchPlan, is_out_of_memory, next_smaller
from artel.training.prefetch import prefetching

if TYPE_CHECKING:
    from artel.training.loop import Run

_SMALLER_MODEL = "train.optimizer: adamw8bit, train.weights: bf16 or model.lora"


class Feed:
    """A run's micro-batches step by step, made ahead where that pays; made anew when they must be smaller."""

    def __init__(self, run: Run) -> None:
        self.batches: list[Batch] = []
        """Of the newest step."""
        self._run, self._open = run, ExitStack()
        self._begin()

    def take(self) -> list[Batch]:
        """The micro-batches of the run's next step."""
        self.batches = self._take(self._run.step)
        return self.batches

    def take_again(self) -> None:
        """The newest step's, of the size that micro-batches now have."""
        self._open.close()
        self._begin()
        self.take()

    def _begin(self) -> None:
        run = self._run
        self._take = self._open.enter_context(prefetching(run.take, run.step, run.length.steps, run.world.device))

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def gradients(run: Run, feed: Feed) -> torch.Tensor:
    """Forward and backward of a step's micro-batches, as `Run.gradients`; where memory is out, again with less.

    Raises OutOfMemory where all processes must start again for that, WorkError where there is nothing left to try.
    """
    while True:
        try:
            return run.gradients(feed.batches)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Only now is the error gone, whose traceback held the frames, and these the tensors, of the attempt.
        _go_on_with_less(run)
        feed.take_again()


@contextmanager
def optimizer_memory_told() -> Iterator[None]:
    """Memory that runs out as the optimizer steps, as a WorkError: smaller micro-batches would not help."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        what = "memory is out in the optimizer's step, where micro-batches no longer take any"
        raise WorkError.at("train.optimizer", what, f"write {_SMALLER_MODEL}") from error


def _go_on_with_less(run: Run) -> None:
    """Choose and remember less, and make ready to try the step again."""
    where, before = f"step {run.step + 1}", run.found
    found = next_smaller(before, -(-run.length.batch // run.strategy.dims.dp_degree))
    if found is None:
        raise _nothing_left(where, "though all within its layers was computed again")
    # DeepSpeed's engine cannot be told to forget half a backward pass.
    if run.world.size > 1 or run.optimizer.saves_collectively:
        run.limit.lower(found)
        what = f"out of memory on process {run.world.rank} with micro-batches of {before.size}"
        raise OutOfMemory.at(where, what, f"the same command goes on with {_in_words(found)}")
    run.strategy.model.zero_grad(set_to_none=True)
    if found.recompute != before.recompute:
        if recompute(run.strategy.model, found.recompute).startswith("none"):
            raise _nothing_left(where, "and this model cannot compute its layers twice")
        torch.compiler.reset()  # what is compiled was made of the layers as they were
    gc.collect()
    if run.world.device.type == "cuda":
        torch.cuda.empty_cache()
    run.found = found
    run.tell(f"{where}: out of memory with micro-batches of {before.size}; tried again with {_in_words(found)}")
    try:
        run.limit.lower(found)
    except ArtelError as error:  # the next start will have to find it out again
        run.tell(f"{where}: this cannot be remembered: {error.in_a_line}")


def _in_words(found: MicroBatchPlan) -> str:
    return f"micro-batches of {found.size}" + (" and all computed again" if found.recompute == "full" else "")


def _nothing_left(where: str, why: str) -> WorkError:
    fix = f"write a smaller data.block, {_SMALLER_MODEL}; the same command goes on from the last checkpoint"
    return WorkError.at(where, f"out of memory with a single sample in a micro-batch, {why}", fix)
