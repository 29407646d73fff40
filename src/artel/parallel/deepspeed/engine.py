"""A global batch run by DeepSpeed's engine, which shares out weights, gradients and optimizer state by its own rules.

The engine divides gradients by the number of processes, clips, scales an fp16 loss and steps by itself. Its layout
undoes the division, so that the gradient is that of the mean over all targets of the global batch, and the optimizer
that belongs to it leaves the rest to the engine: only the learning rate is set from outside, step by step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
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
from artel.parallel.base import InForward, Strategy
from artel.parallel.deepspeed.config.read import read_deepspeed
from artel.parallel.deepspeed.config.resolved import Resolved
from artel.parallel.deepspeed.state import full_state, full_weights, load_state, load_weights
from artel.parallel.mesh import ParallelDims
from artel.parallel.process_group import World, local_device

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


T = TypeVar("T")


class DeepSpeedPlan:
    """A user's DeepSpeed file as a plan; see `ParallelPlan`."""

    not_compiled_because = "parallel.deepspeed"  # the engine takes hold of the layers as they are
    whole_matrices = True  # the file's own check refuses an optimizer that DeepSpeed does not step
    splits_layers = False
    splits_sequences = False

    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self.precision = resolved.precision
        self.micro_batch = resolved.micro_batch
        self.notes = resolved.notes

    @classmethod
    def read(cls, run: RunConfig, world_size: int, on_host: int) -> DeepSpeedPlan:
        """The plan for `world_size` processes. Raises InputError with all that the file and the run disagree on."""
        file = run.parallel.deepspeed
        assert file is not None
        problems = []
        steps_itself, fix = "DeepSpeed's engine steps by itself", "leave it out, or leave parallel.deepspeed out"
        if run.train.on_bad_step != "stop":
            problems.append(Problem("train.on_bad_step", f"{run.train.on_bad_step}: {steps_itself}", fix))
        if run.train.spike is not None:
            problems.append(Problem("train.spike", f"{run.train.spike:g}: {steps_itself}", fix))
        if run.train.budget is not None:
            what = "DeepSpeed's engine is given the number of steps beforehand"
            problems.append(Problem("train.budget", what, "write train.steps, or leave parallel.deepspeed out"))
        try:
            resolved = read_deepspeed(file, run, world_size, local_device())
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
        tell: Callable[[str], None],
    ) -> DeepSpeedStrategy:
        if self.shards_weights:
            make_shardable(model)
        return DeepSpeedStrategy(model, objective, world, self._resolved, load_weights)


class DeepSpeedStrategy(Strategy):
    """Every process takes a share of each global batch, and of the model what ZeRO's stage says.

    Until `own_optimizer` is called it holds the model as it came: micro-batches are tried then, and layers wrapped. A
    model on the meta device, for stage 3, is then given its weights by `weight_loader`, and sharded as they come.
    """

    engine: DeepSpeedEngine

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        world: World,
        resolved: Resolved,
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
        # In stage 3 the whole model is meant not to fit. Once the engine has it, a backward pass speaks to the others.
        return self._resolved.stage < 3 and not self._started

    def own_optimizer(
        self, make: Callable[[], torch.optim.Optimizer], micro_batch: int, steps: int | None
    ) -> DeepSpeedOptimizer:
        """Hand the model and the optimizer that `make` makes to DeepSpeed's engine, which steps from then on.

        Raises InputError where the file asks for what DeepSpeed or its model cannot do.
        """
        assert steps is not None  # DeepSpeedPlan.read refuses a budget
        settings = self._resolved.complete(self.model.config, steps, micro_batch)
        _prepare(self._world)
        if self._weight_loader is not None:
            self._share_out(self._weight_loader, settings)
        optimizer = make()
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
        optimizer.state.clear()  # what was made ahead belongs to parameters that DeepSpeed replaces
        self.engine = _opened(self._resolved.file, self._module, optimizer, settings)
        self._started = True
        self._dtype = None  # DeepSpeed holds the weights themselves in the precision
        self.with_full_model(output_head)  # here, not within the first step
        return DeepSpeedOptimizer(self.engine, optimizer, self._world.device)

    def _share_out(self, load_weights: WeightLoader, settings: dict[str, Any]) -> None:
        """Bring the weights, each shared out over the processes before the next one comes.

        DeepSpeed's zero.Init is made for models that draw their own weights when they are built. Here it is given each
        parameter when it has come; it sends the first process's values to all, so that the others need not read them.
        """
        import deepspeed

        dtype = autocast_dtype(self._resolved.precision) or torch.float32
        shared: list[nn.Parameter] = []

        def share(parameter: nn.Parameter) -> None:
            if dtype != torch.float32:  # else the base beneath adapters may be in bf16
                parameter.data = parameter.data.to(dtype)
            if shared:
                shared[0].convert_to_zero_parameters(param_list=[parameter])  # type: ignore[attr-defined]
                return
            with _refusals(self._resolved.file):
                deepspeed.zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=settings)
            shared.append(parameter)

        load_weights(self.model, device=self._world.device, on_parameter=share, read_values=self._world.first)

    def with_full_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        # In a tuple: DeepSpeed searches what a forward pass returns for tensors, and knows only a few kinds of it.
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

    def norm(self) -> torch.Tensor:
        """Under ZeRO NaN: the engine finds the norm as it steps, and the step returns it."""
        if self._resolved.stage == 0:
            return super().norm()
        return torch.full((), torch.nan, device=self._world.device)

    @contextmanager
    def generating(self) -> Iterator[bool]:
        yield self._world.first or self._resolved.stage == 3  # there a forward pass gathers weights from all


