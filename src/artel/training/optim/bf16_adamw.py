"""Weights in bf16 (`train.weights: bf16`): each step is computed in float32 and rounded stochastically.

A bf16 number has 8 significant bits: a step of less than 1/512 of a weight is lost when rounded to the nearest.
Stochastic rounding, up or down with a probability proportional to the distance, is right on average (Gupta et al. 2015,
arXiv:1502.02551). AdamW's two averages stay float32, since at a decay of 0.999 bf16 would also lose their updates.
This takes 10 bytes per weight, 12 with its gradient; float32 weights take 12 and 16.

torchao's `_AdamW(bf16_stochastic_round=True)` is not used: it is private, compiles itself for each shape of parameter,
keeps the averages in bf16, and shares its random generator with dropout. That generator differs between processes, so
replicas would drift apart.
"""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch.optim.adamw import adamw
from transformers import PreTrainedModel


def hold_in_bf16(model: PreTrainedModel) -> None:
    """Round all weights to bf16 in place, frozen ones too; buffers (rotary angles) keep their precision."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def round_to_bf16(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round each float32 number to one of its two bf16 neighbours, at random, so that its expected value is kept.

    bf16 is the upper half of float32: a random number of 16 bits, added to the lower half, carries into the upper one
    with exactly that probability, away from zero for either sign.
    """
    noise = torch.randint(0, 1 << 16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    return ((values.view(torch.int32) + noise) & -65536).view(torch.float32).to(torch.bfloat16)


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) for bf16 parameters, with float32 averages.

    The rounding depends only on `seed`, the parameter and its step number: it is the same on all ranks, and when a run
    resumes. Gradients are divided by `grad_scale` as in PyTorch's fused optimizers. There is no `found_inf`, since
    fp16 cannot be combined with bf16 weights.
    """

    _step_supports_amp_scaling = True  # tells PyTorch that this optimizer divides the gradients itself

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float, seed: int) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})
        self.grad_scale: torch.Tensor | None = None
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        members = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for index, (parameter, group) in enumerate(members):
            if parameter.grad is not None:
                self._step(index, parameter, group)

    def _step(self, index: int, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        weight = parameter.float()
        adamw(
            [weight],
            [parameter.grad.float()],  # type: ignore[union-attr]  # only called if there is one
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [torch.full((), float(state["step"]), device=weight.device)],
            fused=True,
            grad_scale=self.grad_scale,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        state["step"] += 1
        seed = xxhash.xxh3_64_intdigest(f"rounding:{self._seed}:{index}:{state['step']}".encode()) >> 1
        generator = torch.Generator(weight.device).manual_seed(seed)
        parameter.copy_(round_to_bf16(weight, generator))
