"""The items of a checkpoint: the model's weights, the optimizer's state, and what callbacks keep.

A new item is one line in `CheckpointItems.state`. A callback of a user's own becomes one by having `state_dict` and
`load_state_dict`, as everything with a state has in PyTorch (`torch.distributed.checkpoint.stateful.Stateful`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.checkpoint.stateful import Stateful

from artel.errors import InputError, WorkError
from artel.parallel import OptimizerProtocol

Tensors = dict[str, torch.Tensor]

MODEL, OPTIMIZER, CALLBACKS = "model", "optimizer", "callbacks"


class CheckpointItems:
    """The state that a run saves besides its progress and resumes from."""

    def __init__(self, optimizer: OptimizerProtocol, callbacks: Iterable[object] = ()) -> None:
        """Raises InputError for two callbacks with a state and one name: their states would be mixed up."""
        self.optimizer = optimizer
        self._callbacks: dict[str, Stateful] = {}
        for callback in callbacks:
            if isinstance(callback, Stateful):
                name = type(callback).__name__
                if name in self._callbacks:
                    what = f"two callbacks are named {name}, and both have a state to save"
                    raise InputError.at("callbacks", what, "give their classes different names")
                self._callbacks[name] = callback

    def state(self) -> dict[str, Tensors]:
        """The tensors of each item by name, on each rank that writes. They are the run's own, not copies.

        Parameters of the model may be DTensors. Raises WorkError for a callback's state that is no tensors by name.
        """
        items = {MODEL: self.optimizer.weights(), OPTIMIZER: self.optimizer.state()}
        of_callbacks: Tensors = {}
        for name, callback in self._callbacks.items():
            for key, tensor in callback.state_dict().items():
                if not isinstance(tensor, torch.Tensor):
                    what = f"{key} of its state_dict is of type {type(tensor).__name__}"
                    raise WorkError.at(f"callbacks: {name}", what, "return tensors by name: torch.tensor(…)")
                of_callbacks[f"{CALLBACKS}/{name}/{key}"] = tensor
        return items | {CALLBACKS: of_callbacks} if of_callbacks else items

    def load_callbacks(self, saved: Tensors) -> None:
        """Give each callback its part of a checkpoint; one that the checkpoint does not know stays as it is."""
        for name, callback in self._callbacks.items():
            prefix = f"{CALLBACKS}/{name}/"
            state = {key.removeprefix(prefix): tensor for key, tensor in saved.items() if key.startswith(prefix)}
            if state:
                callback.load_state_dict(state)


def is_of_callback(name: str) -> bool:
    """True if a stored tensor of that name belongs to a callback, not to the model or the optimizer."""
    return name.startswith(f"{CALLBACKS}/")
