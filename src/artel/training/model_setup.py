"""A model made ready to be trained: built, held in its precision, laid out, fitted into memory, compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models.activation_checkpointing import Recompute, recompute
from artel.models.attention_switch import use_for_training
from artel.models.choice import Choice
from artel.models.compile import OFF, compile_choice, compile_layers
from artel.models.device import pick_precision
from artel.models.float8 import use_float8
from artel.models.loading.build import build_model, must_load_whole
from artel.models.loading.materialize import WeightLoader, materialize
from artel.models.loading.request import BuiltModel, ModelRequest
from artel.models.loading.structure import outline
from artel.models.loss import loss_choice
from artel.models.quantization import compute_in
from artel.objectives import Objective, objective_type
from artel.objectives.texts import keeps_apart
from artel.parallel import (
    ParallelDims,
    ParallelStrategy,
    World,
    local_device,
    parallelize,
    read_parallel_dims,
    split_problems,
)
from artel.parallel.context.context import check_context
from artel.parallel.deepspeed.config import Resolved, read_deepspeed
from artel.parallel.deepspeed.engine import DeepSpeedStrategy
from artel.registry import OPTIMIZERS
from artel.tokens import Samples, Tokenizer
from artel.training.memory.micro_batch import (
    MemoryLimit,
    MicroBatchPlan,
    cache_key,
    copies,
    find_micro_batch,
    longest_sample,
    sizes_to_try,
)
from artel.training.optim.bf16_adamw import hold_in_bf16
from artel.training.optim.loss_scaler import LossScale
from artel.training.optim.optimizer import Optimizer, OptimizerProtocol, plain_optimizer, state_bytes
from artel.training.run_folder import RunFolder


@dataclass(slots=True)
class TrainableModel:
    """What the loop needs to take steps."""

    strategy: ParallelStrategy
    optimizer: OptimizerProtocol
    found: MicroBatchPlan
    """Rows of a micro-batch, and what is computed again."""
    limit: MemoryLimit
    """Where less is remembered."""
    precision: str
    """What layers compute in."""
    compiled: bool
    told: str
    """Model, device and what was chosen, in a line."""


def check_layout(config: RunConfig, auto_class: str, world_size: int, here: int) -> None:
    """Raise InputError where a run cannot be split over `world` processes, `here` of them on each host.

    Asked before any text is read, of the model on the meta device: `set_up_model` asks again, of the model itself.
    """
    device = local_device()
    if config.parallel.deepspeed is not None:
        _resolved(config.parallel.deepspeed, config, world_size, device)
        return
    dims = read_parallel_dims(config.parallel, world_size, here)
    if dims.is_plain:
        return
    problems = []
    if not OPTIMIZERS[config.train.optimizer].steps_shards:
        what = f"{config.train.optimizer} looks at whole matrices, of which processes have pieces"
        problems.append(Problem("train.optimizer", what, "write adamw, sgd or muon; or parallel.data: ddp"))
    if config.model.quantize == "int8":
        problems.append(Problem("model.quantize", "int8 weights cannot be shared out", "write nf4; or data: ddp"))
    model = outline(config.model, auto_class)
    if model is not None:
        use_for_training(model, encoders=dims.context > 1)
        documents = objective_type(config).packs_text and keeps_apart(config)
        problems += split_problems(
            model, dims, config.parallel, block=config.data.block, objective=config.objective, documents=documents
        )
    if problems:
        raise InputError(problems)


def set_up_model(
    config: RunConfig,
    tokenizer: Tokenizer,
    objective: Objective,
    samples: Samples,
    world: World,
    steps: int,
    tell: Callable[[str], None],
) -> TrainableModel:
    """The run's model, on its device, as `config` wants it; `steps` is the length of the run. Raises InputError."""
    dims = read_parallel_dims(config.parallel, world.size, world.on_host)
    deepspeed = _deepspeed(config, world, tell)
    shares = not dims.is_plain or (deepspeed is not None and deepspeed.stage == 3)
    built, fill = _built(config, tokenizer, objective, dims, world, shares)
    for note in built.notes:
        tell(note)
    model = built.model
    use_for_training(model, encoders=dims.context > 1)
    documents = getattr(objective, "apart", False)
    problems = split_problems(
        model, dims, config.parallel, block=config.data.block, objective=config.objective, documents=documents
    )
    if problems:
        raise InputError(problems)
    whole = not any(parameter.is_meta for parameter in model.parameters())
    if whole:
        objective.check(model)  # on the device: other kernels run there
    precision = _in_precision(model, config, world, tell)
    model.train()
    parameters = built.num_parameters
    strategy: ParallelStrategy
    if deepspeed is not None:
        precision = deepspeed.precision
        strategy = DeepSpeedStrategy(model, objective, world, deepspeed, fill)
    else:
        strategy = parallelize(model, objective, world, precision, dims, config.parallel, fill=fill, tell=tell)
        _check(strategy, objective, checked=whole)
    if dims.pipeline > 1 and config.validate_.prompts:
        tell("validate.prompts: no stage of a pipeline can write alone, so nothing is written while it trains")
    given = deepspeed.micro_batch if deepspeed is not None else None
    limit = _limit(config, strategy, world)
    fitting = _fit(config, objective, samples, strategy, world, tell, given)
    found = limit.keep(fitting, strategy.all_reduce_min)
    if found != fitting:
        tell(f"micro-batches of {found.size}, not {fitting.size}: memory ran out in an earlier step of this run")
    recomputed = _recomputing(model, config, found)
    compiled = compile_choice(config.train.compile, world.device, steps)
    if deepspeed is not None:  # its engine takes hold of the layers as they are
        compiled = Choice(OFF, "parallel.deepspeed")
    if compiled.value != OFF:
        compile_layers(model, fixed=objective.packs_text)
    optimizer: OptimizerProtocol
    if isinstance(strategy, DeepSpeedStrategy):
        optimizer = strategy.start(plain_optimizer(model, config.train, config.seed), found.size, steps)
        _check(strategy, objective, checked=whole)
    else:
        loss_scale = LossScale(world.device) if precision == "fp16" else None
        optimizer = Optimizer(model, config.train, config.seed, loss_scale, precision)
    loss = strategy.with_full_model(loss_choice).value if dims.pipeline == 1 else "in the last stage"
    device = f"{world.size} process(es) on {world.device.type}"
    told = (
        f"{device}, {precision}, micro-batches of {found.size}, recomputed: {recomputed}, compiled: {compiled.value}, "
        f"loss: {loss}"
    )
    return TrainableModel(strategy, optimizer, found, limit, precision, compiled.value != OFF,
                 f"{model.config.model_type}, {parameters:,} parameters · {told}")  # fmt: skip


