"""Pretrained models: loaded in full by transformers, or built on the meta device with a loading plan.

Weights come from safetensors, or from `pytorch_model.bin` without code. A pickle with code is refused before any of
it runs. A model's own code runs only if the run file names its repository.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.loading_report import log_state_dict_report

from artel.config import ModelConfig
from artel.errors import InputError
from artel.models.loading.conversion import LoadingPlan, plan_loading
from artel.models.loading.extra_tensors import note_left_out, note_saved_unchanged, remember_unused
from artel.models.loading.heads import is_unused, model_class
from artel.models.loading.init_weights import initialize_again
from artel.models.loading.language_part import (
    MultimodalModel,
    check_language_part,
    find_language_part,
    get_multimodal,
    is_multimodal,
    plan_multimodal,
    plan_part,
    set_multimodal,
)
from artel.models.loading.materialize import WeightSource, materialize
from artel.models.loading.missing_weights import (
    HeadRows,
    check_complete,
    check_grown,
    check_vocabulary,
    embedding_rows,
    find_head_rows,
    find_resized_heads,
)
from artel.models.loading.model_folder import is_quantized, loading_error
from artel.models.loading.on_meta import build_untied
from artel.models.loading.request import BuiltModel, ModelRequest
from artel.models.loading.safetensors_files import TensorFiles, check_shapes, find_files
from artel.models.loading.structure import build_without_weights, load_pretrained_config
from artel.models.quantization import keep_trainable_format, loading_options
from artel.tokens import Tokenizer

_logger = logging.getLogger("transformers.modeling_utils")  # transformers reports mismatched tensors there
_NO_MODULES: Mapping[str, int] = {}
_COMPARED_ROWS = 4096  # rows of two tensors to compare at a time


def load_pretrained(
    request: ModelRequest, tokenizer: Tokenizer, *, for_training: bool, adapter_modules: Mapping[str, int] = _NO_MODULES
) -> BuiltModel:
    """Load the full model with its weights.

    `adapter_modules`: modules whose weights are in an adapter, with their number of rows (0: unknown). For training,
    new heads may lack weights, and embeddings grow to the tokenizer's size. Raise InputError if the files do not fit.
    """
    name, runs_code, quantize = str(request.config.from_), request.config.runs_code, request.config.quantize
    config, notes = load_pretrained_config(request)
    if is_multimodal(config, request.auto_class):
        return _load_language_part(
            request, tokenizer, config, notes, for_training=for_training, adapter_modules=adapter_modules
        )
    with _convert_errors(name):
        reference = build_without_weights(config, request.auto_class, request.heads, runs_code)
        new_heads = find_resized_heads(reference, name, config) if for_training else set()
        rows = find_head_rows(request, config) if for_training else None
        check_shapes(reference, name, config, new_heads)
        options = loading_options(quantize, reference, [*adapter_modules]) if quantize != "none" else {}
        if new_heads:
            options["ignore_mismatched_sizes"] = True
        model, info = model_class(config, request.auto_class, request.heads, runs_code=runs_code).from_pretrained(
            name, config=config, dtype=torch.float32, trust_remote_code=False, output_loading_info=True, **options
        )
    keep_trainable_format(model)
    built = BuiltModel(model, notes)
    missing = set(info.get("missing_keys") or ()) | new_heads | (rows.tensors if rows else set())
    check_complete(model, name, missing, for_training=for_training, adapter_modules=adapter_modules)
    _note_missing(built, name, missing, rows)
    unexpected = set(info.get("unexpected_keys") or ())
    adapter_rows = embedding_rows(model, adapter_modules)
    if not for_training and adapter_rows is None:
        check_vocabulary(model, tokenizer, name)
        built.notes += _remember_unused(model, reference, name, config, unexpected, {})
        return built
    grown = grow_vocabulary(built, tokenizer, adapter_rows or 0)
    if not for_training:
        check_grown(model, grown, name, adapter_modules)
    built.notes += _remember_unused(model, reference, name, config, unexpected, grown)
    grow_vocabulary(BuiltModel(reference), tokenizer, adapter_rows or 0)
    initialize_again(model, reference, grown | dict.fromkeys(missing, 0), request.seed)
    if rows is not None:
        rows.copy_into(model, name)
    return built


def plan_pretrained(
    request: ModelRequest, tokenizer: Tokenizer, *, adapter_modules: Mapping[str, int] = _NO_MODULES
) -> BuiltModel:
    """Like `load_pretrained` for training, but on the meta device: `materialize` reads `weights` into the shards.

    Checks, notes and errors are the same, and need only the headers of the files.
    """
    name, runs_code = str(request.config.from_), request.config.runs_code
    config, notes = load_pretrained_config(request)
    if is_multimodal(config, request.auto_class):
        return _build_language_part(request, tokenizer, config, notes)
    with _convert_errors(name):
        model = build_untied(model_class(config, request.auto_class, request.heads, runs_code=runs_code), config)
        rows = find_head_rows(request, config)
        new_heads = find_resized_heads(model, name, config) | (rows.tensors if rows else set())
        check_shapes(model, name, config, new_heads)
        files, plan = _plan_files(model, name, config, new_heads)
        # Like from_pretrained, including errors.
        log_state_dict_report(model, name, False, plan.info, _logger)
        model.config.name_or_path = name
        model._weight_conversions = plan.used_entries
        read_generation_config(model, name)
    built = BuiltModel(model.eval(), notes)
    check_complete(model, name, plan.info.missing_keys, for_training=True, adapter_modules=adapter_modules)
    _note_missing(built, name, plan.info.missing_keys, rows)
    grown = grow_vocabulary(built, tokenizer)
    built.notes += remember_unused(model, name, files, plan.unused, grown)
    built.weights = WeightSource(copy.deepcopy(model), request.seed, files, plan, grown)
    if rows is not None:
        built.weights.kept_rows = dict.fromkeys(rows.tensors, rows.old_rows)
    return built


def check_saved(name: str, config: PreTrainedConfig, model_class: Any, *, for_training: bool) -> None:
    """Raise InputError if a folder lacks weights of a model class. Reads no weights."""
    if is_quantized(config):
        return  # packed weights have other names and shapes; loading them reports missing ones
    with _convert_errors(name):
        model = build_untied(model_class, config)
        new_heads = find_resized_heads(model, name, config) if for_training else set()
        if not for_training:
            check_shapes(model, name, config)
        _, plan = _plan_files(model, name, config, new_heads)
    check_complete(model, name, plan.info.missing_keys, for_training=for_training)


def check_multimodal(config: ModelConfig, saved: PreTrainedConfig) -> None:
    """Raise InputError if the language part of a multimodal model cannot be used, because it is quantized."""
    if is_quantized(saved):
        what = f"{config.from_}: quantized weights of a model that takes images cannot be trained"
        raise InputError.at("model.from", what, "use the model before quantization; model.quantize quantizes it")


def plan_language_part(
    config: ModelConfig, saved: PreTrainedConfig
) -> tuple[PreTrainedModel, TensorFiles, LoadingPlan]:
    """Return the language part of a multimodal model on the meta device, tied, with its files and loading plan.

    Reads no weights. Raise InputError, also if the files lack weights of the language part.
    """
    name = str(config.from_)
    check_multimodal(config, saved)
    with _convert_errors(name):
        model, multimodal = find_language_part(saved, name)
        files = find_files(name, saved)
        if not files.have_headers:
            what = f"{name} takes images, but its weights are in pytorch_model.bin, so it cannot be saved in its format"
            raise InputError.at("model.from", what, "save it again as safetensors: save_pretrained of transformers 5")
        check_shapes(multimodal.model, name, saved)
        with files:
            plan = plan_part(multimodal, plan_multimodal(multimodal, files))
            _tie(model, files, plan)
        model._adjust_missing_and_unexpected_keys(plan.info)  # like from_pretrained
        read_generation_config(model, name)
    check_complete(model, name, plan.info.missing_keys, for_training=False)
    with _convert_errors(name):
        log_state_dict_report(model, name, False, plan.info, _logger)  # raises if shapes differ
    set_multimodal(model, multimodal)
    return model.eval(), files, plan


def _build_language_part(
    request: ModelRequest,
    tokenizer: Tokenizer,
    config: PreTrainedConfig,
    notes: list[str],
    *,
    for_training: bool = True,
    adapter_modules: Mapping[str, int] = _NO_MODULES,
) -> BuiltModel:
    """Build a language part on the meta device, with the source of its weights."""
    name = str(request.config.from_)
    model, files, plan = plan_language_part(request.config, config)
    model_type = model.config.model_type
    built = BuiltModel(model, [*notes, f"{name} takes images: only its language part ({model_type}) is trained"])
    if plan.unused:
        built.notes.append(note_saved_unchanged(name, plan.unused))
    grown: dict[str, int] = {}
    multimodal = get_multimodal(model)
    assert multimodal is not None
    rows = embedding_rows(
        model, {multimodal.name_in_part(module) or module: rows for module, rows in adapter_modules.items()}
    )
    if for_training or rows is not None:
        grown = grow_vocabulary(built, tokenizer, rows or 0)
    else:
        check_vocabulary(model, tokenizer, name)
    built.weights = WeightSource(copy.deepcopy(model), request.seed, files, plan, grown)
    return built


def _load_language_part(
    request: ModelRequest,
    tokenizer: Tokenizer,
    config: PreTrainedConfig,
    notes: list[str],
    *,
    for_training: bool,
    adapter_modules: Mapping[str, int],
) -> BuiltModel:
    """Load a language part and test it against the whole model, whose names `adapter_modules` may use."""
    built = _build_language_part(
        request, tokenizer, config, notes, for_training=for_training, adapter_modules=adapter_modules
    )
    multimodal = get_multimodal(built.model)
    assert built.weights is not None
    assert multimodal is not None
    materialize(built.model, built.weights, device="cpu")
    if request.config.quantize != "none":
        full_modules = [multimodal.name_in_part(name) or name for name in adapter_modules]
        built.model = _quantize_language_part(
            built.model, multimodal, built.weights.reference, request.config.quantize, full_modules
        )
    built.weights = None
    check_language_part(built.model)
    return built


def _quantize_language_part(
    model: PreTrainedModel,
    multimodal: MultimodalModel,
    reference: PreTrainedModel,
    quantize: str,
    full_modules: Sequence[str],
) -> PreTrainedModel:
    """Return a language part with the weights of `model` in 8 or 4 bits. `full_modules`: modules trained in full."""
    options = loading_options(quantize, reference, full_modules)
    quantized: PreTrainedModel = type(model).from_pretrained(
        None, config=model.config, state_dict=model.state_dict(), dtype=torch.float32, **options
    )
    quantized.config.name_or_path = model.config.name_or_path
    quantized.generation_config = model.generation_config
    set_multimodal(quantized, multimodal)
    keep_trainable_format(quantized)
    return quantized


@contextmanager
def _convert_errors(name: str) -> Iterator[None]:
    """Convert all errors in loading to InputError: the hub, safetensors and architectures raise various ones."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise loading_error(name, error) from None


