"""DeepSpeed as a parallel strategy: its engine shards weights, gradients and optimizer state.

The engine divides gradients by the number of processes, clips them, scales the fp16 loss and takes the steps. The
strategy undoes the division, to get the gradient of the mean loss over all targets of the global batch. Its optimizer
only sets the learning rate of each step and leaves the rest to the engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models.device import autocast_dtype
from artel.models.loading.materialize import WeightLoader
from artel.models.output_head import output_head
from artel.models.quantization import make_shardable
from artel.objectives import Objective
from artel.parallel.base import InForward, Strategy, sharded_norm
from artel.parallel.deepspeed.config import ResolvedConfig, read_deepspeed
from artel.parallel.deepspeed.state import full_state, full_weights, load_state, load_weights
from artel.parallel.mesh import ParallelDims
from artel.parallel.process_group import World, local_device

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


T = TypeVar("T")


class DeepSpeedPlan:
    """The plan for a user's DeepSpeed file. See `ParallelPlan`."""

    reason_not_compiled = "parallel.deepspeed"  # the engine hooks into uncompiled layers
    full_matrices = True  # config.py itself refuses optimizers that DeepSpeed cannot step
    splits_layers = False
    splits_sequences = False

    def __init__(self, resolved: ResolvedConfig) -> None:
        self._resolved = resolved
        self.precision = resolved.precision
        self.micro_batch = resolved.micro_batch
        self.notes = resolved.notes

    @classmethod
    def read(cls, config: RunConfig, world_size: int, on_host: int) -> DeepSpeedPlan:
        """Return the plan for `world_size` processes. Raise InputError with all conflicts between file and run."""
        file = config.parallel.deepspeed
        assert file is not None
        problems = []
        reason = "DeepSpeed's engine runs the optimizer itself"
        fix = "remove it, or remove parallel.deepspeed"
        if config.train.on_bad_step != "stop":
            problems.append(Problem("train.on_bad_step", f"{config.train.on_bad_step}: {reason}", fix))
        if config.train.spike is not None:
            problems.append(Problem("train.spike", f"{config.train.spike:g}: {reason}", fix))
        if config.train.budget is not None:
            what = "DeepSpeed's engine is given the number of steps beforehand"
            problems.append(Problem("train.budget", what, "set train.steps, or remove parallel.deepspeed"))
        try:
            resolved = read_deepspeed(file, config, world_size, local_device())
        except InputError as error:
            raise InputError([*error.problems, *problems]) from None
        if problems:
            raise InputError(problems)
        return cls(resolved)

    @property
    def shards_weights(self) -> bool:
        return self._resolved.stage == 3

    def problems(self, model: PreTrainedModel, *, block: int, objective: str, documents: bool) -> list[Problem]:
        return []

    def parallelize(
        self,
        model: PreTrainedModel,
        objective: Objective,
        world: World,
        precision: str,
        *,
        load_weights: WeightLoader | None,
    ) -> DeepSpeedStrategy:
        if self.shards_weights:
            make_shardable(model)
        return DeepSpeedStrategy(model, objective, world, self._resolved, load_weights)


