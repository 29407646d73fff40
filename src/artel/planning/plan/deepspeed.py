"""A run with a DeepSpeed file, planned: the strategy whose trace stands for it, its memory and its traffic.

A trace runs PyTorch's strategy that shards the same (stage 1: zero1, 2: zero2, 3: fsdp). Activations and computation
are those of the trace. Weights, gradients, optimizer state and buffers are counted by what DeepSpeed 0.19.8 allocates
(runtime/zero: stage_1_and_2.py, stage3.py), and so are copies between host, device and disks. Reading the file needs
no DeepSpeed, and its folders and disks may be those of another machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from artel.config import RunConfig
from artel.models.device import bf16_is_native
from artel.models.quantization import num_weights as count_weights
from artel.parallel.deepspeed.config import check_keys, check_run, hidden_size
from artel.parallel.deepspeed.config_blocks import (
    check_optimizer,
    check_schedule,
    pop_zero_settings,
    resolve_micro_batch,
)
from artel.parallel.deepspeed.config_keys import AUTO, Findings, read_tree
from artel.planning.hardware import Hardware
from artel.planning.operations import READ_AHEAD, TO_DEVICE, TO_HOST, WAITED, Operation
from artel.planning.plan.live_bytes import COMMUNICATION, GRADIENTS, OPTIMIZER, WEIGHTS
from artel.planning.plan.offload import disk, host_step, transfer

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
"""Strategy that shards the same, by ZeRO stage."""
_FP32 = 4
_DEFAULTS = {"reduce_bucket_size": 5e8, "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9}
_OPTIMIZER_BUFFERS, _PARAMETER_BUFFERS, _PARAMETER_BUFFER_SIZE = 4, 5, 1e8
"""Defaults of `buffer_count` and `buffer_size` with device nvme."""
_SWAPPED_BYTES = 32
"""Bytes per weight through the disks in a step: float32 gradients written, weights, averages and gradients read,
weights and averages written."""
_UNSCALING_BYTES = 8


class Sizes(NamedTuple):
    """Numbers of a model."""

    trained: int
    frozen: int
    largest: int
    """Of its largest trained weight."""

    @classmethod
    def measure(cls, model: nn.Module) -> Sizes:
        sizes: dict[bool, list[int]] = {True: [], False: []}
        for parameter in model.parameters():
            sizes[parameter.requires_grad].append(count_weights(parameter))
        return cls(sum(sizes[True]), sum(sizes[False]), max(sizes[True], default=0))


@dataclass(frozen=True, slots=True)
class Placement:
    """Bytes of one process by kind."""

    device: dict[str, int]
    """While gradients are computed."""
    host: dict[str, int]
    step: dict[str, int]
    """On the device, during the optimizer's step."""
    disk: int
    """On local disks."""


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """What memory and time depend on in a DeepSpeed file."""

    stage: int
    precision: str
    """Precision of the weights on the device: fp32, bf16 or fp16."""
    micro_batch: int | None
    optimizer: str
    """Place of the optimizer's state: none (the device), cpu or nvme."""
    parameters: str
    """Place of the weights between their uses: the same."""
    pinned: bool
    gradient_bytes: int
    """Bytes of a gradient between micro-batches."""
    numbers: Mapping[str, Any]
    """The file's sizes, in elements. "auto" depends on the model."""

    @classmethod
    def read(cls, config: RunConfig, hardware: Hardware, world_size: int) -> ZeroSettings:
        """Read the run's file. Raise InputError if it contradicts the run file."""
        file = config.parallel.deepspeed
        assert file is not None
        tree = read_tree(file)
        findings = Findings(file)
        check_keys(findings, tree)
        check_run(findings, config)
        check_optimizer(findings, tree, config.train)
        check_schedule(findings, tree, config.train)
        zero = pop_zero_settings(findings, tree)
        stage = zero.get("stage", 0)
        if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
            findings.add_problem("zero_optimization.stage", f"is {stage!r}", "set 0, 1, 2 or 3")
            stage = 0
        precision = _pick_precision(findings, tree, config, hardware)
        if stage == 0 and precision != "fp32":
            stage = 1  # as artel runs it
        micro_batch = resolve_micro_batch(findings, tree, config.train, world_size, stage)
        findings.raise_if_any()
        sections = {key: zero.get(key) or {} for key in ("offload_optimizer", "offload_param")}
        optimizer, parameters = (section.get("device", "none") for section in sections.values())
        accumulated = (tree.get("data_types") or {}).get("grad_accum_dtype")
        return cls(
            stage=stage,
            precision=precision,
            micro_batch=micro_batch,
            optimizer=optimizer if stage else "none",
            parameters=parameters if stage == 3 else "none",
            pinned=all(section.get("pin_memory", True) is not False for section in sections.values()),
            gradient_bytes=_FP32 if accumulated == "fp32" else _bytes_of(precision),
            numbers={key: zero.get(key, default) for key, default in _DEFAULTS.items()},
        )

    @property
    def offloads(self) -> bool:
        return (self.optimizer, self.parameters) != ("none", "none")

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight on the device."""
        return _bytes_of(self.precision)

    def traced_run(self, config: RunConfig) -> RunConfig:
        """Return the run with PyTorch's strategy in place of DeepSpeed."""
        parallel = config.parallel.model_copy(update={"deepspeed": None, "data": STRATEGIES[self.stage]})
        train = config.train.model_copy(update={"precision": self.precision})
        if self.micro_batch is not None:
            train = train.model_copy(update={"micro_batch": self.micro_batch})
        return config.model_copy(update={"parallel": parallel, "train": train})

    def place(self, sizes: Sizes, state_bytes: int, world_size: int, model_config: Any, *, on_gpu: bool) -> Placement:
        """Return the bytes of one of `world_size` processes. `state_bytes`: its optimizer state."""
        trained, frozen, largest = sizes
        share, weight, gradient = trained / world_size, self.weight_bytes, self.gradient_bytes
        whole = weight * (trained + frozen)
        sub_group = min(share, self._number("sub_group_size", model_config))
        bucket = self._number("reduce_bucket_size", model_config)
        if self.stage == 0 or not on_gpu:  # otherwise allocated whole; on a CPU untouched pages take no memory
            bucket = min(bucket, trained)
        master = _FP32 * share if self.stage else 0.0  # also if the weights are float32
        gradients = gradient * (share if self.stage > 1 else trained)
        device = {WEIGHTS: float(whole), GRADIENTS: gradients, OPTIMIZER: 0.0, COMMUNICATION: gradient * bucket}
        host = {WEIGHTS: 0.0, GRADIENTS: 0.0, OPTIMIZER: 0.0, COMMUNICATION: 0.0}
        on_disk = 0.0
        if self.stage == 3:
            live = min(trained + frozen, self._number("stage3_max_live_parameters", model_config))
            device[COMMUNICATION] += weight * live
            place = device if self.parameters == "none" else host
            device[WEIGHTS] = 0.0
            place[WEIGHTS] = whole / world_size
            if self.parameters == "nvme":
                on_disk += whole / world_size
                host[WEIGHTS] = min(host[WEIGHTS], weight * _PARAMETER_BUFFERS * _PARAMETER_BUFFER_SIZE)
        step_gradients = _FP32 * (0.0, share, share, sub_group)[self.stage]
        if self.optimizer == "none":
            device[WEIGHTS] += master
            device[OPTIMIZER] = state_bytes
        else:
            if self.stage > 1:
                device[GRADIENTS] = 0.0
                host[GRADIENTS] = gradient * share
            if self.stage < 3:
                # Updated weights on their way to the device; a gradient on its way to the sums and back.
                host[COMMUNICATION] = weight * (share + largest)
                device[COMMUNICATION] += weight * largest
            if self.optimizer == "cpu":
                host[WEIGHTS] += master
                host[OPTIMIZER] = state_bytes
                host[GRADIENTS] += _FP32 * share
            else:
                on_disk += master + state_bytes + _FP32 * share
                host[OPTIMIZER] = _OPTIMIZER_BUFFERS * _FP32 * sub_group
            step_gradients = 0.0
        step = device | {COMMUNICATION: 0.0, GRADIENTS: device[GRADIENTS] + step_gradients}
        if self.stage == 1 and self.optimizer == "none":
            step[GRADIENTS] = gradient * share + step_gradients  # those of other processes are freed first
        return Placement(_rounded(device), _rounded(host), _rounded(step), round(on_disk))

    def traffic(
        self,
        passes: Mapping[Operation, int],
        optimizer_operations: Mapping[Operation, int],
        sizes: Sizes,
        world_size: int,
        micro_batches: int,
        *,
        evenness: float,
        on_gpu: bool,
    ) -> tuple[dict[Operation, int], dict[Operation, int]]:
        """Return the operations of the passes and of the optimizer's step, from those of the trace.

        `evenness`: an equal share of the weights, relative to the traced process's. PyTorch shards the first dimension:
        of 256 processes, 128 have a matrix of 128 experts. DeepSpeed shards all numbers equally.
        """
        share, weight, gradient = sizes.trained / world_size, self.weight_bytes, self.gradient_bytes
        # PyTorch reduces gradients in float32, DeepSpeed in the precision of the weights.
        factors = {"c10d._reduce_scatter_base_": evenness * weight / _FP32, "c10d._allgather_base_": evenness}
        new_passes: Counter[Operation] = Counter()
        for operation, count in passes.items():
            factor = factors.get(operation.name, 1.0)
            new_passes[replace(operation, bytes=round(operation.bytes * factor))] += count
        new_step = dict(optimizer_operations)
        if not on_gpu or not self.offloads:
            return dict(new_passes), new_step
        uses = 2 * micro_batches * weight * (sizes.trained + sizes.frozen) / world_size
        moved: dict[Operation, int] = {}
        if self.parameters != "none":
            moved[transfer(TO_DEVICE, uses, pinned=self.pinned)] = 1
            if self.parameters == "nvme":
                moved[disk(READ_AHEAD, uses)] = 1
        if self.optimizer != "none":
            # Stage 3 keeps sums of gradients on the host, stage 2 if there are several micro-batches, stage 1 never.
            sums = micro_batches if self.stage == 3 or (self.stage == 2 and micro_batches > 1) else 0
            moved[transfer(TO_HOST, (sums * gradient + _FP32) * share, pinned=self.pinned)] = 1
            if sums:
                back = transfer(TO_DEVICE, sums * gradient * share, pinned=self.pinned)
                moved[back] = moved.get(back, 0) + 1
            new_step = host_step(optimizer_operations, evenness, (_UNSCALING_BYTES + _FP32 + weight) * share)
            if self.parameters == "none":  # updated weights
                new_step[transfer(WAITED, weight * share, pinned=self.pinned and self.stage < 3)] = 1
            if self.optimizer == "nvme":
                new_step[disk(WAITED, _SWAPPED_BYTES * share)] = 1
        return dict(new_passes) | moved, new_step

    def _number(self, key: str, model_config: Any) -> float:
        value = self.numbers[key]
        if value == AUTO:
            width = hidden_size(model_config)
            return _DEFAULTS[key] if width is None or key != "reduce_bucket_size" else float(width * width)
        return float(value)


