"""The optimizer of a run: clips gradients, steps the weights, and saves its state as named tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from artel.config import TrainConfig
from artel.errors import InputError, Problem, missing_extra
from artel.models.compile import repeated_layers
from artel.registry import OPTIMIZERS
from artel.training.optim.averages import WeightAverages
from artel.training.optim.bf16_adamw import RoundedAdamW
from artel.training.optim.local_shards import LocalShard, Shapes, trained_tensors
from artel.training.optim.loss_scaler import LossScale
from artel.training.optim.muon import iteration_dtype
from artel.training.optim.parameter_groups import lr_fractions, parameter_groups, weight_matrices
from artel.training.optim.specs import Groups, OptimizerSpec


def check_optimizer(train: TrainConfig) -> None:
    """Raise InputError if the optimizer is not installed, or if bf16 weights do not work with the other settings."""
    spec: OptimizerSpec = OPTIMIZERS[train.optimizer]
    if spec.package and find_spec(spec.package) is None:
        raise missing_extra(spec.package, spec.extra, f"train.optimizer: {train.optimizer}")
    if train.weights != "bf16":
        return
    problems = []
    if train.ema is not None:
        message = "an average of bf16 weights would lose its small steps"
        problems.append(Problem("train.ema", message, "set train.weights: fp32, or remove it"))
    if not spec.stochastic_rounding:
        message = f"bf16 would lose small steps of {train.optimizer}: only adamw's are rounded stochastically"
        problems.append(Problem("train.weights", message, "write train.optimizer: adamw, or train.weights: fp32"))
    if train.precision in ("fp32", "fp16"):
        message = f"bf16 weights do not compute in {train.precision}"
        problems.append(Problem("train.weights", message, "write train.precision: bf16, or train.weights: fp32"))
    if problems:
        raise InputError(problems)


def clip_divisor(norm: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    """Return the divisor that limits the gradient norm to `max_norm`: float32, a scalar on the device.

    The reciprocal of torch.nn.utils.clip_grads_with_norm_'s coefficient, min(1, max_norm / (norm + 1e-6)).
    """
    if max_norm is None:
        return torch.ones_like(norm, dtype=torch.float32)
    return ((norm.float() + 1e-6) / max_norm).clamp(min=1)


def state_bytes(model: PreTrainedModel, train: TrainConfig, on: torch.device | None = None) -> int:
    """Return the bytes of optimizer state, allocated in the first step.

    With `on`, count only this process's shards on that device.
    """
    spec: OptimizerSpec = OPTIMIZERS[train.optimizer]
    matrices = _layer_matrices(model, spec)
    state_per_number = spec.state_bytes(train)
    average = 4.0 if train.ema is not None else 0.0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    counts = [p.numel() if on is None else _count_on(on, p) for p in trained]
    bytes_per_number = [average + (spec.matrix_bytes if p in matrices else state_per_number) for p in trained]
    return round(sum(map(operator.mul, counts, bytes_per_number)))


def _count_on(device: torch.device, parameter: torch.Tensor) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() if local.device.type == device.type else 0


def optimizer_factory(model: PreTrainedModel, train: TrainConfig, seed: int) -> Callable[[], torch.optim.Optimizer]:
    """Return a function that builds PyTorch's adamw or sgd, for an engine that steps it.

    The groups hold the current parameters, which may be on the meta device. The function uses their values at the time
    of its call.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fractions, decaying = lr_fractions(model, train.layer_decay), weight_matrices(model)
    groups = parameter_groups(trained, fractions, train.learning_rate, train.weight_decay, decaying)
    return partial(OPTIMIZERS[train.optimizer].build, groups, train, seed)