def _remember_unused(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    name: str,
    config: PreTrainedConfig,
    unexpected: set[str],
    grown: dict[str, int],
) -> list[str]:
    """Remember the tensors that `model` does not use, to save them with it. Return notes for the user.

    `reference`: the model on the meta device. With quantized weights they are left out.
    """
    files = find_files(name, config)
    with files:
        if not is_quantized(config):
            unused = plan_loading(reference, files).unused
        else:
            patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
            unused = [key for key in files.names if any(pattern.search(key) for pattern in patterns)]
    if is_quantized(config):
        return note_left_out(model, name, {*unused, *unexpected}) if unused or unexpected else []
    return remember_unused(model, name, files, unused, grown)


def _note_missing(built: BuiltModel, name: str, missing: set[str], rows: HeadRows | None) -> None:
    """Add notes about tensors that a model's files lack, and about moved rows of its head."""
    new_names = sorted(key for key in missing if not is_unused(built.model, key))
    built.new_modules += dict.fromkeys(key.rpartition(".")[0] for key in new_names)
    if rows is not None:
        built.notes.append(rows.note)
        new_names = [key for key in new_names if key not in rows.tensors]
    if new_names:
        built.notes.append(f"not in {name}, so newly initialized: {', '.join(new_names)}")


def grow_vocabulary(built: BuiltModel, tokenizer: Tokenizer, min_rows: int = 0) -> dict[str, int]:
    """Resize the embeddings to the tokenizer's number of ids, or `min_rows` if that is more.

    Return the old number of rows of each resized parameter.
    """
    model = built.model
    old_rows = model.get_input_embeddings().weight.shape[0]
    new_rows = max(tokenizer.vocabulary, min_rows)
    if new_rows <= old_rows:
        return {}
    old_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.resize_token_embeddings(new_rows, mean_resizing=False)
    embedding_layers = (model.get_input_embeddings(), model.get_output_embeddings())
    built.new_modules += [
        name for name, module in model.named_modules() if any(module is layer for layer in embedding_layers)
    ]
    built.notes.append(
        f"the tokenizer has {tokenizer.vocabulary} ids, the model had {old_rows} embeddings: "
        f"{new_rows - old_rows} new ones were added, newly initialized"
    )
    new_parameters = dict(model.named_parameters())
    return {
        name: shape[0]
        for name, shape in old_shapes.items()
        if name in new_parameters and new_parameters[name].shape != shape
    }