def _in_precision(model: PreTrainedModel, config: RunConfig, world: World, tell: Callable[[str], None]) -> str:
    """Hold the weights as asked for; what layers compute in."""
    precision = pick_precision(config.train.precision, world.device, config.train.weights)
    if config.train.weights == "bf16":
        hold_in_bf16(model)
    if precision == "fp8":
        tell(use_float8(model))
    compute_in(model, precision)
    return precision


def _recomputing(model: PreTrainedModel, config: RunConfig, found: MicroBatchPlan) -> str:
    """Have layers compute again what was found or asked for, in words."""
    done, asked = recompute(model, found.recompute), config.train.activation_checkpointing
    if done.startswith("none (") and asked not in ("auto", "none"):
        what = f"{asked}: {model.config.model_type} cannot compute its layers twice"
        raise InputError.at("train.activation_checkpointing", what, "write auto or none")
    return done


def _built(
    config: RunConfig, tokenizer: Tokenizer, objective: Objective, dims: ParallelDims, world: World, shares: bool
) -> tuple[BuiltModel, WeightLoader | None]:
    """The model: whole, or where processes are to have `shares` of it on the meta device, and then what brings weights.

    A pipeline's stages cannot be tried alone: where documents are kept apart, each process tries the whole model first.
    """
    request = ModelRequest(config.model, objective.auto_class, objective.heads, config.data.block, config.seed)
    tried_whole = dims.pipeline > 1 and getattr(objective, "apart", False)
    if not shares or tried_whole or must_load_whole(config.model) is not None:
        built = build_model(request, tokenizer)
        built.model.to(world.device)
        return built, None
    built = build_model(request, tokenizer, on_meta=True)
    assert built.weights is not None
    return built, partial(materialize, weights=built.weights)


