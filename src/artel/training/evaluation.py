"""Evaluates a model on a split of a store, during training and afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from artel.config import RunConfig
from artel.errors import InputError
from artel.integers import ceil_div
from artel.messages import logger
from artel.objectives import Batch, Objective
from artel.parallel import ParallelStrategy, World
from artel.storage import write_file
from artel.tokens import PackedSamples, StoreSplit, TokenStore, evaluation_rows
from artel.training.heartbeat import heartbeat

# Tokens of a micro-batch if the run file says auto. 4,096 keep two CPU cores busy and fit their caches. 32,768 fill a
# GPU's matrix units and need a few GiB for the logits of a 50k vocabulary.
_AUTO_TOKENS = {"cpu": 4096, "cuda": 32768}
_MESSAGE_SECONDS = 10.0


class ProgressMessages:
    """Logs the progress of long work every ten seconds: `evaluating 40%`."""

    def __init__(self, activity: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._activity, self._clock = activity, clock
        self._last_time = clock()

    def __call__(self, fraction: float) -> None:
        now = self._clock()
        if now - self._last_time >= _MESSAGE_SECONDS:
            self._last_time = now
            logger.info("%s %s", self._activity, f"{fraction:.0%}")


def micro_batch_size(config: RunConfig, world: World) -> int:
    """Return the rows of an evaluation micro-batch for this run and device."""
    if config.train.micro_batch != "auto":
        return config.train.micro_batch
    return max(1, _AUTO_TOKENS.get(world.device.type, 4096) // config.data.block)


class Validation:
    """A split of a store as the objective's dataset, and a model's metrics on that split."""

    def __init__(self, objective: Objective, split: StoreSplit) -> None:
        self.split = split
        self.samples = objective.dataset(split)
        self._objective = objective

    def stored_samples(self, samples: int) -> int:
        """Return the number of the store's samples in the first `samples` samples of the dataset."""
        return self.samples.samples_in(samples) if isinstance(self.samples, PackedSamples) else samples

    def num_samples(self, limit: int | None) -> int:
        """Return the number of samples to evaluate: at most `limit`, but as many as the metrics need."""
        minimum = self._objective.min_evaluated(self.split)
        return min(len(self.samples), max(minimum, limit or len(self.samples)))

    def evaluate(
        self,
        strategy: ParallelStrategy,
        micro_batch: int,
        limit: int | None = None,
        progress: Callable[[float], None] = lambda _: None,
    ) -> tuple[dict[str, float], np.ndarray]:
        """Evaluate the first `limit` samples, divided among ranks. Return (metrics, outputs per sample, if any).

        `progress` is called with the fraction done, from 0 to 1, before each batch.
        """
        samples = self.num_samples(limit)
        totals, outputs = strategy.evaluate(self._iterate_batches(strategy, micro_batch, samples, progress), samples)
        return self._objective.metrics(totals, outputs, self.split), outputs

    def close(self) -> None:
        """Release what the validation holds beside the split."""

    def _iterate_batches(
        self, strategy: ParallelStrategy, micro_batch: int, samples: int, progress: Callable[[float], None]
    ) -> Iterator[tuple[Batch, np.ndarray]]:
        ranks = strategy.dp_degree
        local_indices = np.arange(strategy.dp_rank, samples, ranks)
        # All ranks have the same number of batches. For some, the last one may be all padding.
        for start in range(0, ceil_div(samples, ranks), micro_batch):
            indices = local_indices[start : start + micro_batch]
            heartbeat("a validation batch")
            progress(start * ranks / samples)
            yield self._objective.batch(evaluation_rows(self.samples, indices, micro_batch)), indices


# Outputs of the untrained model, such as DPO's log-probabilities: computed once, saved in the run


def set_reference(
    objective: Objective,
    store: TokenStore,
    strategy: ParallelStrategy,
    world: World,
    micro_batch: int,
    file: Path,
    resumes: bool,
) -> None:
    """Give an objective that needs a reference the untrained model's outputs for each sample.

    A run that `resumes` reads them from `file`. Without a checkpoint the file is ignored, since it may be of another
    model. It holds `train` and `validation`, float64 (samples, len(objective.outputs)), and the store's digest.
    """
    if not objective.needs_reference:
        return
    reference = _read_reference(file, store.digest) if resumes and file.is_file() else None
    world.barrier()  # all ranks read before the first one writes
    if reference is None:
        activity = "computing the model's log-probability of each answer before training"
        logger.info(activity)
        splits = {"train": store.train, "validation": store.validation}
        reference = {}
        for name, split in splits.items():
            if split.samples:
                progress = ProgressMessages(f"{activity} ({name}):")
                reference[name] = reference_outputs(objective, split, strategy, micro_batch, progress)
        if world.first:
            write_file(file, save(reference, metadata={"store": store.digest}))
    for name, outputs in reference.items():
        objective.set_reference(outputs.numpy(), validation=name == "validation")


def reference_outputs(
    objective: Objective, split: StoreSplit, strategy: ParallelStrategy, micro_batch: int, progress: ProgressMessages
) -> torch.Tensor:
    """Return the model's outputs for each sample of a split, float64 (samples, len(objective.outputs))."""
    return torch.from_numpy(Validation(objective, split).evaluate(strategy, micro_batch, None, progress)[1])


def _read_reference(file: Path, digest: str) -> dict[str, torch.Tensor] | None:
    try:
        with safe_open(file, framework="pt") as tensors:
            if (tensors.metadata() or {}).get("store") != digest:
                return None
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  # not a mapping
    except (OSError, SafetensorError) as error:
        fix = "restore a copy of it, or start over with --restart: the model is no longer what it was"
        raise InputError.at(str(file), f"is damaged: {error}", fix) from None
