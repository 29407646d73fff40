"""What a pass through the model that failed midway has left behind."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from torch import nn
from torch.distributed.fsdp import FSDPModule


def forget_failed_pass(model: nn.Module, within: Iterable[nn.Module] | None = None) -> None:
    """After an error within forward or backward: drop gradients, and what fully_shard remembers of the pass.

    Else it would take the next backward pass for the rest of this one, and exchange no gradients. `within` are the
    modules that the pass went through, where they are not the model itself: the stages of a pipeline, each of which is
    the outermost that fully_shard knows.
    """
    model.zero_grad(set_to_none=True)
    for module in [model] if within is None else within:
        _reset_roots(module)


def _reset_roots(module: nn.Module) -> None:
    if not isinstance(module, FSDPModule):
        for child in module.children():
            _reset_roots(child)
    elif hasattr(module, "reset_iter_state"):  # since PyTorch 2.13
        with suppress(AttributeError):  # no pass has begun yet: there is nothing that it could remember
            module.reset_iter_state()
