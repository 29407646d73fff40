"""Checks that a loaded model is complete: only heads to be trained may be initialized, and no weight may be NaN."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping

import torch
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from artel.errors import InputError
from artel.models.loading.heads import is_unused
from artel.models.loading.safetensors_files import find_files
from artel.printable import listed
from artel.tokens import Tokenizer


def check_complete(
    model: PreTrainedModel, name: str, missing: Collection[str], *, for_training: bool, elsewhere: Collection[str] = ()
) -> None:
    """Raise InputError where weights are missing that cannot be initialized.

    `missing` are the model's tensors that the folder or hub id `name` lacks. A model `for_training` may have new heads.
    `elsewhere` are modules whose weights come from an adapter; a name stands for all modules that end with it.
    """
    lacking = sorted(key for key in missing if not any(_is_inside(key, module) for module in elsewhere))
    lacking = [key for key in lacking if not is_unused(model, key)]
    if for_training and lacking:
        body = _body(model)
        lacking = [key for key in lacking if key in body]
    if not lacking:
        return
    fix = "give the folder with all of its weights: they are not made up"
    if len(lacking) > len(model.state_dict()) // 2:
        fix = "the weights and config.json are of different models"
    raise InputError.at("model.from", f"{name} has no weights for {listed(lacking)}", fix)


def heads_of_other_sizes(model: PreTrainedModel, name: str, config: PreTrainedConfig) -> set[str]:
    """Names of the head's tensors that the files of a model have in other sizes: for other labels, say."""
    files = find_files(name, config)
    if not files.have_headers:
        return set()
    body = _body(model)
    with files:
        saved_names = set(files.names)
        heads = {key: tuple(tensor.shape) for key, tensor in model.named_parameters() if key not in body}
        return {key for key, shape in heads.items() if key in saved_names and files.shape(key) != shape}


def check_finite(model: PreTrainedModel, name: str) -> None:
    """Raise InputError where weights are NaN or infinite. Each weight is read once."""
    broken = [
        key
        for key, tensor in model.named_parameters()
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all()
    ]
    if broken:
        what = f"has NaN or infinite weights: {listed(broken)}"
        raise InputError.at(name, what, "take an earlier checkpoint, or the model as it was published")


def embedding_rows(model: PreTrainedModel, modules: Mapping[str, int]) -> int | None:
    """The rows of the input embeddings if they are one of `modules`, or inside one; else None."""
    embeddings = model.get_input_embeddings()
    key = next(name for name, module in model.named_modules() if module is embeddings)
    return max((rows for module, rows in modules.items() if _is_inside(f"{key}.weight", module)), default=None)


def check_grown(model: PreTrainedModel, grown: Collection[str], name: str, modules: Collection[str]) -> None:
    """Raise InputError if a matrix of the base model `name` has `grown` and an adapter brings none of its `modules`.

    Its new rows would be random numbers.
    """
    matrices = {key for key, parameter in model.named_parameters() if parameter.dim() > 1}
    lacking = [key for key in grown if key in matrices and not any(_is_inside(key, module) for module in modules)]
    if lacking:
        what = f"an adapter brings new tokens to {name}, but no weights of these for {listed(lacking)}"
        raise InputError.at("model.from", what, "save it again with these modules in modules_to_save")


def check_vocabulary(model: PreTrainedModel, tokenizer: Tokenizer, name: str) -> None:
    """Raise InputError where a text can have tokens without an embedding.

    Special tokens that this use does not need (padding, marks of conversations) may lack one.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.vocabulary <= rows:
        return
    hf = tokenizer.hf
    added = {number for number, token in hf.added_tokens_decoder.items() if token.special}
    used = {hf.bos_token_id, hf.cls_token_id, hf.sep_token_id, hf.mask_token_id, hf.unk_token_id, tokenizer.end_id}
    beyond = sorted(number for number in hf.get_vocab().values() if number >= rows and number not in added - used)
    if beyond:
        what = (
            f"{name}: its tokenizer has {len(beyond)} tokens that its model has no embedding for, from "
            f"{hf.convert_ids_to_tokens(beyond[0])!r} on (id {beyond[0]:,} of {rows:,})"
        )
        raise InputError.at("model.from", what, "give the model with the tokenizer that it was trained with")


def _body(model: PreTrainedModel) -> set[str]:
    """Names of the tensors of a model without its heads.

    A layer `pooler` behind the last one belongs to the head of models that label texts: masked models of the same
    architecture (BERT) are saved without it.
    """
    base, output = model.base_model, model.get_output_embeddings()
    heads = _modules_beside_body(model) if base is model else set()
    body = next(module_name for module_name, module in model.named_modules() if module is base)
    head = next((module_name for module_name, module in model.named_modules() if module is output), None)
    return {
        key
        for key in model.state_dict()
        if key.startswith(f"{body}." if body else "")
        and not (head is not None and key.startswith(f"{head}."))
        and key.partition(".")[0] not in heads
        and not (body and key.startswith(f"{body}.pooler."))
    }


def _modules_beside_body(model: PreTrainedModel) -> set[str]:
    """The modules that the architecture without a head lacks, where it has all the others (T5)."""
    bare = MODEL_MAPPING.get(type(model.config), None)
    if not (isinstance(bare, type) and issubclass(bare, PreTrainedModel)) or isinstance(model, bare):
        return set()
    with torch.device("meta"):
        body = {name for name, _ in bare(copy.deepcopy(model.config)).named_children()}
    own = {name for name, _ in model.named_children()}
    return own - body if body < own else set()


def _is_inside(key: str, module: str) -> bool:
    return f".{module}." in f".{key}"
