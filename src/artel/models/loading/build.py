"""Building a model: for training from the run file, and for inference from a folder or hub id."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from artel.config import ModelConfig, RunConfig
from artel.errors import InputError
from artel.models.half_base import hold_in_half
from artel.models.loading.check import check_positions
from artel.models.loading.heads import freeze_unused
from artel.models.loading.language_part import renamed_for_language_part
from artel.models.loading.materialize import WeightSource, materialize
from artel.models.loading.model_config import changes_context
from artel.models.loading.model_folder import is_quantized, read_config
from artel.models.loading.pretrained import load_pretrained, plan_pretrained
from artel.models.loading.request import BuiltModel, ModelRequest
from artel.models.loading.structure import build_from_scratch
from artel.models.lora.adapter_folder import load_adapter, merge_adapter, note_changed_base, read_adapter
from artel.models.lora.adapters import add_adapters, draw_first_weights, freeze
from artel.tokens import Tokenizer


def must_load_full(config: ModelConfig) -> str | None:
    """Return the reason to load a model in full before sharding it, or None. Raise InputError if it cannot be read."""
    if config.quantize != "none":
        return "model.quantize: weights are quantized while they are loaded in full"
    if config.lora is not None and config.lora.dora:
        return "model.lora.dora: its magnitudes are norms of full matrices"
    if config.from_ is not None and is_quantized(read_config(config.from_, runs_code=config.runs_code)[0]):
        return "model.from: its weights are quantized, and transformers unpacks them while it loads them in full"
    return None


def base_dtype(config: RunConfig, precision: str) -> torch.dtype | None:
    """Return the dtype of frozen matrices under adapters; None for float32, or if `model.quantize` decides.

    `model.lora.base: auto` keeps the saved dtype if layers compute in 16 bits, which halves the memory. If layers
    compute in float32, each matmul would have to convert its matrix. DeepSpeed in 16 bits keeps all weights in 16 bits
    anyway.
    """
    lora, saved = config.model.lora, saved_dtype(config.model)
    if lora is None or saved is None or config.model.quantize != "none" or config.train.weights == "bf16":
        return None
    if config.parallel.deepspeed is not None and precision != "fp32":
        return None
    if lora.base != "auto":
        return torch.bfloat16 if lora.base == "bf16" else None
    return saved if saved in (torch.bfloat16, torch.float16) and precision in ("bf16", "fp16") else None


def saved_dtype(config: ModelConfig) -> torch.dtype | None:
    """Return the dtype in which a pretrained model is saved; None if it is quantized or from scratch."""
    if config.from_ is None:
        return None
    saved_config, _ = read_config(config.from_, runs_code=config.runs_code)
    dtype = saved_config.dtype or saved_config.get_text_config().dtype
    if is_quantized(saved_config):
        return None
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def build_model(request: ModelRequest, tokenizer: Tokenizer, *, on_meta: bool = False) -> BuiltModel:
    """Build the model of a run: from scratch or pretrained, with adapters and frozen parameters.

    Heads that a pretrained model lacks are initialized. With `on_meta` the model stays on the meta device, to be
    sharded before it has weights; `materialize(model, built.weights)` then loads the shards of each process. Raise
    InputError if the run file does not fit the model.
    """
    config = request.config
    if config.auto:
        what = "the model is chosen when the run is trained"
        raise InputError.at("model.auto", what, "use the folder of the run once it has started")
    assert not on_meta or must_load_full(config) is None
    torch.manual_seed(request.seed)
    if config.from_ is None:
        model = build_from_scratch(request, tokenizer)
        built = BuiltModel(model, weights=WeightSource(copy.deepcopy(model), request.seed))
        check_positions(model, request.block)
        if not on_meta:
            _initialize(built)
    else:
        full_modules = dict.fromkeys(config.lora.save if config.lora is not None else [], 0)
        if on_meta or request.base_dtype is not None:
            built = plan_pretrained(request, tokenizer, adapter_modules=full_modules)
        else:
            built = load_pretrained(request, tokenizer, for_training=True, adapter_modules=full_modules)
        if request.base_dtype is not None:
            hold_in_half(built.model, request.base_dtype)
            dtype = str(request.base_dtype).removeprefix("torch.")
            built.notes.append(f"the frozen matrices are held in {dtype}")
            if must_load_full(config) is not None:
                _load_weights(built)
        check_positions(built.model, request.block)
    built.notes += set_end_tokens(built.model, request, tokenizer)
    make_reproducible(built.model)
    skip_padding_checks(built.model)
    _choose_trainable(built, request)
    if not on_meta and built.weights is not None:
        _load_weights(built)
    return built


def load_model(request: ModelRequest, tokenizer: Tokenizer, *, merge: bool = False) -> PreTrainedModel:
    """Load the model of the folder or hub id `request.config.from_` for inference. All weights must be in its files.

    For an adapter's folder, load its base model with the adapter, or with `merge` with the adapter's updates added to
    its weights. Raise InputError if weights are missing or do not fit.
    """
    adapter = read_adapter(str(request.config.from_))
    if adapter is None:
        return load_pretrained(request, tokenizer, for_training=False).model
    config = request.config.model_copy(update={"from_": adapter.base})
    base_request = replace(request, config=config, base_config=adapter.base_config)
    model = load_pretrained(base_request, tokenizer, for_training=False, adapter_modules=adapter.full_modules).model
    set_end_tokens(model, request, tokenizer)
    with renamed_for_language_part(model, adapter) as renamed_adapter:
        if merge:
            return merge_adapter(model, renamed_adapter)
        load_adapter(model, renamed_adapter)
    if adapter.base_config is not None:
        note_changed_base(model)
    return model


def set_end_tokens(model: PreTrainedModel, request: ModelRequest, tokenizer: Tokenizer) -> list[str]:
    """Set the end tokens in the model's configurations to those of the run, like transformers' Trainer.

    config.json gets the tokenizer's end token; generation_config.json gets all of them in addition to the saved ones.
    Return notes for the user about changes.
    """
    if not request.end_ids:
        return []
    configured = _as_list(getattr(model.config, "eos_token_id", None))
    if tokenizer.end_id not in configured:
        model.config.eos_token_id = tokenizer.end_id
    settings = model.generation_config
    old_ends = _as_list(None if settings is None else settings.eos_token_id)
    new_ends = sorted(request.end_ids - set(old_ends), key=lambda token: (token != tokenizer.end_id, token))
    if settings is not None and new_ends:
        all_ends = [*new_ends, *old_ends]
        settings.eos_token_id = all_ends if len(all_ends) > 1 else all_ends[0]
    saved_ends = {*configured, *old_ends}
    if request.config.from_ is None or not saved_ends or request.end_ids <= saved_ends:
        return []
    run_ends, model_ends = (
        " and ".join(f"{tokenizer.hf.convert_ids_to_tokens(token)!r} ({token})" for token in sorted(tokens))
        for tokens in (request.end_ids - saved_ends, saved_ends)
    )
    what = f"the run ends texts with {run_ends}, {request.config.from_} with {model_ends}"
    if request.config.lora is None:
        return [f"{what}: RUN/model stops at both (config.json, generation_config.json)"]
    return [f"{what}: an adapter has no generation_config.json; elsewhere write eos_token_id={settings.eos_token_id}"]


def _as_list(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _load_weights(built: BuiltModel) -> None:
    """Load the weights of a model on the meta device into memory."""
    assert built.weights is not None
    materialize(built.model, built.weights, device="cpu")
    built.weights = None


def _initialize(built: BuiltModel) -> None:
    """Initialize the weights of a model from scratch. Raise InputError if memory does not suffice."""
    try:
        _load_weights(built)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        what = f"{built.num_parameters:,} parameters, of 4 bytes each, do not fit in this machine's memory"
        raise InputError.at("model.config", what, "write smaller sizes") from None


def _choose_trainable(built: BuiltModel, request: ModelRequest) -> None:
    """Add adapters and freeze parameters by the run file. Raise InputError if it names layers that do not exist."""
    config = request.config
    freeze_unused(built.model)
    if config.lora is not None:
        generates = request.auto_class in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
        description = add_adapters(
            built.model,
            config.lora,
            base=config.from_ or "",
            generates=generates,
            new_modules=built.new_modules,
            seed=request.seed,
        )
        if built.weights is not None:
            built.weights.adapters = draw_first_weights(built.model)
        built.notes.append(f"{description}: {built.num_trainable:,} parameters are trained")
        if changes_context(config):
            note_changed_base(built.model)
    if config.freeze:
        freeze(built.model, config.freeze)
        built.notes.append(f"{built.num_trainable:,} parameters are trained, the others stay as they are")


def make_reproducible(model: PreTrainedModel) -> None:
    """Patch architectures whose forward pass depends on more than weights, inputs and PyTorch's random state.

    A resumed run must end with bitwise the same weights as an uninterrupted one. Dropout is drawn from a seed per step
    (`training/loop.py`). Two architectures of transformers 5.24 have other state:

    - Reformer's layers draw a seed from the operating system in each forward pass.
    - BigBird with block-sparse attention switches to full attention at the first batch of short rows and never switches
      back, so a step depends on earlier rows. The switch also draws weights that are discarded. The patch starts each
      forward pass with the configured attention, and the switch draws nothing.
    """
    for module in model.modules():
        if hasattr(module, "_init_attention_seed"):  # ReformerLayer
            module._init_attention_seed = partial(_draw_seed, module, "attention_seed")
            module._init_feed_forward_seed = partial(_draw_seed, module, "feed_forward_seed")
    for module in _find_attention_setters(model):
        module.set_attention_type = partial(_set_attention_type, module.set_attention_type)
        module.register_forward_pre_hook(partial(_reset_attention_type, module.attention_type))


def skip_padding_checks(model: PreTrainedModel) -> None:
    """Skip transformers' warning about padding without a mask: it reads token ids, so each forward pass would wait."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _ignore


def _ignore(*_: object, **__: object) -> None:
    pass


def _draw_seed(layer: nn.Module, name: str) -> None:
    """Seed PyTorch and store the seed in the layer, whose backward pass recomputes dropout with it."""
    seed = int(torch.randint(torch.iinfo(torch.int64).max, ()))
    setattr(layer, name, seed)
    torch.manual_seed(seed)


def _find_attention_setters(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost modules that set the attention of their submodules."""
    if hasattr(module, "set_attention_type"):
        yield module
        return
    for child in module.children():
        yield from _find_attention_setters(child)


def _set_attention_type(set_type: Callable[[str], None], name: str) -> None:
    with torch.device("meta"):  # BigBird then replaces these new projections by the old ones
        set_type(name)


def _reset_attention_type(name: str, module: Any, inputs: tuple[Any, ...]) -> None:
    module.set_attention_type(name)
