"""The model of a run without its weights: on the meta device, to be taken apart before any of them is read or drawn.

What `build_model` checks and tells is checked and told here, by the headers of the files. `materialize` then puts into
each process what it holds.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_tie_weights
from transformers.utils.loading_report import log_state_dict_report

from artel.config import ModelConfig
from artel.errors import InputError
from artel.models.loading.build import (
    Built,
    check_positions,
    finish,
    from_scratch,
    grow_vocabulary,
    pretrained_config,
    tell_what_differs,
)
from artel.models.loading.conversion import Loading, plan_loading
from artel.models.loading.heads import check_sizes, model_class
from artel.models.loading.materialize import Weights
from artel.models.loading.missing_weights import check_lacking
from artel.models.loading.model_folder import cannot_load, read_config
from artel.models.loading.safetensors_files import TensorFiles, check_shapes, find_files
from artel.tokens import Tokenizer

_logger = logging.getLogger("transformers.modeling_utils")  # who tells of tensors that do not fit
_ROWS = 4096  # of two tables that are compared, at a time


@dataclass(slots=True)
class Skeleton(Built):
    """A model on the meta device, and where its weights come from."""

    weights: Weights = field(kw_only=True)


def can_be_sharded_while_loading(wanted: ModelConfig) -> str | None:
    """Why a model must be built whole in every process before it is taken apart; None where it need not."""
    if wanted.quantise != "none":
        return "model.quantise: weights are quantised while they are loaded whole"
    if wanted.lora is not None:
        return "model.lora: adapters are put into the whole model"
    return None


def build_skeleton(
    wanted: ModelConfig,
    tokenizer: Tokenizer,
    *,
    auto_class: str,
    block: int,
    seed: int,
    heads: dict[str, int] | None = None,
) -> Skeleton:
    """What `build_model` builds, with its checks, notes and errors, but without weights: `materialize` brings them.

    Not for a model that must be built whole (`can_be_sharded_while_loading`). Raises InputError.
    """
    assert can_be_sharded_while_loading(wanted) is None
    torch.manual_seed(seed)
    files, loading = None, None
    if wanted.from_ is not None:
        built, files, loading = _pretrained(wanted.from_, auto_class, heads or {}, wanted.runs_code)
    else:
        built = from_scratch(wanted.config, tokenizer, auto_class, heads or {}, block)
    grown = grow_vocabulary(built, tokenizer)
    check_positions(built.model, block)
    weights = Weights(copy.deepcopy(built.model), seed, files, loading, grown)
    finish(built, wanted, auto_class, seed)
    return Skeleton(built.model, built.notes, built.anew, weights=weights)


def _pretrained(
    name: str, auto_class: str, heads: dict[str, int], runs_code: bool
) -> tuple[Built, TensorFiles, Loading]:
    config, notes = pretrained_config(name, auto_class, runs_code=runs_code)
    try:
        model = _untied(config, model_class(config, auto_class, heads, runs_code=runs_code))
        check_shapes(model, name, config)
        files, loading = _plan(model, name, config)
        # As from_pretrained does it, errors and all.
        log_state_dict_report(model, name, False, loading.info, _logger)
        model.config.name_or_path = name
        model._weight_conversions = loading.used
        read_generation_config(model, name)
    except InputError:
        raise
    except Exception as error:  # the hub, the file system, safetensors and each architecture raise their own kinds
        raise cannot_load(name, error) from None
    built = Built(model.eval(), notes)
    check_lacking(model, name, loading.info.missing_keys, learns=True)
    tell_what_differs(built, name, loading.info.missing_keys, loading.info.unexpected_keys)
    return built, files, loading


def check_pretrained(wanted: ModelConfig, auto_class: str) -> None:
    """Raise InputError where the folder of a run's pretrained model lacks weights; no number in it is read."""
    if wanted.from_ is not None and Path(wanted.from_).is_dir():
        config, _ = read_config(wanted.from_, runs_code=wanted.runs_code)
        _check_saved(wanted.from_, config, model_class(config, auto_class, {}, runs_code=wanted.runs_code), learns=True)


def check_whole(name: str) -> None:
    """Raise InputError where a folder lacks weights of the class that its config.json names, if transformers has it."""
    config, _ = read_config(name)
    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
        _check_saved(name, config, kind, learns=False)


def _check_saved(name: str, config: PreTrainedConfig, kind: Any, *, learns: bool) -> None:
    check_sizes(config)
    if getattr(config, "quantization_config", None) is not None:
        return  # packed weights have names and shapes of their own: loading them shows what is missing
    try:
        model = _untied(config, kind)
        if not learns:
            check_shapes(model, name, config)
        _, loading = _plan(model, name, config)
    except InputError:
        raise
    except Exception as error:  # each architecture refuses sizes in its own way, each format of files likewise
        raise cannot_load(name, error) from None
    check_lacking(model, name, loading.info.missing_keys, learns=learns)


def _plan(model: PreTrainedModel, name: str, config: PreTrainedConfig) -> tuple[TensorFiles, Loading]:
    """The files of a saved model, and what `model` takes from them; it is tied as they are."""
    files = find_files(name, config)
    with files:
        loading = plan_loading(model, files)
        _tie(model, files, loading)
    model._adjust_missing_and_unexpected_keys(loading.info)  # as from_pretrained does it
    return files, loading


def _untied(config: PreTrainedConfig, kind: Any) -> PreTrainedModel:
    with torch.device("meta"), no_tie_weights():
        return kind._from_config(copy.deepcopy(config), dtype=torch.float32)


def _tie(model: PreTrainedModel, files: TensorFiles, loading: Loading) -> None:
    """Tie what the architecture ties, but for two tensors that are both saved and are not the same."""
    missing = loading.info.missing_keys
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in missing or source in missing:
            continue
        if _are_same(files, loading.same.get(target), loading.same.get(source)):
            missing.add(target)
        else:
            _logger.warning("%s and %s are tied in this model but not in its files, so not tied", source, target)
            model.all_tied_weights_keys.pop(target)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)


def _are_same(files: TensorFiles, one: str | None, other: str | None) -> bool:
    """Whether two tensors are equal; read some rows at a time."""
    if one is None or other is None or files.shape(one) != files.shape(other):
        return False
    spans = [slice(start, start + _ROWS) for start in range(0, files.shape(one)[0], _ROWS)]
    return all(torch.equal(files.read(one, (span,)), files.read(other, (span,))) for span in spans)


def read_generation_config(model: PreTrainedModel, name: str) -> None:
    """How the saved model generates, where it says so: what is trained from it is saved with the same."""
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):
        model.adjust_generation_fn(
            None, False, None, name, cache_dir=None, force_download=False, proxies=None, local_files_only=False,
            token=None, revision="main", subfolder="", trust_remote_code=False,
        )  # fmt: skip
