"""The optimizer of a run, with its state as named tensors; the gradients are clipped as it uses them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from artel.config import TrainConfig
from artel.errors import InputError, Problem, missing_extra
from artel.models.compile import repeated_layers
from artel.training.optim.bf16_adamw import RoundedAdamW
from artel.training.optim.local_shards import Piece, trained_tensors
from artel.training.optim.loss_scaler import LossScale
from artel.training.optim.muon import Muon, iteration_dtype
from artel.training.optim.parameter_groups import layer_shares, parameter_groups


def check_optimizer(train: TrainConfig) -> None:
    """Raise InputError for an optimizer that is not installed, and for bf16 weights with what they do not go with."""
    if train.optimizer == "adamw8bit":
        try:
            import bitsandbytes  # noqa: F401
        except ImportError:
            raise missing_extra("bitsandbytes", "quantize", "train.optimizer: adamw8bit") from None
    if train.weights != "bf16":
        return
    problems = []
    if train.optimizer != "adamw":
        problems.append(
            Problem("train.weights", f"bf16 would lose small steps of {train.optimizer}: only adamw's are rounded "
                    "stochastically", "write train.optimizer: adamw, or train.weights: fp32")
        )  # fmt: skip
    if train.precision in ("fp32", "fp16"):
        problems.append(
            Problem("train.weights", f"bf16 weights do not compute in {train.precision}",
                    "write train.precision: bf16, or train.weights: fp32")
        )  # fmt: skip
    if problems:
        raise InputError(problems)


def clip_divisor(norm: torch.Tensor, largest: float | None) -> torch.Tensor:
    """What gradients of that norm are divided by, so that it is at most `largest`: float32, a scalar on the device.

    The inverse of torch.nn.utils.clip_grads_with_norm_'s coefficient, min(1, largest / (norm + 1e-6)).
    """
    if largest is None:
        return torch.ones_like(norm, dtype=torch.float32)
    return ((norm.float() + 1e-6) / largest).clamp(min=1)


def state_bytes(model: PreTrainedModel, train: TrainConfig) -> int:
    """What the optimizer will hold, in bytes: it takes them with its first step."""
    a_number = {"adamw": 8.0, "adamw8bit": 2.0, "adafactor": 0.1, "muon": 8.0, "sgd": 4.0 if train.momentum else 0.0}
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return int(a_number[train.optimizer] * trained)


class OptimizerProtocol(Protocol):
    """What the loop and a checkpoint ask of what steps a model: `Optimizer`, or an engine of another's."""

    @property
    def loss_factor(self) -> torch.Tensor | None: ...

    def clip_and_step(
        self, rate: float, norm: torch.Tensor, *, guarded: bool = False, spike: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @property
    def saves_collectively(self) -> bool:
        """Whether `weights` and `state` are collected from all processes: whole, and on the first one alone."""
        ...

    def weights(self) -> dict[str, torch.Tensor]: ...

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None: ...

    def state(self) -> dict[str, torch.Tensor]: ...

    def load(self, state: dict[str, torch.Tensor]) -> None: ...


def plain_optimizer(model: PreTrainedModel, train: TrainConfig, seed: int) -> Callable[[], torch.optim.Optimizer]:
    """What makes PyTorch's own, adamw or sgd, for an engine that steps it.

    Its groups go by the parameters as they are now, which may be on the meta device; it is made of what they are then.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = parameter_groups(trained, layer_shares(model, train.layer_decay), train.learning_rate, train.weight_decay)
    return partial(_part, groups, train, seed)


class Optimizer:
    """One or two optimizers of PyTorch, stepped together; each group's peak learning rate follows one schedule.

    `seed` is for the stochastic rounding of bf16 weights, `precision` what the run computes in. Adafactor waits for the
    device at each parameter to read its norm, bitsandbytes' AdamW8bit after each one; the others never do, except as
    `step` says.
    """

    saves_collectively = False

    def __init__(
        self,
        model: PreTrainedModel,
        train: TrainConfig,
        seed: int = 0,
        loss_scale: LossScale | None = None,
        precision: str = "fp32",
    ) -> None:
        self.loss_scale = loss_scale
        self._clip = train.clip
        self._model = model
        matrices = _matrices(model) if train.optimizer == "muon" else set()
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._pieces = [Piece(name, parameter, whole=parameter in matrices) for name, parameter in trained]
        self._by_stepped = {piece.stepped: piece for piece in self._pieces}
        stepped = {piece.parameter: piece.stepped for piece in self._pieces}
        self._parts = _parts(model, train, seed, matrices, stepped, precision)
        for part in self._parts:
            for group in part.param_groups:
                group["peak"] = group["lr"]

    @property
    def loss_factor(self) -> torch.Tensor | None:
        """What the loss must be multiplied by before the backward pass: a scalar on the device, or None."""
        return None if self.loss_scale is None else self.loss_scale.scale

    def clip_and_step(
        self, rate: float, norm: torch.Tensor, *, guarded: bool = False, spike: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step at `rate` times the peak learning rate, with clipped gradients; `norm` is theirs as they are.

        (their norm without the loss factor, whether the step was good), scalars on the device. A step whose norm is not
        finite is bad, and so is one that is told to be a `spike`; where `guarded`, a bad step changes nothing.

        With a loss scale a step whose norm is infinite is left out and the scale halved; it counts as good until that
        does not help. A spike is left out too, and leaves the scale as it is.
        """
        if self.loss_scale is None:
            good = torch.isfinite(norm) & (not spike)
            self.step(rate, clip_divisor(norm, self._clip), (~good).float() if guarded else None)
            return norm, good
        norm = norm / self.loss_scale.scale
        found = self.loss_scale.found_infinite(norm)
        self.step(rate, self.loss_scale.divisor(clip_divisor(norm, self._clip)), found.clamp(min=float(spike)))
        self.loss_scale.update(found)
        return norm, ~self.loss_scale.has_collapsed() & (not spike)

    def step(self, rate: float, divisor: torch.Tensor | None = None, found: torch.Tensor | None = None) -> None:
        """One step at `rate` times the peak learning rate; the gradients are gone afterwards.

        Gradients are divided by `divisor` (float32, a scalar on the device) as they are used: within the kernels of
        adamw and sgd, in a pass of their own for the others. Where `found` is 1.0, not 0.0, nothing changes, neither
        parameters nor state; adamw and sgd see to that on the device, for the others the host waits to read it.
        """
        if found is not None and not all(map(_heeds, self._parts)) and bool(found):
            self._forget_gradients()
            return
        for piece in self._pieces:
            piece.take()
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = group["peak"] * rate
            if _divides(part):
                part.grad_scale, part.found_inf = divisor, found  # type: ignore[attr-defined]
            elif divisor is not None:
                gradients = [p.grad for group in part.param_groups for p in group["params"] if p.grad is not None]
                torch._foreach_div_(gradients, divisor)
            part.step()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for piece in self._pieces:
            piece.forget_gradient()

    def weights(self) -> dict[str, torch.Tensor]:
        """What is trained and saved of the model, by name: this process's pieces, where processes share it."""
        return trained_tensors(self._model)

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """The inverse of `weights`."""
        with torch.no_grad():
            for name, tensor in self.weights().items():
                tensor.copy_(weights[name])

    def state(self) -> dict[str, torch.Tensor]:
        """`parameter name|state name` -> tensor. What an optimizer keeps as a number becomes a float64 tensor."""
        found = {}
        for part in self._parts:
            for parameter, values in part.state.items():
                for key, value in values.items():
                    if value is not None and key not in _TABLES:
                        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
                        piece = self._by_stepped[parameter]  # type: ignore[index]  # the keys are parameters
                        found[f"{piece.name}|{key}"] = piece.to_save(tensor)
        return found if self.loss_scale is None else found | self.loss_scale.state()

    def places(self, shapes: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
        """Where this process's pieces of a state with such tensors are to be read into: what `load` then takes."""
        pieces = {piece.name: piece for piece in self._pieces}
        found = {}
        for name, (shape, dtype) in shapes.items():
            parameter_name, _, key = name.rpartition("|")
            if key and parameter_name in pieces:
                found[name] = pieces[parameter_name].place(shape, dtype)
            elif self.loss_scale is not None and name in self.loss_scale.state():
                found[name] = torch.empty(shape, dtype=dtype)
        return found

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `state`, for the same model and optimizer; of a whole state this process's part is taken.

        What was there before is gone, also where `state` has nothing in its place.
        """
        state = dict(state)
        for part in self._parts:
            part.state.clear()
        if self.loss_scale is not None:
            self.loss_scale.load(state)
        pieces = {piece.name: piece for piece in self._pieces}
        owner = {
            parameter: part for part in self._parts for group in part.param_groups for parameter in group["params"]
        }
        for name, tensor in state.items():
            parameter_name, _, key = name.rpartition("|")
            if parameter_name not in pieces:  # of another stage of a pipeline
                continue
            piece = pieces[parameter_name]
            parameter, tensor = piece.stepped, piece.to_hold(tensor)
            values = owner[parameter].state[parameter]
            if tensor.dtype == torch.float64 and tensor.ndim == 0:
                values[key] = int(tensor)
            elif key == "step" and not owner[parameter].defaults.get("fused"):
                values[key] = tensor  # PyTorch keeps its step count on the CPU unless the optimizer is fused
            else:
                values[key] = tensor.to(parameter.device)
        for part in self._parts:
            _add_tables(part)


# What 8-bit codes mean: bitsandbytes keeps one table for all parameters and refers to it in the state of each.
_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}


def _add_tables(part: torch.optim.Optimizer) -> None:
    for parameter, values in part.state.items():
        if "absmax1" in values:
            for key, table in _TABLES.items():
                part.name2qmap[table] = part.name2qmap[table].to(parameter.device)  # type: ignore[attr-defined]
                values[key] = part.name2qmap[table]  # type: ignore[attr-defined]


def _divides(part: torch.optim.Optimizer) -> bool:
    """Whether an optimizer divides gradients by its `grad_scale`, by PyTorch's own mark."""
    return getattr(part, "_step_supports_amp_scaling", False)


def _heeds(part: torch.optim.Optimizer) -> bool:
    """Whether it also heeds its `found_inf`, as PyTorch's own with that mark do."""
    return _divides(part) and not isinstance(part, RoundedAdamW)


def _matrices(model: PreTrainedModel) -> set[torch.Tensor]:
    """What muon steps."""
    return {parameter for layer in repeated_layers(model) for parameter in layer.parameters() if parameter.ndim == 2}


def _parts(
    model: PreTrainedModel,
    train: TrainConfig,
    seed: int,
    matrices: set[torch.Tensor],
    stepped: dict[nn.Parameter, nn.Parameter],
    precision: str,
) -> list[torch.optim.Optimizer]:
    shares = layer_shares(model, train.layer_decay)

    def groups(parameters: list[nn.Parameter], peak: float) -> list[dict[str, Any]]:
        found = parameter_groups(parameters, shares, peak, train.weight_decay)
        return [{**group, "params": [stepped[parameter] for parameter in group["params"]]} for group in found]

    muons = [parameter for parameter in stepped if parameter in matrices]
    rest = [parameter for parameter in stepped if parameter not in matrices]
    parts: list[torch.optim.Optimizer] = []
    if rest:
        parts.append(_part(groups(rest, train.learning_rate), train, seed))
    if muons:
        dtype = iteration_dtype(precision, muons[0].device)
        parts.append(Muon(groups(muons, train.muon_learning_rate), dtype))
    return parts


def _part(groups: list[dict[str, Any]], train: TrainConfig, seed: int) -> torch.optim.Optimizer:
    betas = (train.betas[0], train.betas[1])
    if train.optimizer == "sgd":
        return _sgd(groups, train.momentum)
    if train.optimizer == "adafactor":
        # Its step is the learning rate (at most 1 / sqrt(step)) times the parameter's root mean square.
        return torch.optim.Adafactor(groups)
    if train.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, betas=betas, eps=train.epsilon)
    if train.weights == "bf16":
        return RoundedAdamW(groups, betas=betas, eps=train.epsilon, seed=seed)
    return torch.optim.AdamW(groups, betas=betas, eps=train.epsilon, fused=True)


def _sgd(groups: list[dict[str, Any]], momentum: float) -> torch.optim.SGD:
    sgd = torch.optim.SGD(groups, momentum=momentum, fused=True)
    if momentum:
        # A fused SGD makes its averages at the first step and leaves them unset where that step is skipped (1e36 was
        # found in them, torch 2.13). Made here they are zero, from where the first step gives the same.
        for parameter in (p for group in sgd.param_groups for p in group["params"]):
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd
