"""How many samples a process runs at a time, and what it then computes again: what fits, found by trying, remembered.

On a GPU memory decides: the largest micro-batch that fits is taken. On a CPU the reach of the caches decides and memory
seldom does; but there too much of it means a process that is killed, so small attempts tell what larger ones need.
"""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import transformers
import xxhash
from transformers import PreTrainedModel

import artel
from artel.config import RunConfig
from artel.errors import InputError
from artel.host import memory, process_memory, reset_peak_memory
from artel.models.activation_checkpointing import NotSelective, Recompute
from artel.objectives import Batch, Objective
from artel.registry import OBJECTIVES
from artel.storage import cache_folder, write_file
from artel.tokens import Samples, WholeSamples, training_rows
from artel.training.memory.cpu_allocator import KEPT_SHARE, has_no_memory_limit, release_free_memory

Attempt = Callable[[int, Recompute], None]
"""Runs forward and backward of so many of the longest samples, recomputing as told, and leaves no gradients behind."""

# Tokens of a micro-batch beyond which more gain little: 4,096 keep two CPU cores busy and stay in their caches' reach;
# on an H200 nanoGPT 124M made 510k tokens/s with 32,768 and 531k with 65,536.
_MOST_TOKENS = {"cpu": 4096, "cuda": 65536}
# Tokens that are enough to go without computing anything again. A CPU gains nothing from larger micro-batches.
_ENOUGH_TOKENS = {"cpu": 1, "cuda": 8192}
# The share of memory that is left free: for fragments, communication and other processes. Chosen, not measured.
_MARGIN = 0.1
AMPLE = 0.5
"""Fraction of the free memory below which an estimated micro-batch is used untried. Estimates err by far less, and if
it does not fit after all, the first step is repeated with a smaller one."""
_MEASURABLE = 2**20  # bytes; less may be memory that the process had before
# What is said where no torch.OutOfMemoryError is raised.
_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "std::bad_alloc")
_LOOKED_AT = 64  # samples
_JSON = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    size: int
    """Rows of a micro-batch."""
    recompute: Recompute
    """What the layers compute again: one of the modes that were asked about."""


