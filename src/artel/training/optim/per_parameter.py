"""An optimizer defined by a function that updates one parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Update = Callable[[torch.Tensor, torch.Tensor, dict[str, Any], dict[str, Any]], None]


class PerParameter(torch.optim.Optimizer):
    """Calls `update(parameter, gradient, state, group)` for every parameter that has a gradient.

    `state` is a dictionary per parameter, empty at the first step; `group` has `lr` and `weight_decay`.
    """

    def __init__(self, groups: list[dict[str, Any]], update: Update) -> None:
        super().__init__(groups, {})
        self._update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)