class Optimizer:
    """One or two optimizers of PyTorch, stepped together; each group's peak learning rate follows one schedule.

    `seed` seeds the stochastic rounding of bf16 weights. `precision` is the run's. Adafactor makes the host wait for
    the device at each parameter, to read its norm. bitsandbytes' AdamW8bit makes it wait after each parameter. Other
    optimizers wait only in the cases described in `step`.
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
        self._max_norm = train.clip.limit if train.clip and train.clip.by == "norm" else None
        self._max_value = train.clip.limit if train.clip and train.clip.by == "value" else None
        self._model = model
        matrices = _layer_matrices(model, OPTIMIZERS[train.optimizer])
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._shards = [LocalShard(name, parameter, takes_dtensor=parameter in matrices) for name, parameter in trained]
        self.averages = None if train.ema is None else WeightAverages(model, self._shards, train.ema)
        """The averages of the weights (`train.ema`), if the run keeps them."""
        self._by_stepped = {shard.stepped: shard for shard in self._shards}
        stepped = {shard.parameter: shard.stepped for shard in self._shards}
        self._optimizers = _build_optimizers(model, train, seed, matrices, stepped, precision)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]

    @property
    def loss_factor(self) -> torch.Tensor | None:
        """Factor of the loss before the backward pass: a scalar on the device, or None."""
        return None if self.loss_scale is None else self.loss_scale.scale

    def clip_and_step(
        self, rate: float, norm: torch.Tensor, *, guarded: bool = False, spike: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip the gradients and step at `rate` times the peak learning rate. `norm`: gradient norm before clipping.

        Return (norm without the loss factor, True if the step was good), scalars on the device. A step is bad if its
        norm is not finite, or if the caller calls it a `spike`. With `guarded`, a bad step changes nothing.

        With a loss scale, a step with an infinite norm is skipped and the scale halved. It counts as good until halving
        no longer helps. A spike is also skipped, but does not change the scale.
        """
        if self._max_value is not None:
            self._clip_values(self._max_value)
        if self.loss_scale is None:
            is_good = torch.isfinite(norm) & (not spike)
            self.step(rate, clip_divisor(norm, self._max_norm), (~is_good).float() if guarded else None)
            return norm, is_good
        norm = norm / self.loss_scale.scale
        found_inf = self.loss_scale.overflow_flag(norm)
        divisor = self.loss_scale.divisor(clip_divisor(norm, self._max_norm))
        self.step(rate, divisor, found_inf.clamp(min=float(spike)))
        self.loss_scale.update(found_inf)
        return norm, ~self.loss_scale.has_collapsed() & (not spike)

    def step(self, rate: float, divisor: torch.Tensor | None = None, found_inf: torch.Tensor | None = None) -> None:
        """Step at `rate` times the peak learning rate, and clear the gradients.

        Gradients are divided by `divisor` (float32, a scalar on the device): in the kernels of adamw and sgd, in a
        separate pass for other optimizers. If `found_inf` is 1.0, not 0.0, neither parameters nor state change. adamw
        and sgd read it on the device; for other optimizers the host waits to read it. If weights are offloaded to the
        CPU, both are copied there, and the host waits for the copy.
        """
        if found_inf is not None and not all(map(_honors_found_inf, self._optimizers)) and bool(found_inf):
            self._clear_grads()
            return
        for shard in self._shards:
            shard.refresh()
        for optimizer in self._optimizers:
            device = optimizer.param_groups[0]["params"][0].device  # the CPU if weights are offloaded
            if divisor is not None:
                divisor = divisor.to(device)
            if found_inf is not None:
                found_inf = found_inf.to(device)
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            if _divides_by_grad_scale(optimizer):
                optimizer.grad_scale, optimizer.found_inf = divisor, found_inf  # type: ignore[attr-defined]
            elif divisor is not None:
                gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                # Local shards: split and unsplit matrices are on different meshes.
                shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
                torch._foreach_div_(shards, divisor)
            optimizer.step()
        if self.averages is not None:
            self.averages.update(found_inf)
        self._clear_grads()

    def averaged(self) -> AbstractContextManager[None]:
        """Give the model the averages of its weights (`train.ema`) inside the block, if there are any."""
        return nullcontext() if self.averages is None else self.averages.in_model()

    def _clip_values(self, limit: float) -> None:
        """Clip each element of the gradients at `limit` times the loss scale, which they still contain."""
        for shard in self._shards:
            if (gradient := shard.parameter.grad) is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                factor = torch.ones(()) if self.loss_scale is None else self.loss_scale.scale
                bound = limit * factor.to(local.device)
                torch.clamp(local, -bound, bound, out=local)

    def _clear_grads(self) -> None:
        for shard in self._shards:
            shard.clear_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters and saved buffers by name; DTensors if the model is sharded."""
        return trained_tensors(self._model)

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Load the result of `weights`."""
        with torch.no_grad():
            for name, tensor in self.weights().items():
                tensor.copy_(weights[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state by `parameter name|state name`. Numbers become float64 tensors."""
        state = {}
        for optimizer in self._optimizers:
            for parameter, values in optimizer.state.items():
                for key, value in values.items():
                    if value is not None and key not in _TABLES:
                        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
                        shard = self._by_stepped[parameter]  # type: ignore[index]  # the keys are parameters
                        state[f"{shard.name}|{key}"] = shard.to_global(tensor)
        return state if self.loss_scale is None else state | self.loss_scale.state()

    def allocate_state(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        """Return memory for this rank's shards of a state with these shapes, to be filled and passed to `load`."""
        shards = {shard.name: shard for shard in self._shards}
        state = {}
        for name, (shape, dtype) in shapes.items():
            parameter_name, _, key = name.rpartition("|")
            if key and parameter_name in shards:
                state[name] = shards[parameter_name].allocate(shape, dtype)
            elif self.loss_scale is not None and name in self.loss_scale.state():
                state[name] = torch.empty(shape, dtype=dtype)
        return state

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Load the result of `state` for the same model and optimizer. Shards a full state.

        The previous state is discarded, including entries that `state` does not have.
        """
        state = dict(state)
        for optimizer in self._optimizers:
            optimizer.state.clear()
        if self.loss_scale is not None:
            self.loss_scale.load(state)
        shards = {shard.name: shard for shard in self._shards}
        owner = {
            parameter: optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, tensor in state.items():
            parameter_name, _, key = name.rpartition("|")
            if parameter_name not in shards:  # it belongs to another pipeline stage
                continue
            shard = shards[parameter_name]
            parameter, tensor = shard.stepped, shard.to_local_value(tensor)
            values = owner[parameter].state[parameter]
            if tensor.dtype == torch.float64 and tensor.ndim == 0:
                values[key] = int(tensor)
            elif key == "step" and not owner[parameter].defaults.get("fused"):
                values[key] = tensor  # PyTorch keeps its step count on the CPU unless the optimizer is fused
            else:
                values[key] = tensor.to(parameter.device)
        for optimizer in self._optimizers:
            _add_tables(optimizer)


# Values of the 8-bit codes. bitsandbytes keeps one table for all parameters, and the state of each refers to it.
_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}


def _add_tables(optimizer: torch.optim.Optimizer) -> None:
    for parameter, values in optimizer.state.items():
        if "absmax1" in values:
            for key, table in _TABLES.items():
                optimizer.name2qmap[table] = optimizer.name2qmap[table].to(parameter.device)  # type: ignore[attr-defined]
                values[key] = optimizer.name2qmap[table]  # type: ignore[attr-defined]


def _divides_by_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer divides gradients by its `grad_scale`. PyTorch marks such optimizers."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def _honors_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer also respects `found_inf`, as all marked optimizers of PyTorch do."""
    return _divides_by_grad_scale(optimizer) and not isinstance(optimizer, RoundedAdamW)


def _layer_matrices(model: PreTrainedModel, spec: OptimizerSpec) -> set[torch.Tensor]:
    """Return the matrices of the layers, if the optimizer has a separate step for them."""
    if spec.build_for_matrices is None:
        return set()
    matrices = weight_matrices(model)
    layer_parameters = {parameter for layer in repeated_layers(model) for parameter in layer.parameters()}
    return {parameter for parameter in layer_parameters & matrices if parameter.ndim == 2}


def _build_optimizers(
    model: PreTrainedModel,
    train: TrainConfig,
    seed: int,
    matrices: set[torch.Tensor],
    stepped: dict[nn.Parameter, nn.Parameter],
    precision: str,
) -> list[torch.optim.Optimizer]:
    spec: OptimizerSpec = OPTIMIZERS[train.optimizer]
    fractions, decaying = lr_fractions(model, train.layer_decay), weight_matrices(model)

    def groups(parameters: list[nn.Parameter], peak: float) -> Groups:
        groups_of_model = parameter_groups(parameters, fractions, peak, train.weight_decay, decaying)
        return [{**group, "params": [stepped[parameter] for parameter in group["params"]]} for group in groups_of_model]

    layer_matrices = [parameter for parameter in stepped if parameter in matrices]
    other_parameters = [parameter for parameter in stepped if parameter not in matrices]
    optimizers: list[torch.optim.Optimizer] = []
    if other_parameters:
        optimizers.append(spec.build(groups(other_parameters, train.learning_rate), train, seed))
    if layer_matrices and spec.build_for_matrices is not None:
        dtype = iteration_dtype(precision, layer_matrices[0].device)
        optimizers.append(spec.build_for_matrices(groups(layer_matrices, train.muon_learning_rate), dtype))
    return optimizers