class MemoryLimit:
    """The most that a run may ask of memory, because more was too much for one of its steps: kept in its folder."""

    def __init__(self, run: Path, key: Mapping[str, Any]) -> None:
        """`run` is the folder, `key` all that the limit depends on, as in `find_micro_batch`."""
        self._file, self._key = run / f"limit-{_digest(key)}.json", key

    def keep(self, plan: MicroBatchPlan, agree: Callable[[int], int]) -> MicroBatchPlan:
        """`plan`, or less where the limit is lower; `agree` gives the smallest of all processes' numbers."""
        known = _remembered(self._file, ("none", "selective", "full"))
        least = agree(min(_appetite(each) for each in (plan, known) if each is not None))
        if least == _appetite(plan):
            return plan
        return MicroBatchPlan(least // 2, plan.recompute if least % 2 else "full")

    def lower(self, plan: MicroBatchPlan) -> None:
        """Remember that no more than `plan` may be asked from now on. Raises WorkError or InputError of the disk."""
        _remember([self._file], plan, self._key)


def _appetite(plan: MicroBatchPlan) -> int:
    """A number in whose order micro-batches take memory: by rows, of equal ones those with all computed again less."""
    return 2 * plan.size + (plan.recompute != "full")


def next_smaller(plan: MicroBatchPlan, share: int) -> MicroBatchPlan | None:
    """What is left to try when memory has run out with `plan`: half the rows; of a single one, all computed again.

    `share` is this process's share of a global batch, in rows: it is cut into equal micro-batches.
    """
    rows = -(-share // -(-share // plan.size))
    if rows > 1:
        return MicroBatchPlan(-(-rows // 2), plan.recompute)
    return None if plan.recompute == "full" else MicroBatchPlan(1, "full")


def find_micro_batch(
    attempt: Attempt,
    most: int,
    modes: Sequence[Recompute],
    *,
    row_tokens: int,
    device: torch.device,
    key: Mapping[str, Any],
    run: Path,
    reserve: int = 0,
    exactly: bool = False,
    agree: Callable[[int], int] = lambda number: number,
    enough_tokens: int | None = None,
    planned: MicroBatchPlan | None = None,
    is_ample: bool = False,
) -> MicroBatchPlan:
    """The largest micro-batch that fits, with the first of `modes` that is enough for it.

    `most` is this process's share of a global batch, in rows of `row_tokens` tokens; with `exactly` only that size
    will do. Of `modes` (some of none, selective, full, in this order) one is enough when `enough_tokens` or the whole
    share fit: by default 8,192, on a CPU a row; of the last, what fits is taken. `reserve` counts the bytes that the
    optimizer is going to take and has not yet. `key` holds all that the answer depends on: an answer that was found
    before is used without trying, one in the folder `run` before one of the cache, so that a run goes on bit for bit as
    it began whatever became of the cache. `agree` gives the smallest of all processes' numbers: they try the same sizes
    one after another, and what does not fit one of them is too large for all. What `artel plan` found before the run,
    `planned`, is tried first, and a little less where it does not fit; with `is_ample` it is taken untried.

    Raises InputError when not even a row fits. What else `attempt` raises goes through.
    """
    name = f"{_digest(key)}.json"
    files = [folder / name for folder in (run, cache_folder() / "micro_batches")]
    known = next((plan for file in files if (plan := _remembered(file, modes)) is not None), None)
    known = same_everywhere(known, modes, agree)
    if known is not None:
        _remember(files[:1], known, key)
        return known
    sizes = [most] if exactly else sizes_to_try(most, row_tokens, device)
    candidates = _planned_ones(same_everywhere(planned, modes, agree), sizes, modes)
    if candidates and agree(int(is_ample)):
        _remember(files[:1], candidates[0], key)  # for this run alone: nobody has tried it
        return candidates[0]
    trials = _Trials(attempt, device, reserve, agree)
    plan = trials.first_that_fits(candidates)
    if plan is None:
        plan = trials.search(sizes, modes, enough_rows(row_tokens, device, enough_tokens))
    if plan is None:
        raise _nothing_fits(modes, row_tokens, sizes[0])
    _remember(files, plan, key)
    return plan


def enough_rows(row_tokens: int, device: torch.device, enough_tokens: int | None = None) -> int:
    """Rows of a micro-batch with which nothing need be computed again to make room for more."""
    return -(-(enough_tokens or _ENOUGH_TOKENS.get(device.type, 1)) // row_tokens)


def same_everywhere(
    plan: MicroBatchPlan | None, modes: Sequence[Recompute], agree: Callable[[int], int]
) -> MicroBatchPlan | None:
    """`plan`, where all processes have the same: hosts with folders of their own may remember differently."""
    number = -1 if plan is None or plan.recompute not in modes else plan.size * len(modes) + modes.index(plan.recompute)
    lowest, highest = agree(number), -agree(-number)
    return plan if lowest == highest >= 0 else None


def _planned_ones(
    planned: MicroBatchPlan | None, sizes: Sequence[int], modes: Sequence[Recompute]
) -> list[MicroBatchPlan]:
    """What a plan found, and one that takes less: fewer rows, or of the fewest, more computed again."""
    if planned is None or planned.size not in sizes:
        return []
    smaller = [size for size in sizes if size < planned.size]
    if smaller:
        return [planned, MicroBatchPlan(smaller[-1], planned.recompute)]
    further = modes[modes.index(planned.recompute) + 1 :]
    return [planned, *(MicroBatchPlan(planned.size, mode) for mode in further[:1])]


def sizes_to_try(most: int, row_tokens: int, device: torch.device) -> list[int]:
    """Sizes worth trying, smallest first: halves of the share (rounded up) and its divisors, of not too many tokens.

    The loop cuts a share into equal micro-batches, filled up: 60 rows by at most 16 are four of 15. So divisors waste
    nothing, and halves are there for shares that have none.
    """
    divisors = {size for size in range(1, most + 1) if most % size == 0}
    halves = {-(-most // 2**power) for power in range(most.bit_length())}
    limit = max(1, _MOST_TOKENS.get(device.type, _MOST_TOKENS["cpu"]) // row_tokens)
    return [size for size in sorted(divisors | halves | {1}) if size <= limit]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is out, of the device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def longest_sample(objective: Objective, samples: Samples) -> tuple[int, int]:
    """(index, tokens) of the sample that makes the largest batch, for a row of it: what attempts must be made with.

    Of samples that stand alone, those with most tokens in the store are looked at; blocks are all alike.
    """
    candidates = np.zeros(1, dtype=np.int64)
    if isinstance(samples, WholeSamples):
        candidates = np.argsort(np.diff(samples.split.ends().astype(np.int64), prepend=0))[-_LOOKED_AT:]
    tokens = [repeat_sample(objective, samples, int(index), 1).tensors["input_ids"].numel() for index in candidates]
    return int(candidates[int(np.argmax(tokens))]), max(tokens)


def repeat_sample(objective: Objective, samples: Samples, index: int, rows: int) -> Batch:
    """A micro-batch of so many rows, each of them the same sample."""
    return objective.batch(training_rows(samples, np.full(rows, index), rows))


def cache_key(
    config: RunConfig, model: PreTrainedModel, most: int, row_tokens: int, device: torch.device, world: int
) -> dict[str, Any]:
    """All that decides how large a micro-batch fits: the key under which the answer is remembered."""
    data, train = config.data, config.train
    lora, quantize, frozen = config.model.lora, config.model.quantize, config.model.freeze
    return {
        "model": {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"},
        "trained": [lora and lora.model_dump(mode="json"), quantize, frozen],
        "objective": [config.objective, OBJECTIVES[config.objective].settings(config)],
        "data": [data.block, data.packing, data.document_mask, most, row_tokens],
        "train": [train.micro_batch, train.activation_checkpointing, train.precision, train.weights, train.optimizer],
        "device": _device(device),
        "processes": [world, config.parallel.model_dump(mode="json")],
        "versions": [artel.__version__, torch.__version__, transformers.__version__],
    }


def _device(device: torch.device) -> list[Any]:
    """Its name and its memory in bytes."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory]
    return [platform.machine(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]


def _digest(key: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(orjson.dumps(key, str, _JSON))


def _remember(files: Sequence[Path], plan: MicroBatchPlan, key: Mapping[str, Any]) -> None:
    for file in files:
        if _remembered(file, [plan.recompute]) != plan:
            write_file(file, orjson.dumps({"size": plan.size, "recompute": plan.recompute, "for": key}, str, _JSON))


def _remembered(file: Path, modes: Sequence[Recompute]) -> MicroBatchPlan | None:
    """What an earlier search found; nothing where the file is not there or not what it should be."""
    try:
        stored = orjson.loads(file.read_bytes())
        size, mode = int(stored["size"]), stored["recompute"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return MicroBatchPlan(size, mode) if size >= 1 and mode in modes else None


def _nothing_fits(modes: Sequence[Recompute], row_tokens: int, rows: int) -> InputError:
    what = f"{rows} sample(s) of {row_tokens:,} tokens do not fit into memory"
    if rows > 1:
        return InputError.at("train.micro_batch", what, "write auto, or a smaller number")
    if modes[-1] != "full":
        message = f"{what} with {modes[-1]}"
        return InputError.at("train.activation_checkpointing", message, "write auto, or full")
    fix = "write a smaller data.block, train.optimizer: adamw8bit, train.weights: bf16 or model.lora"
    return InputError.at("data.block", f"{what}, though all within their layers is computed again", fix)


@dataclass(frozen=True, slots=True)
class _Trials:
    """Attempts with ever other sizes, in step with the other processes."""

    attempt: Attempt
    device: torch.device
    reserve: int
    agree: Callable[[int], int]

    def search(self, sizes: list[int], modes: Sequence[Recompute], enough: int) -> MicroBatchPlan | None:
        """The first mode in which `enough` rows fit, or the largest of the ascending `sizes`; of the last, any."""
        for mode in modes:
            last = mode == modes[-1]
            candidates = [size for size in sizes if last or size >= enough or size == sizes[-1]]
            try:
                candidates, is_ample = self._within_host_memory(candidates, mode)
                size = candidates[-1] if is_ample else self._largest(candidates, mode)
            except NotSelective:
                if last:
                    raise
                continue
            if size:
                return MicroBatchPlan(size, mode)
        return None

    def first_that_fits(self, plans: Sequence[MicroBatchPlan]) -> MicroBatchPlan | None:
        for plan in plans:
            with suppress(NotSelective):
                if self._fits(plan.size, plan.recompute):
                    return plan
        return None

    def _largest(self, sizes: list[int], mode: Recompute) -> int:
        """The largest that fits, by halving what is in question; 0 if none does. Each is tried once."""
        if not sizes or self._fits(sizes[-1], mode):
            return sizes[-1] if sizes else 0
        fitting, failing = -1, len(sizes) - 1
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            if self._fits(sizes[middle], mode):
                fitting = middle
            else:
                failing = middle
        return sizes[fitting] if fitting >= 0 else 0

    def _fits(self, rows: int, mode: Recompute) -> bool:
        """Whether it fits everywhere."""
        return self.agree(int(self._fits_here(rows, mode))) == 1

    def _fits_here(self, rows: int, mode: Recompute) -> bool:
        kept_free = self.reserve
        if self.device.type == "cuda":
            kept_free += int(_MARGIN * torch.cuda.get_device_properties(self.device).total_memory)
        in_the_way, fits = None, False
        try:
            in_the_way = torch.empty(kept_free, dtype=torch.uint8, device=self.device)
            self.attempt(rows, mode)
            fits = True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Only now is the error gone, whose traceback held the frames, and these the tensors, of the attempt.
        del in_the_way
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)  # what was in the way is none of the run's memory
        return fits

    def _within_host_memory(self, sizes: list[int], mode: Recompute) -> tuple[list[int], bool]:
        """The sizes that the host has memory for, by what attempts with one row and with two take.

        True beside them if the largest needs so little that it need not be tried.
        """
        if self.device.type != "cpu" or sizes[-1] <= 2 or not _RESET.exists():
            return sizes, False
        most, is_ample = self._rows_in_host_memory(mode, sizes[-1])
        if self.agree(int(is_ample)):
            return sizes, True
        most = self.agree(most)
        return [size for size in sizes if size <= most], False

    def _rows_in_host_memory(self, mode: Recompute, largest: int) -> tuple[int, bool]:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's: processes that share the host
        release_free_memory()  # else an attempt would take what is free already, and seem to take nothing
        before, free = process_memory("VmRSS"), memory().free // here - self.reserve
        limit = before + int((1 - _MARGIN) * memory().free) // here - self.reserve
        peaks: list[int] = []
        for rows in (1, 2):
            reset_peak_memory()
            if not self._fits_here(rows, mode):
                return rows - 1, False
            peaks.append(process_memory("VmHWM"))
            release_free_memory()
            # A row takes less than the attempt with one did: that had to make room for the gradients, too.
            taken = (1 + KEPT_SHARE) * (peaks[0] - before)
            if taken > _MEASURABLE and largest * taken < AMPLE * free and has_no_memory_limit():
                return largest, True
        row = max(1, int((1 + KEPT_SHARE) * (peaks[1] - peaks[0])))
        return max(0, 1 + (limit - peaks[0]) // row), False


_RESET = Path("/proc/self/clear_refs")  # Linux only