def _check(strategy: ParallelStrategy, objective: Objective, *, checked: bool) -> None:
    """Try a model that has its weights only now; no stage of a pipeline can be tried alone."""
    if strategy.dims.pipeline == 1:
        if not checked:
            strategy.with_full_model(objective.check)
        if strategy.dims.context > 1:
            strategy.with_full_model(check_context)


def _deepspeed(config: RunConfig, world: World, tell: Callable[[str], None]) -> Resolved | None:
    """What a DeepSpeed file says, where the run has one."""
    if config.parallel.deepspeed is None:
        return None
    found = _resolved(config.parallel.deepspeed, config, world.size, world.device)
    for note in found.notes:
        tell(note)
    return found


def _resolved(file: str, config: RunConfig, world_size: int, device: torch.device) -> Resolved:
    """A DeepSpeed file for this run. Raises InputError with all that does not go with it."""
    problems = []
    steps_itself, fix = "DeepSpeed's engine steps by itself", "leave it out, or leave parallel.deepspeed out"
    if config.train.on_bad_step != "stop":
        problems.append(Problem("train.on_bad_step", f"{config.train.on_bad_step}: {steps_itself}", fix))
    if config.train.spike is not None:
        problems.append(Problem("train.spike", f"{config.train.spike:g}: {steps_itself}", fix))
    try:
        found = read_deepspeed(file, config, world_size, device)
    except InputError as error:
        raise InputError([*error.problems, *problems]) from None
    if problems:
        raise InputError(problems)
    return found


def _limit(config: RunConfig, strategy: ParallelStrategy, world: World) -> MemoryLimit:
    """What earlier starts of this run on such processes have found too large."""
    most = -(-config.train.batch // strategy.dims.dp_degree)
    key = cache_key(config, strategy.model, most, config.data.block, world.device, world.size)
    return MemoryLimit(RunFolder(Path(config.run)).micro_batches, key)


def _fit(
    config: RunConfig,
    objective: Objective,
    samples: Samples,
    strategy: ParallelStrategy,
    world: World,
    tell: Callable[[str], None],
    given: int | None = None,
) -> MicroBatchPlan:
    """The micro-batch and what is computed again: as asked for (or `given`), or found by trying the longest sample."""
    asked, size = config.train.activation_checkpointing, given or config.train.micro_batch
    if size != "auto" and asked != "auto":
        return MicroBatchPlan(size, asked)
    index, row_tokens = longest_sample(objective, samples)
    most = -(-config.train.batch // strategy.dims.dp_degree) if size == "auto" else size
    if not strategy.can_probe_memory:
        largest = sizes_to_try(most, row_tokens, world.device)[-1] if size == "auto" else size
        return MicroBatchPlan(largest, "none" if asked == "auto" else asked)

    said: list[str] = []

    def attempt(rows: int, how: Recompute) -> None:
        if not said:
            said.append("trying which micro-batch fits into memory")
            tell(said[0])
        recompute(strategy.model, how)
        try:
            with torch.compiler.set_stance("force_eager"):
                strategy.probe_memory(copies(objective, samples, index, rows))
        finally:
            strategy.model.zero_grad(set_to_none=True)

    return find_micro_batch(
        attempt,
        most,
        ("none", "selective", "full") if asked == "auto" else (asked,),
        row_tokens=row_tokens,
        device=world.device,
        key=cache_key(config, strategy.model, most, row_tokens, world.device, world.size),
        run=RunFolder(Path(config.run)).micro_batches,
        reserve=state_bytes(strategy.model, config.train),
        exactly=size != "auto",
        agree=strategy.all_reduce_min,
    )