def _bytes_of(precision: str) -> int:
    return _FP32 if precision == "fp32" else 2


def _rounded(kinds: Mapping[str, float]) -> dict[str, int]:
    return {kind: round(size) for kind, size in kinds.items()}


def _pick_precision(findings: Findings, tree: dict[str, Any], config: RunConfig, hardware: Hardware) -> str:
    """Return the precision of the weights. "auto" is bf16 where the hardware has it."""
    requested = config.train.precision
    if requested == "fp8":
        findings.add_problem("bf16", "DeepSpeed does not support fp8", "set train.precision: bf16")
    blocks = {"fp16": tree.get("fp16"), "bf16": tree.get("bf16", tree.get("bfloat16"))}
    enabled = {name: (block or {}).get("enabled", AUTO) for name, block in blocks.items()}
    if hardware.shares_memory:
        has_bf16 = bf16_is_native(torch.device("cpu"))
        return "bf16" if enabled["bf16"] in (True, AUTO) and (requested == "bf16" or has_bf16) else "fp32"
    for name in enabled:
        if enabled[name] is True or (enabled[name] == AUTO and requested == name):
            return name
    takes_bf16 = requested == AUTO and enabled["bf16"] == AUTO and "bf16" in hardware.peak_flops
    return "bf16" if takes_bf16 else "fp32"
