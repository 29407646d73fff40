"""Lion: updates by the sign of an averaged gradient (Chen et al. 2023, arXiv:2302.06675)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from artel.config import Number, Section, TrainConfig
from artel.training.optim.specs import Groups, OptimizerSpec

if TYPE_CHECKING:
    import torch


class LionConfig(Section):
    """The average of gradients."""

    betas: list[Annotated[Number, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.99],
        min_length=2,
        max_length=2,
        description="Weight of the past in the update, and in the stored average.",
    )


def _build(groups: Groups, train: TrainConfig, seed: int) -> torch.optim.Optimizer:
    from artel.training.optim.per_parameter import PerParameter

    update_beta, average_beta = train.settings(LionConfig).betas

    def update(parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = parameter.new_zeros(parameter.shape)
        average = state["exp_avg"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(average.lerp(gradient, 1 - update_beta).sign_(), alpha=group["lr"])
        average.lerp_(gradient, 1 - average_beta)

    return PerParameter(groups, update)


LION = OptimizerSpec(
    build=_build,
    summary="Lion: updates by the sign of an averaged gradient",
    state_bytes=lambda train: 4.0,
    other_names=(("lion_32bit|paged_lion_32bit|Lion", ""),),
)