def _plan_files(
    model: PreTrainedModel, name: str, config: PreTrainedConfig, left_out: Collection[str]
) -> tuple[TensorFiles, LoadingPlan]:
    """Return (a saved model's files, the loading plan of `model` without `left_out`). Tie `model` like the files."""
    files = find_files(name, config)
    with files:
        plan = plan_loading(model, files)
        plan.leave_out(left_out)
        _tie(model, files, plan)
    model._adjust_missing_and_unexpected_keys(plan.info)  # like from_pretrained
    return files, plan


def _tie(model: PreTrainedModel, files: TensorFiles, plan: LoadingPlan) -> None:
    """Tie the tensors that the architecture ties, unless both are saved and differ."""
    missing = plan.info.missing_keys
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in missing or source in missing:
            continue
        if _are_equal(files, plan.key_of_target.get(target), plan.key_of_target.get(source)):
            missing.add(target)
        else:
            _logger.warning("%s and %s are tied in this model but not in its files, so not tied", source, target)
            model.all_tied_weights_keys.pop(target)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)


def _are_equal(files: TensorFiles, first: str | None, second: str | None) -> bool:
    """True if two saved tensors are equal. Reads a few rows at a time."""
    if first is None or second is None or files.shape(first) != files.shape(second):
        return False
    spans = [slice(start, start + _COMPARED_ROWS) for start in range(0, files.shape(first)[0], _COMPARED_ROWS)]
    return all(torch.equal(files.read(first, (span,)), files.read(second, (span,))) for span in spans)


def read_generation_config(model: PreTrainedModel, name: str) -> None:
    """Load the generation config of the saved model `name`, so that `model` is saved with it."""
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):
        hub = {"cache_dir": None, "force_download": False, "proxies": None, "local_files_only": False, "token": None}
        model.adjust_generation_fn(
            None, False, None, name, **hub, revision="main", subfolder="", trust_remote_code=False
        )
