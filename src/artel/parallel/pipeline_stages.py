"""Splits a model by layers into pipeline stages: each is the user's own model with some of the layers.

Every stage runs the model's own forward pass on the micro-batch's own inputs, so masks, positions and rotary angles are
computed by the authors' code. Placeholders replace the layers of other stages. The one before a stage's first layer
returns the hidden states received from the previous stage. The one after its last layer ends the pass. Parameters that
only other stages need are removed. If the forward pass reads one before it reaches the layers, it gets zeros of the
right shape that take no memory, and the result is discarded.

`pipeline_structure.py` finds which parameters come before the layers and which after them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from artel.errors import InputError, Problem
from artel.models.router_aux_loss import get_router_aux_loss, share_router_aux_loss
from artel.parallel.pipeline_structure import (
    OUTPUT_FORMS,
    ModelStructure,
    NotSequential,
    copy_attributes,
    find_structure,
    get_hidden_states,
)


@dataclass(frozen=True, slots=True)
class Task:
    """One forward pass of a stage."""

    call: Callable[[PreTrainedModel], torch.Tensor]
    """Calls the model once, and computes the result of the last stage from its output."""
    before_send: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Applied to the last layer's output by any stage but the last, still within `call`, before it is sent."""


# Stages per process if interleaved: half as much idle time, for twice as many messages (Narayanan et al. 2021, 2.2).
_INTERLEAVED_STAGES = 2


def stage_count(processes: int, schedule: str) -> int:
    """Return the number of stages for a pipeline of `processes`."""
    return processes * _INTERLEAVED_STAGES if schedule == "interleaved" else processes


def pipeline_problems(model: PreTrainedModel, processes: int, schedule: str) -> list[Problem]:
    """Return the reasons why `model` cannot be split over a pipeline of `processes`. It may be on the meta device."""
    model_type = model.config.model_type
    where = "parallel.pipeline"
    try:
        structure = find_structure(model)
    except NotSequential as reason:
        return [Problem(where, f"{model_type} cannot be cut into stages: {reason}", "set 1 and parallel.data: fsdp")]
    stages = stage_count(processes, schedule)
    if stages > structure.layers:
        max_processes = structure.layers // (stages // processes)
        fix = f"use at most {max_processes}" if max_processes > 1 else "write 1"
        if stages > processes and processes <= structure.layers:
            fix += "; or parallel.schedule: 1f1b"
        what = f"{model_type} has {structure.layers} layers, fewer than the {stages} stages of {processes} processes"
        return [Problem(where, f"{what} ({schedule})", fix)]
    if stages > processes and structure.side_inputs:
        name = min(structure.side_inputs)
        what = f"interleaved: all layers of {model_type} need {name}, which a process cannot hold for two stages"
        return [Problem("parallel.schedule", what, "write 1f1b")]
    return []


class Stage(nn.Module):
    """One stage: `model` with some of its layers, under their full names.

    Append a `Task` to `tasks` for each forward pass; they run in that order.
    """

    def __init__(self, model: PreTrainedModel, index: int, stages: int, layer_range: range, plan: _Plan) -> None:
        super().__init__()
        self.model = model
        self.index = index
        self.stages = stages
        self.layer_range = layer_range
        self.shared = {name: holders for name, holders in plan.shared.items() if index in holders}
        """Parameters that other stages also hold -> all stages that do. Their gradients must be summed."""
        self.counted_elsewhere = frozenset(name for name, holders in self.shared.items() if holders[0] < index)
        """Shared parameters that an earlier stage counts in the norm and saves in a checkpoint."""
        self.tasks: deque[Task] = deque()
        self.padded_shape: tuple[int, int] | None = None
        """Shape (rows, length) that hidden states are padded to before they are sent to the next stage."""
        self._no_split_modules = model._no_split_modules  # read by code that wraps layers
        self._removed = _remove_parameters(model, plan.parameters[index])
        self._entry = _insert_placeholders(model, layer_range, plan.structure)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of this stage, in order."""
        return [self._entry.stack[index] for index in self.layer_range]

    def forward(self, *received: torch.Tensor) -> torch.Tensor:
        """Run the next of `tasks`. Return the result of its call on the last stage.

        Other stages return the hidden states after their last layer, (rows, length, width), padded to `padded_shape`.
        `received` are those of the previous stage, which may be padded to more than this micro-batch's rows and length.
        """
        task = self.tasks.popleft()
        entry = self._entry
        entry.received = received[0] if received else None
        entry.before_send = task.before_send
        entry.was_read = self.is_first
        self._fill_removed(entry.received)
        try:
            output = task.call(self.model)
            if not self.is_last:
                raise RuntimeError(f"stage {self.index} has passed its last layer")
        except _EndOfStage as end:
            output = self._pad_hidden(end.hidden)
        finally:
            entry.received = entry.before_send = None
        if not entry.was_read:  # a layer that is left out at random (layerdrop)
            raise RuntimeError(f"stage {self.index} has not taken what it was sent")
        return output

    def _pad_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, length = self.padded_shape or hidden.shape[:2]
        hidden = F.pad(hidden, (0, 0, 0, length - hidden.shape[1], 0, rows - hidden.shape[0])).contiguous()
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # everything before is frozen, but the engine still expects a backward pass
        return hidden

    def _fill_removed(self, received: torch.Tensor | None) -> None:
        """Replace removed parameters by zeros without memory, with the device and dtype of the layers' input."""
        example = next(self.parameters()) if received is None else received
        for module, name, shape in self._removed:
            zeros = vars(module).get(name)
            if zeros is None or zeros.device != example.device or zeros.dtype != example.dtype:
                vars(module)[name] = torch.zeros((), dtype=example.dtype, device=example.device).expand(shape)