class DeepSpeedOptimizer:
    """What the loop and a checkpoint ask of an optimizer, done by an engine; fp16's loss scale is the engine's own."""

    loss_factor: None = None
    saves_collectively = True

    def __init__(self, engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._device = device

    def clip_and_step(
        self, rate: float, norm: torch.Tensor, *, guarded: bool = False, spike: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step at `rate` times the peak learning rate, with clipped gradients; `norm` counts without ZeRO alone.

        (their norm without the loss scale, whether the step was good), scalars on the device. Under ZeRO gradients that
        are not finite change nothing; with a dynamic loss scale they count as good until a smaller one does not help.
        The engine steps as it does: no run with it is `guarded` or looks for spikes.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        collapsed = False
        try:
            self._engine.step()
        except Exception as error:  # DeepSpeed has no class of its own for it
            if "loss scale already at minimum" not in str(error):
                raise
            collapsed = True
        if self._engine.zero_optimization_stage():
            norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=self._device)
        scaled = self._engine.fp16_enabled() and self._engine.dynamic_loss_scale()
        if scaled:
            return norm, torch.tensor(not collapsed, device=self._device)
        return norm, torch.isfinite(norm)

    def weights(self) -> dict[str, torch.Tensor]:
        """All trained parameters and kept buffers by name, float32 on the CPU of the first process; others have none.

        All processes must ask at the same time.
        """
        return full_weights(self._engine)

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """The inverse of `weights`, which every process gives alike."""
        load_weights(self._engine, weights)

    def state(self) -> dict[str, torch.Tensor]:
        """`parameter name|state name` -> tensor, whole, on the CPU of the first process; others have none.

        All processes must ask at the same time. Names and shapes are those of a run on one process.
        """
        return full_state(self._engine, self._optimizer)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `state`, which every process gives alike."""
        load_state(self._engine, self._optimizer, state)


def _prepare(world: World) -> None:
    """What DeepSpeed expects to find around it."""
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    if not dist.is_initialized():  # DeepSpeed wants a group of processes, be it of one
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    import deepspeed

    # On a CPU it would compile an all-reduce of its own for a minute or two; a killed build leaves a lock that the next
    # run waits on for ever. Gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with redirect_stdout(sys.stderr):
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # takes the group that is there


@contextmanager
def _refusals(file: str) -> Iterator[None]:
    """What DeepSpeed refuses of its file, as errors of ours."""
    from deepspeed.runtime.config import DeepSpeedConfigError
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    refusals = (AssertionError, ValueError, NotImplementedError, DeepSpeedConfigError, ZeRORuntimeException)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except refusals as error:
        raise InputError.at(file, f"DeepSpeed refuses it: {error}", "change what it names") from error


def _opened(
    file: str, module: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> DeepSpeedEngine:
    import deepspeed

    with _refusals(file):
        engine: DeepSpeedEngine = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)[0]
    return engine
