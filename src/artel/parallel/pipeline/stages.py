"""A model cut by its layers into stages of a pipeline: each is the user's own model with its share of the layers.

Every stage runs the model's own forward pass on the micro-batch's own inputs, so that masks, positions and rotary
angles are made as the authors wrote them. Layers of other stages are stand-ins: the one before a stage's first layer
gives what the stage before has sent, the one after its last layer ends the pass. Parameters that only other stages
need are gone; where the forward pass touches one on its way to the layers, it finds zeros of the right shape that take
no memory, and what they make is not used.

Which parameters come before the layers and which after them is found by looking at the model (`model_structure.py`).
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
from artel.models.router_aux_loss import router_aux_loss_of, share_router_aux_loss
from artel.parallel.pipeline.model_structure import FORMS, Anatomy, NotSequential, copy_attributes, examine, hidden_of


@dataclass(frozen=True, slots=True)
class Task:
    """What one forward pass of a stage is to do."""

    call: Callable[[PreTrainedModel], torch.Tensor]
    """Calls the model, once, and makes of what it returns what the last stage is to return."""
    hand_on: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What a stage that is not the last does with its last layer's output, still within `call`, before it is sent."""


# Stages of a process that has several: bubbles half as long, for twice as many messages (Narayanan et al. 2021, 2.2).
_INTERLEAVED = 2


def stages_in_all(processes: int, schedule: str) -> int:
    """How many stages a model is cut into for so many `processes` of a pipeline."""
    return processes * _INTERLEAVED if schedule == "interleaved" else processes


def stages_problems(model: PreTrainedModel, processes: int, schedule: str) -> list[Problem]:
    """Why `model`, which may be on the meta device, cannot be shared out over so many processes of a pipeline."""
    kind, where = model.config.model_type, "parallel.pipeline"
    try:
        anatomy = examine(model)
    except NotSequential as reason:
        return [Problem(where, f"{kind} cannot be cut into stages: {reason}", "write 1, and parallel.data: fsdp")]
    stages = stages_in_all(processes, schedule)
    if stages > anatomy.layers:
        most = anatomy.layers // (stages // processes)
        fix = f"write {most} or less" if most > 1 else "write 1"
        if stages > processes and processes <= anatomy.layers:
            fix += "; or parallel.schedule: 1f1b"
        what = f"{kind} has {anatomy.layers} layers, fewer than the {stages} stages of {processes} processes"
        return [Problem(where, f"{what} ({schedule})", fix)]
    if stages > processes and anatomy.everywhere:
        name = min(anatomy.everywhere)
        what = f"interleaved: all layers of {kind} need {name}, which a process cannot hold for two stages"
        return [Problem("parallel.schedule", what, "write 1f1b")]
    return []


