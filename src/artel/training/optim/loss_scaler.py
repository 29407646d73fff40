"""Loss scaling for fp16 (Micikevicius et al. 2018), so that small gradients do not underflow.

The loss is multiplied by a scale before the backward pass, and the optimizer divides the gradients by it. If they are
infinite, the step is skipped and the scale halved. After 2,000 good steps it is doubled. PyTorch's GradScaler does the
same, but makes the host wait for the device in each step of an optimizer that is not fused. `LossScale` never does.
"""

from __future__ import annotations

import torch

_START = 65536.0
_GROWTH, _BACKOFF = 2.0, 0.5
_GROWTH_EVERY = 2000
_SCALE, _GOOD_STEPS = "loss_scale|scale", "loss_scale|good_steps"


class LossScale:
    """The loss scale. No method waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), _START, device=device)
        """Factor of the loss: float32, a scalar on the device."""
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def divisor(self, clip_divisor: torch.Tensor) -> torch.Tensor:
        """Return the divisor for gradients of the scaled loss, from `clip_divisor`, the one for unscaled gradients."""
        return clip_divisor * self.scale

    def overflow_flag(self, norm: torch.Tensor) -> torch.Tensor:
        """Return 1.0 on the device if the gradient norm is infinite or NaN, else 0.0. 1.0 makes the step a no-op."""
        return (~torch.isfinite(norm)).float()

    def update(self, found_inf: torch.Tensor) -> None:
        """Update the scale after a step. `found_inf`: result of `overflow_flag` in that step."""
        torch._amp_update_scale_(self.scale, self._good_steps, found_inf, _GROWTH, _BACKOFF, _GROWTH_EVERY)

    def has_collapsed(self) -> torch.Tensor:
        """Return a bool on the device: True if the scale is below 1, which fp16's narrow range does not explain.

        From its initial value, this takes 17 consecutive steps with infinite or NaN gradients.
        """
        return self.scale < 1

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state under names like those of optimizer tensors, to be saved with them."""
        return {_SCALE: self.scale, _GOOD_STEPS: self._good_steps}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Load the scale, and remove it from `state`, which may also contain an optimizer's tensors.

        A checkpoint written by DeepSpeed may have no scale; it is then the initial one.
        """
        self.scale.copy_(state.pop(_SCALE, torch.tensor(_START)))
        self._good_steps.copy_(state.pop(_GOOD_STEPS, torch.tensor(0)))