class DeepSpeedStrategy(Strategy):
    """Every process runs a fraction of each global batch, and holds the shards of the model that the ZeRO stage
    defines.

    The model stays unchanged until `own_optimizer` is called. Before that, micro-batches can be tried and layers
    wrapped. Then `weight_loader` loads a model on the meta device (stage 3), and each weight is sharded as soon as it
    is loaded.
    """

    engine: DeepSpeedEngine

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        world: World,
        resolved: ResolvedConfig,
        weight_loader: WeightLoader | None = None,
    ) -> None:
        super().__init__(model, objective, world, resolved.precision, ParallelDims("ddp", dp_replicate=world.size))
        self._resolved = resolved
        self._weight_loader = weight_loader
        self._module = InForward(model)
        self._started = False

    @property
    def holds_full_model(self) -> bool:
        return False

    @property
    def can_run_full_model(self) -> bool:
        return self._started or self._weight_loader is None

    @property
    def can_probe_memory(self) -> bool:
        # In stage 3 the full model need not fit. Once the engine has the model, a backward pass communicates.
        return self._resolved.stage < 3 and not self._started

    def own_optimizer(
        self, make: Callable[[], torch.optim.Optimizer], micro_batch: int, steps: int | None
    ) -> DeepSpeedOptimizer:
        """Pass the model and the optimizer from `make` to DeepSpeed's engine, which takes the steps from then on.

        Raise InputError if the file asks for something that DeepSpeed or the model cannot do.
        """
        assert steps is not None  # DeepSpeedPlan.read refuses a budget
        settings = self._resolved.complete(self.model.config, steps, micro_batch)
        _prepare_environment(self._world)
        if self._weight_loader is not None:
            self._load_sharded(self._weight_loader, settings)
        optimizer = make()
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
        optimizer.state.clear()  # existing state belongs to parameters that DeepSpeed replaces
        import deepspeed

        with _input_errors(self._resolved.file):
            self.engine = deepspeed.initialize(model=self._module, optimizer=optimizer, config=settings)[0]
        self._started = True
        self.disable_autocast()  # DeepSpeed holds the weights themselves in this precision
        self.with_full_model(output_head)  # now, not within the first step
        return DeepSpeedOptimizer(self.engine, optimizer, self._world.device)

    def _load_sharded(self, load_weights: WeightLoader, settings: dict[str, Any]) -> None:
        """Load the weights, and shard each over the processes before the next one is loaded.

        DeepSpeed's zero.Init expects a model that initializes its own weights. This calls it for each loaded parameter
        instead. It broadcasts the values of the first process, so only that process reads them.
        """
        import deepspeed

        dtype = autocast_dtype(self._resolved.precision) or torch.float32
        first: list[nn.Parameter] = []

        def shard(parameter: nn.Parameter) -> None:
            if dtype != torch.float32:  # in float32, the base model under adapters may be in bf16
                parameter.data = parameter.data.to(dtype)
            if first:
                first[0].convert_to_zero_parameters(param_list=[parameter])  # type: ignore[attr-defined]
                return
            with _input_errors(self._resolved.file):
                deepspeed.zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=settings)
            first.append(parameter)

        load_weights(self.model, device=self._world.device, on_parameter=shard, read_values=self._world.first)

    def with_full_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        # In a tuple: DeepSpeed searches the output of a forward pass for tensors, and supports only a few types.
        return self._on_model(lambda model: (work(model),))[0]

    def _on_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        result: T = (self.engine if self._started else self._module)(work)
        return result

    def _backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def _loss_multiplier(self, targets: float) -> float:
        return (self._world.size if self.engine.gradient_average else 1) / targets

    def _gradient_sync(self, last: bool) -> AbstractContextManager[object]:
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self._resolved.stage < 3:
            return super().norm_of(tensors)
        return sharded_norm(map(self._stage_3_shard, tensors.values()), self._world.device)

    def _stage_3_shard(self, tensor: Any) -> tuple[torch.Tensor, int]:
        """Return this process's shard of a parameter, without padding. Other tensors are full on all processes."""
        if not hasattr(tensor, "ds_tensor"):
            return tensor, self._world.size
        shard: torch.Tensor = tensor.ds_tensor.flatten()
        return shard[: max(0, tensor.ds_numel - shard.numel() * self._world.rank)], 1

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm. NaN under ZeRO: the engine computes it, and `clip_and_step` returns it."""
        if self._resolved.stage == 0:
            return super().gradient_norm()
        return torch.full((), torch.nan, device=self._world.device)

    @contextmanager
    def generating(self) -> Iterator[bool]:
        yield self._world.first or self._resolved.stage == 3  # in stage 3 a forward pass gathers weights from all ranks


class DeepSpeedOptimizer:
    """DeepSpeed's engine as an optimizer. The engine has its own loss scale for fp16."""

    loss_factor: None = None
    saves_collectively = True

    def __init__(self, engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._device = device

    def clip_and_step(
        self, rate: float, norm: torch.Tensor, *, guarded: bool = False, spike: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip gradients and take one step. See `OptimizerProtocol.clip_and_step`. `norm` is used without ZeRO only.

        Under ZeRO, gradients that are not finite leave the weights unchanged. With a dynamic loss scale such a step is
        good, until a smaller scale does not help. Runs with DeepSpeed are never `guarded` and do not detect spikes.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        collapsed = False
        try:
            self._engine.step()
        except Exception as error:  # DeepSpeed has no exception class for it
            if "loss scale already at minimum" not in str(error):
                raise
            collapsed = True
        if self._engine.zero_optimization_stage():
            norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=self._device)
        if self._engine.fp16_enabled() and self._engine.dynamic_loss_scale():
            return norm, torch.tensor(not collapsed, device=self._device)
        return norm, torch.isfinite(norm)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return trained parameters and persistent buffers by name, float32, on the CPU of rank 0. Collective.

        Other ranks get an empty dict.
        """
        return full_weights(self._engine)

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext()  # the run file may not ask for averages

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Inverse of `weights`. All ranks must pass the same tensors."""
        load_weights(self._engine, weights)

    def state(self) -> dict[str, torch.Tensor]:
        """Return `parameter name|state name` -> full tensor, on the CPU of rank 0. Collective.

        Other ranks get an empty dict. Names and shapes are the same as in a run on one process.
        """
        return full_state(self._engine, self._optimizer)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Inverse of `state`. All ranks must pass the same tensors."""
        load_state(self._engine, self._optimizer, state)


def _prepare_environment(world: World) -> None:
    """Set up the environment and the process group that DeepSpeed expects."""
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    if not dist.is_initialized():  # DeepSpeed needs a process group even for one process
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    import deepspeed

    # On a CPU it would compile its own all-reduce for a minute or two, and a killed build leaves a lock that the
    # next run waits for forever. Gloo does not need it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with redirect_stdout(sys.stderr):
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # uses the existing group


@contextmanager
def _input_errors(file: str) -> Iterator[None]:
    """Turn DeepSpeed's own errors about its file into InputError."""
    from deepspeed.runtime.config import DeepSpeedConfigError
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    refusals = (AssertionError, ValueError, NotImplementedError, DeepSpeedConfigError, ZeRORuntimeException)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except refusals as error:
        raise InputError.at(file, f"DeepSpeed does not accept it: {error}", "change what it names") from error