def split_into_stages(model: PreTrainedModel, indices: Sequence[int], stages: int) -> list[Stage]:
    """Split `model` into `stages` stages, and return those at `indices`. Remove the others' parameters from `model`.

    `model` may be on the meta device; it must be complete, and neither wrapped nor sharded yet. With one index the
    stage's model is `model`. With several, each stage has a model made of the modules of `model`, which then holds the
    parameters of all of them. Stages are balanced by parameters and FLOPs, including embeddings and head. Raise
    InputError if the model is not a sequence of layers.
    """
    try:
        structure = find_structure(model)
    except NotSequential as reason:
        what = f"{model.config.model_type} cannot be cut into stages: {reason}"
        raise InputError.at("parallel.pipeline", what, "set 1 and parallel.data: fsdp") from None
    ranges = _balance_stages(*_layer_costs(model, structure), stages)
    plan = _plan_parameters(model, structure, ranges)
    get_router_aux_loss(model)  # while it has all its layers
    if len(indices) == 1:
        return [Stage(model, indices[0], stages, ranges[indices[0]], plan)]
    copies = [_partial_copy(model, "", plan.parameters[index]) for index in indices]
    share_router_aux_loss(model, copies)
    result = [Stage(copied, index, stages, ranges[index], plan) for copied, index in zip(copies, indices, strict=True)]
    _remove_parameters(model, frozenset().union(*(plan.parameters[index] for index in indices)))
    stack = model.get_submodule(structure.stack)
    for layer in set(range(structure.layers)) - {layer for index in indices for layer in ranges[index]}:
        stack._modules[str(layer)] = _Placeholder(
            stack.get_submodule(str(layer)), _Entry(stack, OUTPUT_FORMS[structure.output_form])
        )
    return result


# Placeholders for the layers of other stages


class _EndOfStage(Exception):
    """The forward pass has reached the end of its stage."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Entry:
    """Hidden states that a stage has received, for the placeholder before its first layer."""

    def __init__(self, stack: nn.Module, form: Callable[[torch.Tensor], Any]) -> None:
        self.stack: Any = stack
        self.form = form
        self.received: torch.Tensor | None = None
        self.before_send: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.was_read = False

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the received hidden states in place of `hidden`, without their padding."""
        rows, length, width = hidden.shape
        received = self.received
        if received is None or received.shape[0] < rows or received.shape[1] < length:
            # The caller tests how the model computes its logits: any values except zeros are fine.
            return torch.linspace(-1, 1, width, device=hidden.device, dtype=hidden.dtype).expand(hidden.shape)
        self.was_read = True
        return received if received.shape == hidden.shape else received[:rows, :length]


class _Placeholder(nn.Module):
    """Replaces another stage's layer, and returns hidden states unchanged."""

    def __init__(self, layer: nn.Module, entry: _Entry) -> None:
        super().__init__()
        # Models read attributes of their layers before they call them, such as the kind of attention.
        copy_attributes(layer, self)
        self.entry = entry

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.entry.form(get_hidden_states(args, kwargs))


class _FirstPlaceholder(_Placeholder):
    """Placeholder before a stage's first layer. Returns the received hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.entry.form(self.entry.read(get_hidden_states(args, kwargs)))


class _LastPlaceholder(_Placeholder):
    """Placeholder after a stage's last layer. Ends the forward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = get_hidden_states(args, kwargs)
        raise _EndOfStage(hidden if self.entry.before_send is None else self.entry.before_send(hidden))


def _insert_placeholders(model: PreTrainedModel, layer_range: range, structure: ModelStructure) -> _Entry:
    stack = model.get_submodule(structure.stack)
    entry = _Entry(stack, OUTPUT_FORMS[structure.output_form])
    placeholder_classes = {layer_range.start - 1: _FirstPlaceholder, layer_range.stop: _LastPlaceholder}
    for layer in range(structure.layers):
        if layer not in layer_range:
            stack._modules[str(layer)] = placeholder_classes.get(layer, _Placeholder)(
                stack.get_submodule(str(layer)), entry
            )
    return entry


# Parameters of each stage


