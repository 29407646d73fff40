"""Loads the teacher of a run: in full on each process, or sharded over all processes if the student is sharded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig, PreTrainedModel

from artel.config import ModelConfig, RunConfig
from artel.config.schema.run import ParallelConfig
from artel.errors import InputError
from artel.messages import silence_messages
from artel.models.attention_switch import use_artel_attention
from artel.models.device import autocast_dtype, pick_precision
from artel.models.loading.build import build_model, load_model, must_load_full, skip_padding_checks
from artel.models.loading.materialize import materialize
from artel.models.loading.model_folder import is_quantized
from artel.models.lora.adapter_folder import read_adapter
from artel.models.output_head import output_head
from artel.models.quantization import set_compute_precision
from artel.objectives import Objective
from artel.objectives.hooks import Teacher
from artel.parallel import World, plan_parallelism
from artel.storage import checksum
from artel.tokens import load_tokenizer

Result = TypeVar("Result")
_MODEL_FILES = ("*.safetensors", "pytorch_model*.bin", "config.json", "adapter_config.json")


@dataclass(slots=True)
class TeacherModel:
    """A loaded teacher."""

    call: Callable[[Callable[[PreTrainedModel], torch.Tensor]], torch.Tensor]
    """Calls a function with the model, and gathers the weights while the function runs. Collective."""
    config: PreTrainedConfig
    precision: str
    is_sharded: bool

    def run(self, work: Callable[[PreTrainedModel], torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return `work(model)`, computed without gradients and in the run's precision."""
        dtype = autocast_dtype(self.precision)
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype is not None):
            return self.call(work)


def load_teacher(teacher: Teacher, config: RunConfig, objective: Objective, world: World) -> TeacherModel:
    """Load a run's teacher: a model of a folder or hub id. Raise InputError if it does not fit the objective.

    If each process holds the full student, each also holds the full teacher. Otherwise fully_shard shards the teacher
    over all processes, in whatever way the student is split.
    """
    name, tokenizer, model_config = teacher.model, objective.tokenizer, config.model
    if not teacher.is_initial_model:
        tokenizer = load_tokenizer(name, f"{objective.section}.teacher")
        objective.check_teacher(tokenizer)
        model_config = ModelConfig.model_validate({"from": name})
    request = objective.model_request(model_config, config.data.block, config.seed)
    precision = teacher_precision(config, world.device)
    shards = world.size > 1 and not plan_parallelism(config, world.size, world.on_host).full_matrices
    parallel = ParallelConfig(data="fsdp") if shards else ParallelConfig()
    on_meta = shards and read_adapter(name) is None and must_load_full(model_config) is None
    load_weights = None
    if on_meta:
        built = build_model(request, tokenizer, on_meta=True)
        if built.new_modules:
            message = f"{name} lacks the weights of {', '.join(built.new_modules)}"
            raise InputError.at(f"{objective.section}.teacher", message, "use a model with complete weights")
        assert built.weights is not None
        model, load_weights = built.model, partial(materialize, weights=built.weights)
    else:
        model = load_model(request, tokenizer, merge=True)
    skip_padding_checks(model)
    model.requires_grad_(False)
    use_artel_attention(model)
    if not shards:
        _prepare_for_inference(model, precision, world.device)
        objective.check(model)
        output_head(model)
        return TeacherModel(lambda work: work(model), model.config, precision, False)
    if not on_meta:
        model.to(world.device)
    plan = plan_parallelism(config.model_copy(update={"parallel": parallel}), world.size, world.on_host)
    with silence_messages():
        strategy = plan.parallelize(model, objective, world, precision, load_weights=load_weights)
    model.eval()
    strategy.with_full_model(objective.check)
    strategy.with_full_model(output_head)
    return TeacherModel(strategy.with_full_model, model.config, precision, True)


def _prepare_for_inference(model: PreTrainedModel, precision: str, device: torch.device) -> None:
    """Move a teacher to the device, and cast it to the precision of its computation, since it is not trained."""
    set_compute_precision(model, precision)
    dtype = autocast_dtype(precision)
    if dtype is not None and not is_quantized(model.config):
        model.to(dtype)
    model.to(device)
    model.eval()


def release_memory(device: torch.device) -> None:
    """Free the memory of a model that is no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def teacher_precision(config: RunConfig, device: torch.device) -> str:
    """Return the teacher's precision: the student's, except for fp8, which is only for training."""
    return pick_precision("auto" if config.train.precision == "fp8" else config.train.precision, device)


def weights_digest(name: str, key: str) -> str:
    """Return an identifier of a model's weights: the checksums of its files, or the commit of a hub model.

    Raise InputError at `key` if there is no such folder.
    """
    folder = Path(name)
    if folder.is_dir():
        files = sorted(file for pattern in _MODEL_FILES for file in folder.glob(pattern))
        checksums = " ".join(f"{file.name}:{checksum(file)}" for file in files)
        adapter = read_adapter(name)
        return checksums if adapter is None else f"{checksums} over {weights_digest(adapter.base, key)}"
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise InputError.at(key, f"there is no folder {name}", "use a run, a model folder or a hub id") from None
    return Path(cached).parent.name if isinstance(cached, str) else name
