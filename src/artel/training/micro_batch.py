"""Finds the largest micro-batch that fits into memory, and the activation recomputation it needs, by trying.

On a GPU memory decides: the largest micro-batch that fits is used. On a CPU the caches decide, memory rarely. But a
process that takes too much host memory is killed, so small attempts predict the memory of larger ones.
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
from artel.config import RunConfig, Section
from artel.errors import InputError
from artel.host import memory, process_memory, reset_peak_memory
from artel.integers import ceil_div
from artel.models.activation_checkpointing import Recompute, SelectiveUnsupported
from artel.objectives import Batch, Objective
from artel.registry import OBJECTIVES
from artel.storage import cache_folder, write_file
from artel.tokens import Samples, UnpackedSamples, training_rows
from artel.training.memory import RETAINED_FRACTION, has_no_memory_limit, release_free_memory

Attempt = Callable[[int, Recompute], None]
"""attempt(rows, recompute): run forward and backward on `rows` copies of the longest sample, and drop the gradients."""

# Tokens of a micro-batch beyond which speed hardly grows. 4,096 keep two CPU cores busy and fit their caches. On an
# H200, nanoGPT 124M reached 510k tokens/s with 32,768 and 531k with 65,536.
_MAX_TOKENS = {"cpu": 4096, "cuda": 65536}
# Tokens of a micro-batch that make recomputation unnecessary. A CPU gains nothing from larger micro-batches.
_ENOUGH_TOKENS = {"cpu": 1, "cuda": 8192}
# Fraction of memory left free for fragmentation, communication and other processes. Chosen, not measured.
_MARGIN_FRACTION = 0.1
AMPLE = 0.5
"""Fraction of the free memory below which an estimated micro-batch is used untried. Errors of estimates are far
smaller. If it does not fit after all, the first step is repeated with a smaller one."""
_MIN_MEASURED_BYTES = 2**20  # a smaller difference may be memory that the process already had
# Messages of errors other than torch.OutOfMemoryError.
_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "std::bad_alloc")
_MAX_CANDIDATES = 64  # samples among which the longest is searched
_JSON_OPTIONS = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    rows: int
    """Rows of a micro-batch."""
    recompute: Recompute
    """Activation recomputation of the layers."""


class MemoryLimit:
    """The largest micro-batch that a run may use since a step ran out of memory. Saved in the run's folder."""

    def __init__(self, run: Path, key: Mapping[str, Any]) -> None:
        """`run`: the folder. `key`: everything that the limit depends on, as in `find_micro_batch`."""
        self._file, self._key = run / f"limit-{_digest(key)}.json", key

    def apply(self, plan: MicroBatchPlan, all_reduce_min: Callable[[int], int]) -> MicroBatchPlan:
        """Return `plan`, or a smaller one if the limit is lower. The same on all ranks."""
        saved = _read_plan(self._file, ("none", "selective", "full"))
        lowest = all_reduce_min(
            _memory_order(plan) if saved is None else min(_memory_order(plan), _memory_order(saved))
        )
        if lowest == _memory_order(plan):
            return plan
        return MicroBatchPlan(lowest // 2, plan.recompute if lowest % 2 else "full")

    def lower(self, plan: MicroBatchPlan) -> None:
        """Lower the limit to `plan`. Raise WorkError or InputError if the disk refuses."""
        _save_plan([self._file], plan, self._key)


def _memory_order(plan: MicroBatchPlan) -> int:
    """Return a number that orders micro-batches by memory: by rows, then by recomputation, since full takes less."""
    return 2 * plan.rows + (plan.recompute != "full")


def next_smaller(plan: MicroBatchPlan, local_rows: int) -> MicroBatchPlan | None:
    """Return the micro-batch to try after `plan` ran out of memory: half the rows, or full recomputation of one row.

    `local_rows`: this process's rows of a global batch, which are cut into equal micro-batches.
    """
    rows = ceil_div(local_rows, ceil_div(local_rows, plan.rows))
    if rows > 1:
        return MicroBatchPlan(ceil_div(rows, 2), plan.recompute)
    return None if plan.recompute == "full" else MicroBatchPlan(1, "full")


def find_micro_batch(
    attempt: Attempt,
    max_rows: int,
    modes: Sequence[Recompute],
    *,
    row_tokens: int,
    device: torch.device,
    key: Mapping[str, Any],
    run: Path,
    reserve: int = 0,
    exactly: bool = False,
    all_reduce_min: Callable[[int], int] = lambda value: value,
    enough_tokens: int | None = None,
    planned: MicroBatchPlan | None = None,
    is_ample: bool = False,
) -> MicroBatchPlan:
    """Return the largest micro-batch that fits, with the first of `modes` that suffices for it.

    max_rows: this process's rows of a global batch, of `row_tokens` tokens each. With `exactly`, the only size allowed.
    modes: some of none, selective, full, in this order. A mode suffices if `enough_tokens` (default: 8,192, on a CPU
        one row) or all rows fit. With the last mode, anything that fits does.
    reserve: bytes that the optimizer will allocate later.
    key: everything that the result depends on. An earlier result is used without trying: first from the folder `run`,
        so that a run resumes bit for bit even if the cache has changed, then from the cache.
    all_reduce_min: returns the smallest number of all ranks. They try the same sizes, and a size must fit all of them.
    planned: the result of `artel plan`. Tried first, then a smaller one; with `is_ample` used untried.

    Raise InputError if not even one row fits. Other errors of `attempt` propagate.
    """
    name = f"{_digest(key)}.json"
    files = [folder / name for folder in (run, cache_folder() / "micro_batches")]
    saved = next((plan for file in files if (plan := _read_plan(file, modes)) is not None), None)
    saved = agreed_plan(saved, modes, all_reduce_min)
    if saved is not None:
        _save_plan(files[:1], saved, key)
        return saved
    sizes = [max_rows] if exactly else sizes_to_try(max_rows, row_tokens, device)
    candidates = _planned_candidates(agreed_plan(planned, modes, all_reduce_min), sizes, modes)
    if candidates and all_reduce_min(int(is_ample)):
        _save_plan(files[:1], candidates[0], key)  # not in the cache, since it is untested
        return candidates[0]
    trials = _Trials(attempt, device, reserve, all_reduce_min)
    plan = trials.first_that_fits(candidates)
    if plan is None:
        plan = trials.search(sizes, modes, enough_rows(row_tokens, device, enough_tokens))
    if plan is None:
        raise _does_not_fit_error(modes, row_tokens, sizes[0])
    _save_plan(files, plan, key)
    return plan


def enough_rows(row_tokens: int, device: torch.device, enough_tokens: int | None = None) -> int:
    """Return the rows of a micro-batch that make recomputation unnecessary."""
    return ceil_div(enough_tokens or _ENOUGH_TOKENS.get(device.type, 1), row_tokens)


def agreed_plan(
    plan: MicroBatchPlan | None, modes: Sequence[Recompute], all_reduce_min: Callable[[int], int]
) -> MicroBatchPlan | None:
    """Return `plan` if all processes have the same one, else None: hosts with separate folders may differ."""
    code = -1 if plan is None or plan.recompute not in modes else plan.rows * len(modes) + modes.index(plan.recompute)
    lowest, highest = all_reduce_min(code), -all_reduce_min(-code)
    return plan if lowest == highest >= 0 else None


def _planned_candidates(
    planned: MicroBatchPlan | None, sizes: Sequence[int], modes: Sequence[Recompute]
) -> list[MicroBatchPlan]:
    """Return the planned micro-batch and a smaller one: fewer rows, or more recomputation if rows cannot shrink."""
    if planned is None or planned.rows not in sizes:
        return []
    smaller_sizes = [size for size in sizes if size < planned.rows]
    if smaller_sizes:
        return [planned, MicroBatchPlan(smaller_sizes[-1], planned.recompute)]
    stronger_modes = modes[modes.index(planned.recompute) + 1 :]
    return [planned, *(MicroBatchPlan(planned.rows, mode) for mode in stronger_modes[:1])]


def sizes_to_try(max_rows: int, row_tokens: int, device: torch.device) -> list[int]:
    """Return sizes to try, smallest first: divisors and halves (rounded up) of `max_rows`, up to a limit of tokens.

    The loop cuts a rank's rows into equal micro-batches, with padding: 60 rows with a limit of 16 become four of 15.
    Divisors need no padding. Halves help if `max_rows` has few divisors.
    """
    divisors = {size for size in range(1, max_rows + 1) if max_rows % size == 0}
    halves = {ceil_div(max_rows, 2**power) for power in range(max_rows.bit_length())}
    limit = max(1, _MAX_TOKENS.get(device.type, _MAX_TOKENS["cpu"]) // row_tokens)
    return [size for size in sorted(divisors | halves | {1}) if size <= limit]


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means that the device or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def longest_sample(objective: Objective, samples: Samples) -> tuple[int, int]:
    """Return (index, tokens) of the sample that makes the largest batch, to be used for attempts.

    Unpacked samples are compared among those with the most tokens in the store. Blocks all have one size.
    """
    candidates = np.zeros(1, dtype=np.int64)
    if isinstance(samples, UnpackedSamples):
        candidates = np.argsort(np.diff(samples.split.ends().astype(np.int64), prepend=0))[-_MAX_CANDIDATES:]
    tokens = [repeat_sample(objective, samples, int(index), 1).tensors["input_ids"].numel() for index in candidates]
    return int(candidates[int(np.argmax(tokens))]), max(tokens)


def repeat_sample(objective: Objective, samples: Samples, index: int, rows: int) -> Batch:
    """Return a micro-batch of `rows` copies of a sample."""
    return objective.batch(training_rows(samples, np.full(rows, index), rows))


def cache_key(
    config: RunConfig, model: PreTrainedModel, max_rows: int, row_tokens: int, device: torch.device, world: int
) -> dict[str, Any]:
    """Return everything that affects which micro-batch fits: the key of the saved result."""
    data, train = config.data, config.train
    lora, quantize, frozen = config.model.lora, config.model.quantize, config.model.freeze
    plugin: Section | None = (config.model_extra or {}).get(config.objective)
    plugin_settings = [] if plugin is None else [plugin.model_dump(mode="json")]
    return {
        "model": {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"},
        "trained": [lora and lora.model_dump(mode="json"), quantize, frozen],
        "objective": [config.objective, OBJECTIVES[config.objective].settings(config), *plugin_settings],
        "data": [data.block, data.packing, data.document_mask, max_rows, row_tokens],
        "train": [train.micro_batch, train.activation_checkpointing, train.precision, train.weights, train.optimizer],
        "device": _device_key(device),
        "processes": [world, config.parallel.model_dump(mode="json")],
        "versions": [artel.__version__, torch.__version__, transformers.__version__],
    }


def _device_key(device: torch.device) -> list[Any]:
    """Return the device's name and its memory in bytes."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory]
    return [platform.machine(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]


def _digest(key: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(orjson.dumps(key, str, _JSON_OPTIONS))


def _save_plan(files: Sequence[Path], plan: MicroBatchPlan, key: Mapping[str, Any]) -> None:
    for file in files:
        if _read_plan(file, [plan.recompute]) != plan:
            write_file(
                file, orjson.dumps({"size": plan.rows, "recompute": plan.recompute, "for": key}, str, _JSON_OPTIONS)
            )


def _read_plan(file: Path, modes: Sequence[Recompute]) -> MicroBatchPlan | None:
    """Return the result of an earlier search, or None if the file is missing or invalid."""
    try:
        stored = orjson.loads(file.read_bytes())
        rows, mode = int(stored["size"]), stored["recompute"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return MicroBatchPlan(rows, mode) if rows >= 1 and mode in modes else None


def _does_not_fit_error(modes: Sequence[Recompute], row_tokens: int, rows: int) -> InputError:
    reason = f"{rows} sample(s) of {row_tokens:,} tokens do not fit into memory"
    if rows > 1:
        return InputError.at("train.micro_batch", reason, "write auto, or a smaller number")
    if modes[-1] != "full":
        message = f"{reason} with {modes[-1]}"
        return InputError.at("train.activation_checkpointing", message, "write auto, or full")
    fix = "use a smaller data.block, train.optimizer: adamw8bit, train.weights: bf16 or model.lora"
    return InputError.at("data.block", f"{reason}, even with full activation checkpointing", fix)


@dataclass(frozen=True, slots=True)
class _Trials:
    """Tries micro-batches of different sizes, the same on all processes."""

    attempt: Attempt
    device: torch.device
    reserve: int
    all_reduce_min: Callable[[int], int]

    def search(self, sizes: list[int], modes: Sequence[Recompute], enough_rows: int) -> MicroBatchPlan | None:
        """Return the first mode in which `enough_rows` rows, or the largest of the ascending `sizes`, fit.

        With the last mode, return whatever fits, or None.
        """
        for mode in modes:
            is_last_mode = mode == modes[-1]
            candidates = [size for size in sizes if is_last_mode or size >= enough_rows or size == sizes[-1]]
            try:
                candidates, is_ample = self._limit_to_host_memory(candidates, mode)
                size = candidates[-1] if is_ample else self._find_largest(candidates, mode)
            except SelectiveUnsupported:
                if is_last_mode:
                    raise
                continue
            if size:
                return MicroBatchPlan(size, mode)
        return None

    def first_that_fits(self, plans: Sequence[MicroBatchPlan]) -> MicroBatchPlan | None:
        for plan in plans:
            with suppress(SelectiveUnsupported):
                if self._fits(plan.rows, plan.recompute):
                    return plan
        return None

    def _find_largest(self, sizes: list[int], mode: Recompute) -> int:
        """Return the largest size that fits, by binary search, or 0. Each size is tried at most once."""
        if not sizes or self._fits(sizes[-1], mode):
            return sizes[-1] if sizes else 0
        highest_fit, lowest_failure = -1, len(sizes) - 1
        while lowest_failure - highest_fit > 1:
            middle = (highest_fit + lowest_failure) // 2
            if self._fits(sizes[middle], mode):
                highest_fit = middle
            else:
                lowest_failure = middle
        return sizes[highest_fit] if highest_fit >= 0 else 0

    def _fits(self, rows: int, mode: Recompute) -> bool:
        """True if the size fits on all processes."""
        return self.all_reduce_min(int(self._fits_on_this_rank(rows, mode))) == 1

    def _fits_on_this_rank(self, rows: int, mode: Recompute) -> bool:
        reserved = self.reserve
        if self.device.type == "cuda":
            reserved += int(_MARGIN_FRACTION * torch.cuda.get_device_properties(self.device).total_memory)
        ballast, fits = None, False
        try:
            ballast = torch.empty(reserved, dtype=torch.uint8, device=self.device)
            self.attempt(rows, mode)
            fits = True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # The error's traceback held the frames of the attempt, and with them its tensors, until here.
        del ballast
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)  # do not count the ballast as memory of the run
        return fits

    def _limit_to_host_memory(self, sizes: list[int], mode: Recompute) -> tuple[list[int], bool]:
        """Return the sizes that fit into host memory, judging by attempts with one row and with two.

        Also return True if the largest size needs so little memory that it can be used untried.
        """
        if self.device.type != "cpu" or sizes[-1] <= 2 or not _RESET_FILE.exists():
            return sizes, False
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # from torchrun: processes on this host
        release_free_memory()  # otherwise an attempt would reuse free memory and seem to need none
        baseline, free = process_memory("VmRSS"), memory().free // local_world_size - self.reserve
        limit = baseline + int((1 - _MARGIN_FRACTION) * memory().free) // local_world_size - self.reserve
        peaks: list[int] = []
        for rows in (1, 2):  # on all ranks alike, whatever each measures: an attempt may need the others
            reset_peak_memory()
            if not self._fits(rows, mode):
                return [size for size in sizes if size < rows], False
            peaks.append(process_memory("VmHWM"))
            release_free_memory()
            # An upper bound for a row: the attempt also allocated the gradients.
            row_bytes = (1 + RETAINED_FRACTION) * (peaks[0] - baseline)
            is_ample = row_bytes > _MIN_MEASURED_BYTES and sizes[-1] * row_bytes < AMPLE * free
            if self.all_reduce_min(int(is_ample and has_no_memory_limit())):
                return sizes, True
        bytes_per_row = max(1, int((1 + RETAINED_FRACTION) * (peaks[1] - peaks[0])))
        max_rows = self.all_reduce_min(max(0, 1 + (limit - peaks[0]) // bytes_per_row))
        return [size for size in sizes if size <= max_rows], False


_RESET_FILE = Path("/proc/self/clear_refs")  # Linux only
