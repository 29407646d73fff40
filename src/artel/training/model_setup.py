"""Builds a model that the loop can train, from a run file.

The steps in order: build (in full, or on the meta device) → check against the strategy → precision → parallelize and
load weights → find the micro-batch that fits → activation checkpointing → compile → optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.integers import ceil_div
from artel.messages import Phrase, logger
from artel.models import Choice
from artel.models.activation_checkpointing import Recompute, recompute
from artel.models.attention_switch import use_artel_attention
from artel.models.compile import OFF, compile_choice, compile_layers
from artel.models.device import pick_precision
from artel.models.experts import compute_experts_in_autocast
from artel.models.forward_pass import architecture_error
from artel.models.loading.build import base_dtype, build_model, must_load_full
from artel.models.loading.materialize import WeightLoader, materialize
from artel.models.loading.request import BuiltModel
from artel.models.loading.structure import build_outline
from artel.models.loss import loss_choice
from artel.models.quantization import set_compute_precision, use_float8
from artel.objectives import Objective, objective_type
from artel.parallel import OptimizerProtocol, ParallelPlan, ParallelStrategy, World, plan_parallelism
from artel.registry import OPTIMIZERS
from artel.tokens import Samples, Tokenizer
from artel.training.micro_batch import (
    MemoryLimit,
    MicroBatchPlan,
    agreed_plan,
    cache_key,
    find_micro_batch,
    is_out_of_memory,
    longest_sample,
    repeat_sample,
    sizes_to_try,
)
from artel.training.optim.bf16_adamw import hold_in_bf16
from artel.training.optim.loss_scaler import LossScale
from artel.training.optim.optimizer import Optimizer, optimizer_factory, state_bytes
from artel.training.plan_file import planned_micro_batch, plans_ample_memory
from artel.training.run_folder import RunFolder


@dataclass(slots=True)
class TrainableModel:
    """A model, parallelized by its strategy, with its optimizer and the choices made on the way."""

    strategy: ParallelStrategy
    optimizer: OptimizerProtocol
    batch_plan: MicroBatchPlan
    memory_limit: MemoryLimit
    precision: str
    """Precision of the layers."""
    compiled: bool
    chosen: dict[str, Any]
    """Chosen values by key of the run file."""
    summary: str
    """Model, device and choices, in a line."""


def check_layout(
    config: RunConfig, auto_class: str, world_size: int, on_host: int, model: PreTrainedModel | None = None
) -> None:
    """Raise InputError if a run cannot be split over `world_size` processes, `on_host` of them on each host.

    Called before any text is read, with a model on the meta device. `set_up_model` checks the real model again. A
    caller that checks many layouts passes the `model`.
    """
    plan = plan_parallelism(config, world_size, on_host)
    if plan.full_matrices:
        return
    problems = []
    if plan.splits_layers and config.validate_.tasks:
        reason = "a pipeline stage holds only a part of the model, but the harness needs a full one"
        problems.append(Problem("validate.tasks", reason, "remove it: artel evaluate RUN --tasks runs them afterwards"))
    if not OPTIMIZERS[config.train.optimizer].supports_sharding:
        reason = f"{config.train.optimizer} needs full matrices, but each process has a shard"
        problems.append(Problem("train.optimizer", reason, "write adamw, sgd or muon; or parallel.data: ddp"))
    if config.model.quantize == "int8" and config.model.lora is not None and config.model.lora.dora:
        reason = "true with sharded int8 weights: peft reads their norms from full layers"
        problems.append(
            Problem("model.lora.dora", reason, "write false, or model.quantize: nf4; or parallel.data: ddp")
        )
    if model is None:
        model = build_outline(config.model, auto_class)
    if model is not None:
        use_artel_attention(model, encoders=plan.splits_sequences)
        documents = objective_type(config).uses_document_mask(config)
        problems += plan.problems(model, block=config.data.block, objective=config.objective, documents=documents)
    if problems:
        raise InputError(problems)


def set_up_model(
    config: RunConfig, tokenizer: Tokenizer, objective: Objective, samples: Samples, world: World, steps: int | None
) -> TrainableModel:
    """Build the run's model, split over the processes of `world`, and its optimizer. Raise InputError if it cannot run.

    `steps`: length of the run; None if `train.budget` ends it.
    """
    plan = plan_parallelism(config, world.size, world.on_host)
    documents = objective.isolated_documents
    built, load_weights = _build(config, tokenizer, objective, plan, world, documents)
    for note in (*plan.notes, *built.notes):
        logger.info(note)
    model, parameters = built.model, built.num_parameters
    use_artel_attention(model, encoders=plan.splits_sequences)
    compute_experts_in_autocast(model)
    problems = plan.problems(model, block=config.data.block, objective=config.objective, documents=documents)
    if problems:
        raise InputError(problems)
    is_checked = not any(parameter.is_meta for parameter in model.parameters())
    if is_checked:
        objective.check(model)  # on the device, since its kernels may differ
    precision = _choose_precision(config, plan, world)
    if config.train.weights == "bf16":
        hold_in_bf16(model)
    if precision == "fp8":
        logger.info(use_float8(model))
    set_compute_precision(model, precision)
    model.train()
    strategy = plan.parallelize(model, objective, world, precision, load_weights=load_weights)
    strategy.check_split()
    if not is_checked and strategy.can_run_full_model:
        strategy.with_full_model(objective.check)
        is_checked = True
    if config.validate_.prompts and not strategy.can_generate:
        logger.info("validate.prompts: a pipeline cannot generate text, so there are no samples during training")
    memory_limit = _open_memory_limit(config, strategy, world)
    fitting = _find_batch_plan(config, objective, samples, strategy, world, plan.micro_batch)
    batch_plan = memory_limit.apply(fitting, strategy.all_reduce_min)
    if batch_plan != fitting:
        logger.info(
            "micro-batches of %s, not %s: memory ran out in an earlier step of this run", batch_plan.rows, fitting.rows
        )
    recomputed = _apply_recompute(model, config, batch_plan)
    compiled = compile_choice(config.train.compile, world.device, steps, config.train.budget, config.model.quantize)
    if plan.reason_not_compiled is not None:
        compiled = Choice(OFF, plan.reason_not_compiled)
    fixed_shapes = objective.fills_blocks(config)
    if world.device.type == "cuda" and not fixed_shapes:
        # cuDNN builds a plan for each new shape: 1 s forward and backward on a B200 (torch 2.11, FunASR issue 3704).
        torch.backends.cuda.enable_cudnn_sdp(False)
    if compiled.value != OFF:
        compile_layers(model, fixed=fixed_shapes)
    build_optimizer = optimizer_factory(model, config.train, config.seed)
    optimizer = strategy.own_optimizer(build_optimizer, batch_plan.rows, steps)
    if optimizer is None:
        loss_scale = LossScale(world.device) if precision == "fp16" else None
        optimizer = Optimizer(model, config.train, config.seed, loss_scale, precision)
    if not is_checked and strategy.can_run_full_model:
        strategy.with_full_model(objective.check)
    loss = objective.loss_description
    if not loss:
        loss = strategy.with_full_model(loss_choice).value if strategy.can_run_full_model else "in the last stage"
    chosen = {
        "model": Phrase("{model}, {count:,} parameters", model=model.config.model_type, count=parameters),
        "train.precision": precision,
        "train.micro_batch": batch_plan.rows,
        "train.activation_checkpointing": recomputed,
        "train.compile": compiled.value,
        "loss": loss,
    }
    summary = (
        f"{chosen['model']} · {world.size} {'process' if world.size == 1 else 'processes'} on {world.device.type}, "
        f"{precision}, micro-batches of {batch_plan.rows}, recomputed: {recomputed}, compiled: {compiled.value}, "
        f"loss: {loss}"
    )
    is_compiled = compiled.value != OFF
    return TrainableModel(strategy, optimizer, batch_plan, memory_limit, precision, is_compiled, chosen, summary)


def _build(
    config: RunConfig,
    tokenizer: Tokenizer,
    objective: Objective,
    plan: ParallelPlan,
    world: World,
    documents: bool,
) -> tuple[BuiltModel, WeightLoader | None]:
    """Return the full model on its device; or, if `plan` shards it, a model on the meta device and its weight loader.

    Isolated documents are tested on the full model. A pipeline stage cannot be tested, so with a pipeline each process
    builds the full model first.
    """
    precision = _choose_precision(config, plan, world)
    request = objective.model_request(config.model, config.data.block, config.seed)
    request = replace(request, base_dtype=base_dtype(config, precision))
    tests_full_model = plan.splits_layers and documents
    if not plan.shards_weights or tests_full_model or must_load_full(config.model) is not None:
        built = build_model(request, tokenizer)
        built.model.to(world.device)
        return built, None
    built = build_model(request, tokenizer, on_meta=True)
    assert built.weights is not None
    return built, partial(materialize, weights=built.weights)


def _choose_precision(config: RunConfig, plan: ParallelPlan, world: World) -> str:
    """Return the precision of the layers: DeepSpeed's, if its file sets one, or the run's."""
    return plan.precision or pick_precision(config.train.precision, world.device, config.train.weights)


def _apply_recompute(model: PreTrainedModel, config: RunConfig, plan: MicroBatchPlan) -> str:
    """Switch on activation checkpointing as planned. Return a description of the recomputed layers."""
    mode = config.train.activation_checkpointing
    description = recompute(model, plan.recompute)
    if description.startswith("none (") and mode not in ("auto", "none"):
        message = f"{mode}: {model.config.model_type} cannot compute its layers twice"
        raise InputError.at("train.activation_checkpointing", message, "write auto or none")
    return description


def _open_memory_limit(config: RunConfig, strategy: ParallelStrategy, world: World) -> MemoryLimit:
    """Return the limit set by earlier starts of this run with the same number of processes."""
    max_rows = ceil_div(config.train.batch, strategy.dp_degree)
    key = cache_key(config, strategy.model, max_rows, config.data.block, world.device, world.size)
    return MemoryLimit(RunFolder(Path(config.run)).micro_batches, key)


def _find_batch_plan(
    config: RunConfig,
    objective: Objective,
    samples: Samples,
    strategy: ParallelStrategy,
    world: World,
    strategy_rows: int | None,
) -> MicroBatchPlan:
    """Return the micro-batch plan set by the run or its strategy, or the largest that fits the longest sample."""
    mode = config.train.activation_checkpointing
    fixed_rows = strategy_rows or config.train.micro_batch
    if fixed_rows != "auto" and mode != "auto":
        return MicroBatchPlan(fixed_rows, mode)
    index, row_tokens = longest_sample(objective, samples)
    max_rows = ceil_div(config.train.batch, strategy.dp_degree) if fixed_rows == "auto" else fixed_rows
    modes: tuple[Recompute, ...] = ("none", "selective", "full") if mode == "auto" else (mode,)
    planned_before_run = planned_micro_batch(RunFolder(Path(config.run)), world.device)
    if not strategy.can_probe_memory:
        largest = sizes_to_try(max_rows, row_tokens, world.device)[-1] if fixed_rows == "auto" else fixed_rows
        planned = None
        if fixed_rows == "auto" and world.device.type == "cuda":
            planned = agreed_plan(planned_before_run, modes, strategy.all_reduce_min)
        return planned or MicroBatchPlan(largest, modes[0])

    last_result = ""

    def attempt(rows: int, mode: Recompute) -> None:
        nonlocal last_result
        suffix = "" if mode == modes[0] else f" with activation_checkpointing: {mode}"
        logger.info("%schecking whether a micro-batch of %s fits into memory%s", last_result, rows, suffix)
        last_result = f"a micro-batch of {rows} does not fit; "
        recompute(strategy.model, mode)
        try:
            strategy.probe_memory(repeat_sample(objective, samples, index, rows))
            last_result = f"a micro-batch of {rows} fits; "
        except Exception as error:
            refusal = None if is_out_of_memory(error) else architecture_error(error, strategy.model)
            if refusal is not None:
                raise refusal from error
            raise
        finally:
            strategy.forget_failed_pass()

    return find_micro_batch(
        attempt,
        max_rows,
        modes,
        row_tokens=row_tokens,
        device=world.device,
        key=cache_key(config, strategy.model, max_rows, row_tokens, world.device, world.size),
        run=RunFolder(Path(config.run)).micro_batches,
        reserve=state_bytes(strategy.model, config.train, on=world.device),
        exactly=fixed_rows != "auto",
        all_reduce_min=strategy.all_reduce_min,
        planned=planned_before_run,
        is_ample=plans_ample_memory(RunFolder(Path(config.run))),
    )