class Stage(nn.Module):
    """One stage: `model` with its share of the layers, under their full names.

    Before each forward pass what it is to do is appended to `tasks`; they are done in that order.
    """

    def __init__(self, model: PreTrainedModel, index: int, stages: int, own: range, plan: _Plan) -> None:
        super().__init__()
        self.model = model
        self.index, self.stages, self.own = index, stages, own
        self.shared = {name: holders for name, holders in plan.shared.items() if index in holders}
        """Parameters that other stages hold as well -> the stages that do; their gradients are to be summed."""
        self.counted_elsewhere = frozenset(name for name, holders in self.shared.items() if holders[0] < index)
        """Those of them that an earlier stage counts: in the norm, in a checkpoint."""
        self.tasks: deque[Task] = deque()
        self.size: tuple[int, int] | None = None
        """(rows, length) that hidden states are filled up to on their way to the next stage."""
        self._no_split_modules = model._no_split_modules  # whoever wraps layers asks this of a model
        self._absent = _absent(model, plan.held[index])
        self._entry = _fit_stand_ins(model, own, plan.anatomy)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def layers(self) -> list[nn.Module]:
        """Its layers, in order."""
        return [self._entry.stack[place] for place in self.own]

    def forward(self, *received: torch.Tensor) -> torch.Tensor:
        """The next of `tasks`. Of the last stage: what its call returns.

        Of others the hidden states after their last layer, (rows, length, size), filled up to `size`. `received` are
        those of the stage before, which may be filled up to more than the rows and the length of this micro-batch.
        """
        task, entry = self.tasks.popleft(), self._entry
        entry.received, entry.hand_on, entry.used = received[0] if received else None, task.hand_on, self.is_first
        self._fill_in(entry.received)
        try:
            output = task.call(self.model)
            if not self.is_last:
                raise RuntimeError(f"stage {self.index} has passed its last layer")
        except _Left as left:
            output = self._filled_up(left.hidden)
        finally:
            entry.received = entry.hand_on = None
        if not entry.used:  # a layer that is left out at random (layerdrop)
            raise RuntimeError(f"stage {self.index} has not taken what it was sent")
        return output

    def _filled_up(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, length = self.size or hidden.shape[:2]
        hidden = F.pad(hidden, (0, 0, 0, length - hidden.shape[1], 0, rows - hidden.shape[0])).contiguous()
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # all is frozen up to here, and the engine expects to go back all the same
        return hidden

    def _fill_in(self, received: torch.Tensor | None) -> None:
        """Zeros for what is absent, without memory, of the kind that the layers' input is of."""
        example = next(self.parameters()) if received is None else received
        for module, name, shape in self._absent:
            there = vars(module).get(name)
            if there is None or there.device != example.device or there.dtype != example.dtype:
                vars(module)[name] = torch.zeros((), dtype=example.dtype, device=example.device).expand(shape)


def cut(model: PreTrainedModel, indices: Sequence[int], stages: int) -> list[Stage]:
    """The stages `indices` of `model`, cut into so many; what other stages own is gone from `model` itself.

    `model` may be on the meta device; it must be whole, and neither wrapped nor shared out yet. With a single index the
    stage's model is `model`; with several each stage has a model of its own, made of the modules of `model`, which then
    holds the parameters of them all. Layers are balanced by parameters and products, head and embeddings among them.
    Raises InputError where `stages_problems` finds something.
    """
    try:
        anatomy = examine(model)
    except NotSequential as reason:
        what = f"{model.config.model_type} cannot be cut into stages: {reason}"
        raise InputError.at("parallel.pipeline", what, "write 1, and parallel.data: fsdp") from None
    shares = _balanced(*_costs(model, anatomy), stages)
    plan = _planned(model, anatomy, shares)
    router_aux_loss_of(model)  # while it has all its layers
    if len(indices) == 1:
        return [Stage(model, indices[0], stages, shares[indices[0]], plan)]
    twins = [_twin(model, "", plan.held[index]) for index in indices]
    share_router_aux_loss(model, twins)
    result = [Stage(twin, index, stages, shares[index], plan) for twin, index in zip(twins, indices, strict=True)]
    _absent(model, frozenset().union(*(plan.held[index] for index in indices)))
    stack = model.get_submodule(anatomy.stack)
    for place in set(range(anatomy.layers)) - {place for index in indices for place in shares[index]}:
        stack._modules[str(place)] = _StandIn(_layer(model, anatomy, place), _Entry(stack, FORMS[anatomy.form]))
    return result


# What stands where the layers of other stages stood


class _Left(Exception):
    """The forward pass has come to the end of its stage."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Entry:
    """What a stage has been sent, for the stand-in before its first layer."""

    def __init__(self, stack: nn.Module, form: Callable[[torch.Tensor], Any]) -> None:
        self.stack: Any = stack
        self.form = form
        self.received: torch.Tensor | None = None
        self.hand_on: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.used = False

    def take(self, coming: torch.Tensor) -> torch.Tensor:
        """What was sent, without what fills it up to more than `coming`, which is what it stands for."""
        rows, length, size = coming.shape
        sent = self.received
        if sent is None or sent.shape[0] < rows or sent.shape[1] < length:
            # The model is called on its own, to see how it treats its logits: anything but zeros will do.
            return torch.linspace(-1, 1, size, device=coming.device, dtype=coming.dtype).expand(coming.shape)
        self.used = True
        return sent if sent.shape == coming.shape else sent[:rows, :length]


class _StandIn(nn.Module):
    """In the place of a layer of another stage: hidden states pass through it as they are."""

    def __init__(self, layer: nn.Module, entry: _Entry) -> None:
        super().__init__()
        # What a model asks of its layers before it calls them: their kind of attention, their number.
        copy_attributes(layer, self)
        self.entry = entry

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.entry.form(hidden_of(args, kwargs))


class _First(_StandIn):
    """Before a stage's first layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.entry.form(self.entry.take(hidden_of(args, kwargs)))


class _Last(_StandIn):
    """After a stage's last layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_of(args, kwargs)
        raise _Left(hidden if self.entry.hand_on is None else self.entry.hand_on(hidden))


def _fit_stand_ins(model: PreTrainedModel, own: range, anatomy: Anatomy) -> _Entry:
    stack = model.get_submodule(anatomy.stack)
    entry = _Entry(stack, FORMS[anatomy.form])
    kinds = {own.start - 1: _First, own.stop: _Last}
    for place in range(anatomy.layers):
        if place not in own:
            stack._modules[str(place)] = kinds.get(place, _StandIn)(_layer(model, anatomy, place), entry)
    return entry


def _layer(model: PreTrainedModel, anatomy: Anatomy, place: int) -> nn.Module:
    return model.get_submodule(f"{anatomy.stack}.{place}")


# Whose parameters are whose


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which stage holds which parameters."""

    anatomy: Anatomy
    held: list[frozenset[str]]
    """By stage, all names of the parameters that it holds."""
    shared: dict[str, tuple[int, ...]]
    """Parameters that several stages hold, by the name that `named_parameters` gives them -> those stages."""


def _planned(model: PreTrainedModel, anatomy: Anatomy, shares: list[range]) -> _Plan:
    stage_of = {place: index for index, share in enumerate(shares) for place in share}
    held: list[set[str]] = [set() for _ in shares]
    shared = {}
    for names in _tied(model):
        holders: set[int] = set()
        for name in names:
            place = anatomy.place(name)
            if place is not None:
                holders.add(stage_of[place])
                continue
            needed = {stage_of[place] for place in anatomy.everywhere.get(name, ())}
            first = {0} if name in anatomy.before else set()
            # What no forward pass touches belongs to the end, where objectives call heads of their own.
            last = {len(shares) - 1} if name in anatomy.after or not (needed or first) else set()
            holders |= needed | first | last
        for index in holders:
            held[index] |= set(names)
        if len(holders) > 1:
            shared[names[0]] = tuple(sorted(holders))
    return _Plan(anatomy, [frozenset(names) for names in held], shared)


def _tied(model: PreTrainedModel) -> Iterable[list[str]]:
    """The names of each parameter: several where it is tied; first the one that `named_parameters` gives it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names.values()


def _absent(model: PreTrainedModel, held: frozenset[str]) -> list[tuple[nn.Module, str, torch.Size]]:
    """Take away what is not `held`: (module, name in it, shape) of each parameter."""
    removed = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and (f"{prefix}.{name}" if prefix else name) not in held:
                del module._parameters[name]
                removed.append((module, name, parameter.shape))
    return removed


def _twin(module: Any, prefix: str, held: frozenset[str]) -> Any:
    """A module of the same submodules, but for those that hold anything else than `held`: they are twins as well."""
    names = {f"{prefix}{name}" for name, _ in module.named_parameters(remove_duplicate=False)}
    if prefix and names <= held:
        return module
    twin = copy.copy(module)
    for name, value in vars(twin).items():
        if isinstance(value, dict):
            vars(twin)[name] = value.copy()
    for name, child in module._modules.items():
        twin._modules[name] = child if child is None else _twin(child, f"{prefix}{name}.", held)
    return twin


# How the layers are shared out


def _costs(model: PreTrainedModel, anatomy: Anatomy) -> tuple[float, list[float], float]:
    """What comes before the layers, each layer, and what comes after them cost: memory and products, in equal parts.

    Memory is the number of parameters. The products of a token are one with each number of a matrix; with a share of
    those of experts, and none with what is looked up before the layers. Attention costs all layers the same.
    """
    config = model.config.get_text_config()
    experts = max(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1, 1)
    active = (getattr(config, "num_experts_per_tok", None) or 1) / experts
    sizes, products = [0.0] * (anatomy.layers + 2), [0.0] * (anatomy.layers + 2)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place = anatomy.place(name)
        unit = 0 if name in anatomy.before else anatomy.layers + 1
        unit = unit if place is None else place + 1
        sizes[unit] += parameter.numel()
        if unit and parameter.ndim > 1:
            products[unit] += parameter.numel() * (active if parameter.ndim == 3 and experts > 1 else 1.0)
    costs = [size / sum(sizes) + product / sum(products) for size, product in zip(sizes, products, strict=True)]
    return costs[0], costs[1:-1], costs[-1]


def _balanced(before: float, layers: list[float], after: float, stages: int) -> list[range]:
    """Neighbouring layers for each stage, at least one, so that the dearest stage is as cheap as can be."""
    sums = [0.0]
    for layer in layers:
        sums.append(sums[-1] + layer)

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)

    # best[stop]: (the dearest of the stages up to here, where they begin), if they take the layers before `stop`
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        left = stages - stage - 1
        best = {
            stop: min(
                (max(dearest, cost(stage, start, stop)), [*starts, start])
                for start, (dearest, starts) in best.items()
                if start < stop
            )
            for stop in (range(stage + 1, len(layers) - left + 1) if left else [len(layers)])
        }
    starts = best[len(layers)][1]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(layers)], strict=True)]