@dataclass(frozen=True, slots=True)
class _Plan:
    """The parameters that each stage holds."""

    structure: ModelStructure
    parameters: list[frozenset[str]]
    """By stage, all names of the parameters that it holds."""
    shared: dict[str, tuple[int, ...]]
    """Parameters that several stages hold, by their name in `named_parameters` -> those stages."""


def _plan_parameters(model: PreTrainedModel, structure: ModelStructure, ranges: list[range]) -> _Plan:
    stage_of = {layer: index for index, layers in enumerate(ranges) for layer in layers}
    stage_parameters: list[set[str]] = [set() for _ in ranges]
    shared = {}
    for names in _names_by_parameter(model):
        holders: set[int] = set()
        for name in names:
            layer = structure.layer_of(name)
            if layer is not None:
                holders.add(stage_of[layer])
                continue
            needed = {stage_of[layer] for layer in structure.side_inputs.get(name, ())}
            first_stage = {0} if name in structure.before else set()
            # Parameters that no forward pass touches go to the last stage, where objectives call their own heads.
            last_stage = {len(ranges) - 1} if name in structure.after or not (needed or first_stage) else set()
            holders |= needed | first_stage | last_stage
        for index in holders:
            stage_parameters[index] |= set(names)
        if len(holders) > 1:
            shared[names[0]] = tuple(sorted(holders))
    return _Plan(structure, [frozenset(names) for names in stage_parameters], shared)


def _names_by_parameter(model: PreTrainedModel) -> Iterable[list[str]]:
    """Return the names of each parameter: several if it is tied, the one from `named_parameters` first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names.values()


def _remove_parameters(
    model: PreTrainedModel, stage_parameters: frozenset[str]
) -> list[tuple[nn.Module, str, torch.Size]]:
    """Remove parameters that are not in `stage_parameters`. Return (module, name in it, shape) of each."""
    removed_parameters = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and (f"{prefix}.{name}" if prefix else name) not in stage_parameters:
                del module._parameters[name]
                removed_parameters.append((module, name, parameter.shape))
    return removed_parameters


def _partial_copy(module: Any, prefix: str, stage_parameters: frozenset[str]) -> Any:
    """Copy a module recursively. Share submodules whose parameters are all in `stage_parameters`."""
    names = {f"{prefix}{name}" for name, _ in module.named_parameters(remove_duplicate=False)}
    if prefix and names <= stage_parameters:
        return module
    module_copy = copy.copy(module)
    for name, value in vars(module_copy).items():
        if isinstance(value, dict):
            vars(module_copy)[name] = value.copy()
    for name, child in module._modules.items():
        module_copy._modules[name] = (
            child if child is None else _partial_copy(child, f"{prefix}{name}.", stage_parameters)
        )
    return module_copy


# Balancing


def _layer_costs(model: PreTrainedModel, structure: ModelStructure) -> tuple[float, list[float], float]:
    """Return the costs of the modules before the layers, each layer and the modules after: half memory, half FLOPs.

    Memory is the number of parameters. A token costs one multiplication per number of a matrix, a fraction of that
    for experts, and none for lookups before the layers. Attention costs the same in all layers.
    """
    config = model.config.get_text_config()
    experts = max(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1, 1)
    active = (getattr(config, "num_experts_per_tok", None) or 1) / experts
    sizes = [0.0] * (structure.layers + 2)
    matmul_sizes = [0.0] * (structure.layers + 2)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = structure.layer_of(name)
        unit = 0 if name in structure.before else structure.layers + 1
        unit = unit if layer is None else layer + 1
        sizes[unit] += parameter.numel()
        if unit and parameter.ndim > 1:
            matmul_sizes[unit] += parameter.numel() * (active if parameter.ndim == 3 and experts > 1 else 1.0)
    costs = [
        size / sum(sizes) + matmul_size / sum(matmul_sizes)
        for size, matmul_size in zip(sizes, matmul_sizes, strict=True)
    ]
    return costs[0], costs[1:-1], costs[-1]


def _balance_stages(first_cost: float, layers: list[float], last_cost: float, stages: int) -> list[range]:
    """Return consecutive layers for each stage, at least one, so that the most expensive stage is minimal."""
    sums = [0.0]
    for layer in layers:
        sums.append(sums[-1] + layer)

    def cost(stage: int, start: int, end: int) -> float:
        return (
            sums[end] - sums[start] + (first_cost if stage == 0 else 0.0) + (last_cost if stage == stages - 1 else 0.0)
        )

    # best[end]: (most expensive stage so far, starts of the stages) if the stages so far take the layers before `end`
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        stages_after = stages - stage - 1
        best = {
            end: min(
                (max(highest, cost(stage, start, end)), [*starts, start])
                for start, (highest, starts) in best.items()
                if start < end
            )
            for end in (range(stage + 1, len(layers) - stages_after + 1) if stages_after else [len(layers)])
        }
    starts = best[len(layers)][1]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(layers)], strict=True)]
