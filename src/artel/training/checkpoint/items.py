"""The items of a checkpoint: the tensors that a run saves and resumes from.

An item has named tensors, saves and loads them, and tells which of them are weights of an exported model. To add an
item, write a class and list it in `ITEMS`. A callback's state is saved if the callback has `state_dict` and
`load_state_dict`, as stateful objects in PyTorch have (`torch.distributed.checkpoint.stateful.Stateful`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch.distributed.checkpoint.stateful import Stateful

from artel.errors import InputError, WorkError
from artel.parallel import OptimizerProtocol
from artel.training.optim.averages import AVERAGE, STEPS
from artel.training.optim.local_shards import Shapes
from artel.training.optim.optimizer import Optimizer

Tensors = dict[str, torch.Tensor]


class CheckpointItem(ABC):
    """An item of a run's state. A stored tensor belongs to the last of `ITEMS` that owns its name."""

    file: ClassVar[str]
    """Name of its file without suffix, if one process writes the checkpoint. Items may share a file."""
    is_sharded: ClassVar[bool] = True
    """True if each rank saves its own shards. False if rank 0 saves its tensors, and all ranks load them."""

    def __init__(self, optimizer: OptimizerProtocol, callbacks: Iterable[object]) -> None:
        self._optimizer = optimizer

    @classmethod
    @abstractmethod
    def owns(cls, name: str) -> bool:
        """True if `name` is one of its tensors."""

    @classmethod
    def weight_name(cls, name: str) -> str | None:
        """Return the weight of an exported model that a stored tensor is, or None. Later items replace earlier ones."""
        return None

    @abstractmethod
    def state(self) -> Tensors:
        """Return this rank's tensors by name, without copying them. Shards are DTensors."""

    def allocate(self, shapes: Shapes) -> Tensors:
        """Return memory for this rank's shards of the stored tensors, to be filled and passed to `load`."""
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}

    @abstractmethod
    def load(self, tensors: Tensors) -> None:
        """Load the tensors that `state` returned."""


class Weights(CheckpointItem):
    """The model's trained parameters and persistent buffers."""

    file = "model"

    @classmethod
    def owns(cls, name: str) -> bool:
        return True

    @classmethod
    def weight_name(cls, name: str) -> str | None:
        return name

    def state(self) -> Tensors:
        return self._optimizer.weights()

    def allocate(self, shapes: Shapes) -> Tensors:
        return super().allocate(shapes) if self._optimizer.saves_collectively else self._optimizer.weights()

    def load(self, tensors: Tensors) -> None:
        self._optimizer.load_weights(tensors)


class OptimizerState(CheckpointItem):
    """The optimizer's state by `parameter|state`, and the loss scale."""

    file = "optimizer"

    @classmethod
    def owns(cls, name: str) -> bool:
        return "|" in name

    def state(self) -> Tensors:
        return self._optimizer.state()

    def allocate(self, shapes: Shapes) -> Tensors:
        optimizer = self._optimizer
        return optimizer.allocate_state(shapes) if isinstance(optimizer, Optimizer) else super().allocate(shapes)

    def load(self, tensors: Tensors) -> None:
        self._optimizer.load(tensors)


class Averages(CheckpointItem):
    """The averages of the weights (`train.ema`), which an exported model has in place of the weights."""

    file = "optimizer"

    def __init__(self, optimizer: OptimizerProtocol, callbacks: Iterable[object]) -> None:
        self._averages = optimizer.averages if isinstance(optimizer, Optimizer) else None

    @classmethod
    def owns(cls, name: str) -> bool:
        return name.endswith((f"|{AVERAGE}", f"|{STEPS}"))

    @classmethod
    def weight_name(cls, name: str) -> str | None:
        return name.removesuffix(f"|{AVERAGE}") if name.endswith(f"|{AVERAGE}") else None

    def state(self) -> Tensors:
        return {} if self._averages is None else self._averages.state()

    def allocate(self, shapes: Shapes) -> Tensors:
        return {} if self._averages is None else self._averages.allocate(shapes)

    def load(self, tensors: Tensors) -> None:
        if self._averages is not None:
            self._averages.load(tensors)


class CallbackStates(CheckpointItem):
    """The states of callbacks that have one, by `callbacks/class/name`."""

    file = "callbacks"
    is_sharded = False

    def __init__(self, optimizer: OptimizerProtocol, callbacks: Iterable[object]) -> None:
        """Raise InputError if two callbacks with a state have the same name: their states would be mixed up."""
        self._callbacks: dict[str, Stateful] = {}
        for callback in callbacks:
            if isinstance(callback, Stateful):
                name = type(callback).__name__
                if name in self._callbacks:
                    message = f"two callbacks are named {name}, but both have state to save"
                    raise InputError.at("callbacks", message, "rename one of the classes")
                self._callbacks[name] = callback

    @classmethod
    def owns(cls, name: str) -> bool:
        return name.startswith("callbacks/")

    def state(self) -> Tensors:
        """Return the tensors of all callbacks. Raise WorkError if a state has anything but tensors."""
        tensors: Tensors = {}
        for name, callback in self._callbacks.items():
            for key, tensor in callback.state_dict().items():
                if not isinstance(tensor, torch.Tensor):
                    message = f"{key} of its state_dict is of type {type(tensor).__name__}"
                    raise WorkError.at(f"callbacks: {name}", message, "return tensors by name: torch.tensor(…)")
                tensors[f"callbacks/{name}/{key}"] = tensor
        return tensors

    def load(self, tensors: Tensors) -> None:
        """Pass each callback its state. A callback without a state in the checkpoint stays unchanged."""
        for name, callback in self._callbacks.items():
            prefix = f"callbacks/{name}/"
            state = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            if state:
                callback.load_state_dict(state)


ITEMS: tuple[type[CheckpointItem], ...] = (Weights, OptimizerState, Averages, CallbackStates)
FIRST_RANK_FILES = frozenset(item.file for item in ITEMS if not item.is_sharded)


def checkpoint_items(optimizer: OptimizerProtocol, callbacks: Iterable[object] = ()) -> list[CheckpointItem]:
    """Return the items of a run. Raise InputError if two callbacks with a state have the same name."""
    return [item(optimizer, callbacks) for item in ITEMS]


def collect_states(items: Iterable[CheckpointItem]) -> dict[str, Tensors]:
    """Return the tensors of all items by file. Collective if the optimizer gathers full tensors."""
    by_file: dict[str, Tensors] = {}
    for item in items:
        by_file.setdefault(item.file, {}).update(item.state())
    return {file: tensors for file, tensors in by_file.items() if tensors or file not in FIRST_RANK_FILES}


def find_item(name: str) -> type[CheckpointItem]:
    """Return the item that a stored tensor belongs to."""
    return next(item for item in reversed(ITEMS) if item.owns(name))


def exported_tensors(stored: Iterable[str]) -> dict[str, str]:
    """Map each weight of an exported model to its stored tensor, given the names of all stored tensors."""
    names = [(find_item(name), name) for name in stored]
    return {
        weight: name
        for item in ITEMS
        for owner, name in names
        if owner is item and (weight := item.weight_name(name)) is not None
    }
