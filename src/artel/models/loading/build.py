"""The two builders of models: for training, from the run file; for use, from a folder or a hub id."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from artel.config import ModelConfig, RunConfig
from artel.errors import InputError
from artel.models.half_base import hold_in_half
from artel.models.loading.check import check_positions
from artel.models.loading.context import changes_context
from artel.models.loading.heads import freeze_unused
from artel.models.loading.materialize import WeightSource, materialize
from artel.models.loading.model_folder import is_quantized, read_config
from artel.models.loading.multimodal.adapter import named_as_part
from artel.models.loading.pretrained import load_pretrained, plan_pretrained
from artel.models.loading.repeatable import make_repeatable
from artel.models.loading.request import BuiltModel, ModelRequest
from artel.models.loading.structure import from_scratch
from artel.models.lora.adapters import (
    add_adapters,
    freeze,
    load_adapter,
    note_changed_base,
    read_adapter,
)
from artel.models.lora.merge import merge_adapter
from artel.models.lora.weights import first_weights
from artel.tokens import Tokenizer


def must_load_whole(config: ModelConfig) -> str | None:
    """Why a model must be built whole before it is sharded; None where it need not be. Raises InputError."""
    if config.quantize != "none":
        return "model.quantize: weights are quantized while they are loaded whole"
    if config.lora is not None and config.lora.dora:
        return "model.lora.dora: its magnitudes are norms of whole matrices"
    if config.from_ is not None and is_quantized(read_config(config.from_, runs_code=config.runs_code)[0]):
        return "model.from: its weights are quantized, and transformers unpacks them while it loads them whole"
    return None


def base_dtype(run: RunConfig, precision: str) -> torch.dtype | None:
    """What a run holds the matrices beneath its adapters in; None: in float32, or as `model.quantize` says.

    Left to itself (`model.lora.base: auto`) that is what the model is saved in, where layers compute in 16 bits: it is
    half the memory. Where they compute in float32 each product would convert its matrix. DeepSpeed in 16 bits holds
    every weight in these anyway.
    """
    lora, saved = run.model.lora, saved_dtype(run.model)
    if lora is None or saved is None or run.model.quantize != "none" or run.train.weights == "bf16":
        return None
    if run.parallel.deepspeed is not None and precision != "fp32":
        return None
    if lora.base != "auto":
        return torch.bfloat16 if lora.base == "bf16" else None
    return saved if saved in (torch.bfloat16, torch.float16) and precision in ("bf16", "fp16") else None


def saved_dtype(model: ModelConfig) -> torch.dtype | None:
    """What a pretrained model says it is saved in; None for one that is quantized, or from scratch."""
    if model.from_ is None:
        return None
    config, _ = read_config(model.from_, runs_code=model.runs_code)
    dtype = config.dtype or config.get_text_config().dtype
    if is_quantized(config):
        return None
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def build_model(request: ModelRequest, tokenizer: Tokenizer, *, on_meta: bool = False) -> BuiltModel:
    """The model of a run before its first step: from scratch or pretrained, with adapters and frozen parameters.

    A pretrained model may lack the weights of its heads: they are initialized. With `on_meta` the model stays on the
    meta device, to be sharded first: then `materialize(model, built.weights)` brings each process what it holds.
    Raises InputError.
    """
    config = request.config
    if config.auto:
        what = "the model is chosen when the run is trained"
        raise InputError.at("model.auto", what, "name the folder of the run once that has begun")
    assert not on_meta or must_load_whole(config) is None
    torch.manual_seed(request.seed)
    if config.from_ is None:
        model = from_scratch(request, tokenizer)
        built = BuiltModel(model, weights=WeightSource(copy.deepcopy(model), request.seed))
        check_positions(model, request.block)
        if not on_meta:
            _initialize(built)
    else:
        saved_whole = config.lora.save if config.lora is not None else []
        if on_meta or request.base_dtype is not None:
            built = plan_pretrained(request, tokenizer, elsewhere=dict.fromkeys(saved_whole, 0))
        else:
            built = load_pretrained(request, tokenizer, for_training=True, elsewhere=dict.fromkeys(saved_whole, 0))
        if request.base_dtype is not None:
            _hold_base_in_half(built, request.base_dtype)
            if must_load_whole(config) is not None:
                _bring_weights(built)
        check_positions(built.model, request.block)
    built.notes += name_ends(built.model, request, tokenizer)
    make_repeatable(built.model)
    _choose_trainable(built, request)
    if not on_meta and built.weights is not None:
        _bring_weights(built)
    return built


def load_model(request: ModelRequest, tokenizer: Tokenizer, *, merge: bool = False) -> PreTrainedModel:
    """The model of the folder or hub id `request.config.from_`, for use: all of its weights must be in its files.

    An adapter's folder gives its base model with the adapter in it, or with `merge` the base model with the adapter's
    changes added to its weights. Raises InputError.
    """
    adapter = read_adapter(str(request.config.from_))
    if adapter is None:
        return load_pretrained(request, tokenizer, for_training=False).model
    config = request.config.model_copy(update={"from_": adapter.base})
    base = replace(request, config=config, base_config=adapter.base_config)
    model = load_pretrained(base, tokenizer, for_training=False, elsewhere=adapter.full_modules).model
    name_ends(model, request, tokenizer)
    with named_as_part(model, adapter) as named:
        if merge:
            return merge_adapter(model, named)
        load_adapter(model, named)
    if adapter.base_config is not None:
        note_changed_base(model)
    return model


def name_ends(model: PreTrainedModel, request: ModelRequest, tokenizer: Tokenizer) -> list[str]:
    """Let the model's configurations name every token that ends what it learns to write, as transformers' Trainer does.

    config.json gets the tokenizer's end token, generation_config.json all of them beside those that it has. Returns
    notes for the user about what changed.
    """
    if not request.end_ids:
        return []
    configured = _as_list(getattr(model.config, "eos_token_id", None))
    if tokenizer.end_id not in configured:
        model.config.eos_token_id = tokenizer.end_id
    settings = model.generation_config
    named = _as_list(None if settings is None else settings.eos_token_id)
    new = sorted(request.end_ids - set(named), key=lambda token: (token != tokenizer.end_id, token))
    if settings is not None and new:
        ends = [*new, *named]
        settings.eos_token_id = ends if len(ends) > 1 else ends[0]
    before = {*configured, *named}
    if request.config.from_ is None or not before or request.end_ids <= before:
        return []
    shown, known = (
        " and ".join(f"{tokenizer.hf.convert_ids_to_tokens(token)!r} ({token})" for token in sorted(tokens))
        for tokens in (request.end_ids - before, before)
    )
    what = f"the run ends texts with {shown}, {request.config.from_} with {known}"
    if request.config.lora is None:
        return [f"{what}: RUN/model stops at both (config.json, generation_config.json)"]
    return [f"{what}: an adapter has no generation_config.json; elsewhere write eos_token_id={settings.eos_token_id}"]


def _as_list(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _hold_base_in_half(built: BuiltModel, dtype: torch.dtype) -> None:
    """Hold the matrices of a model on the meta device in `dtype`: each is read into that, none is whole in float32."""
    hold_in_half(built.model, dtype)
    built.notes.append(f"the frozen matrices are held in {str(dtype).removeprefix('torch.')}")


def _bring_weights(built: BuiltModel) -> None:
    """Bring the weights of a model on the meta device into the memory of this process."""
    assert built.weights is not None
    materialize(built.model, built.weights, device="cpu")
    built.weights = None


def _initialize(built: BuiltModel) -> None:
    """Bring the weights of a model from scratch into the memory of this process. Raises InputError without room."""
    try:
        _bring_weights(built)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        what = f"{built.num_parameters:,} parameters, of 4 bytes each, do not fit into this machine's memory"
        raise InputError.at("model.config", what, "write smaller sizes") from None


def _choose_trainable(built: BuiltModel, request: ModelRequest) -> None:
    """Add adapters and freeze parameters, as the run file says. Raises InputError."""
    config = request.config
    freeze_unused(built.model)
    if config.lora is not None:
        generates = request.auto_class in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
        done = add_adapters(
            built.model,
            config.lora,
            base=config.from_ or "",
            generates=generates,
            new_modules=built.new_modules,
            seed=request.seed,
        )
        if built.weights is not None:
            built.weights.adapters = first_weights(built.model)
        built.notes.append(f"{done}: {built.num_trainable:,} parameters are trained")
        if changes_context(config):
            note_changed_base(built.model)
    if config.freeze:
        freeze(built.model, config.freeze)
        built.notes.append(f"{built.num_trainable:,} parameters are trained, the others stay as they are")
