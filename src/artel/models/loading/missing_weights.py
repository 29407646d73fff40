"""Checks that a loaded model has all weights, and moves rows of heads whose labels changed.

Only heads that will be trained may be initialized, and no weight may be NaN. A classification head has one row per
label. Further training may list the labels in another order or have other labels. Rows follow the names of their labels
(`id2label` of both configurations), and only rows of new labels are initialized.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from artel.errors import InputError
from artel.models.loading.heads import is_unused
from artel.models.loading.materialize import fill_rows
from artel.models.loading.model_folder import read_config
from artel.models.loading.request import ModelRequest
from artel.models.loading.safetensors_files import find_files
from artel.models.loading.structure import build_without_weights
from artel.printable import join_names
from artel.tokens import Tokenizer


def check_complete(
    model: PreTrainedModel,
    name: str,
    missing: Collection[str],
    *,
    for_training: bool,
    adapter_modules: Collection[str] = (),
) -> None:
    """Raise InputError if weights are missing that must not be initialized.

    `missing`: the model's tensors that are not in the folder or hub id `name`. A model `for_training` may have new
    heads. `adapter_modules`: modules whose weights come from an adapter; a name matches all modules that end with it.
    """
    required = sorted(key for key in missing if not any(_is_inside(key, module) for module in adapter_modules))
    required = [key for key in required if not is_unused(model, key)]
    if for_training and required:
        body = _body_tensor_names(model)
        required = [key for key in required if key in body]
    if not required:
        return
    fix = "use a folder with all of its weights"
    if len(required) > len(model.state_dict()) // 2:
        fix = "the weights and config.json are of different models"
    raise InputError.at("model.from", f"{name} has no weights for {join_names(required)}", fix)


def find_resized_heads(model: PreTrainedModel, name: str, config: PreTrainedConfig) -> set[str]:
    """Return the names of head tensors that have other sizes in a model's files (for other labels)."""
    files = find_files(name, config)
    if not files.have_headers:
        return set()
    body = _body_tensor_names(model)
    with files:
        saved_names = set(files.names)
        heads = {key: tuple(tensor.shape) for key, tensor in model.named_parameters() if key not in body}
        return {key for key, shape in heads.items() if key in saved_names and files.shape(key) != shape}


def check_finite(model: PreTrainedModel, name: str) -> None:
    """Raise InputError if weights are NaN or infinite. Reads each weight once."""
    invalid_names = [
        key
        for key, tensor in model.named_parameters()
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all()
    ]
    if invalid_names:
        what = f"has NaN or infinite weights: {join_names(invalid_names)}"
        raise InputError.at(name, what, "use an earlier checkpoint, or the model as published")


def embedding_rows(model: PreTrainedModel, modules: Mapping[str, int]) -> int | None:
    """Return the number of rows of the input embeddings if they are in one of `modules`, else None."""
    embeddings = model.get_input_embeddings()
    key = next(name for name, module in model.named_modules() if module is embeddings)
    return max((rows for module, rows in modules.items() if _is_inside(f"{key}.weight", module)), default=None)


def check_grown(model: PreTrainedModel, grown: Collection[str], name: str, modules: Collection[str]) -> None:
    """Raise InputError if a matrix of the base model `name` has `grown` but is not in the adapter's `modules`.

    Its new rows would be random.
    """
    matrices = {key for key, parameter in model.named_parameters() if parameter.dim() > 1}
    uninitialized = [key for key in grown if key in matrices and not any(_is_inside(key, module) for module in modules)]
    if uninitialized:
        what = f"an adapter brings new tokens to {name}, but no weights of these for {join_names(uninitialized)}"
        raise InputError.at("model.from", what, "save it again with these modules in modules_to_save")


def check_vocabulary(model: PreTrainedModel, tokenizer: Tokenizer, name: str) -> None:
    """Raise InputError if a text may have tokens without an embedding.

    Special tokens that are not needed here (padding, markers of conversations) may lack one.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.vocabulary <= rows:
        return
    hf = tokenizer.hf
    added = {token_id for token_id, token in hf.added_tokens_decoder.items() if token.special}
    used = {hf.bos_token_id, hf.cls_token_id, hf.sep_token_id, hf.mask_token_id, hf.unk_token_id, tokenizer.end_id}
    missing_ids = sorted(
        token_id for token_id in hf.get_vocab().values() if token_id >= rows and token_id not in added - used
    )
    if missing_ids:
        what = (
            f"{name}: its tokenizer has {len(missing_ids)} tokens that its model has no embedding for, from "
            f"{hf.convert_ids_to_tokens(missing_ids[0])!r} on (id {missing_ids[0]:,} of {rows:,})"
        )
        raise InputError.at("model.from", what, "use the model with the tokenizer that it was trained with")


def _body_tensor_names(model: PreTrainedModel) -> set[str]:
    """Return the names of a model's tensors without its heads.

    A `pooler` after the last layer counts as part of a classification head: masked models of the same architecture
    (BERT) are saved without it.
    """
    base, output = model.base_model, model.get_output_embeddings()
    heads = _find_head_modules(model) if base is model else set()
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


def _find_head_modules(model: PreTrainedModel) -> set[str]:
    """Return the modules that the headless architecture lacks, if it has all the remaining ones (T5)."""
    base_class = MODEL_MAPPING.get(type(model.config), None)
    if not (isinstance(base_class, type) and issubclass(base_class, PreTrainedModel)) or isinstance(model, base_class):
        return set()
    with torch.device("meta"):
        body = {name for name, _ in base_class(copy.deepcopy(model.config)).named_children()}
    children = {name for name, _ in model.named_children()}
    return children - body if body < children else set()


def _is_inside(key: str, module: str) -> bool:
    return f".{module}." in f".{key}"


_UNNAMED = re.compile(r"LABEL_([0-9]+)")
"""transformers' name for a label without a name."""
_MAX_LISTED = 12


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows kept from a pretrained head whose labels, or their order, differ from those of the run."""

    tensors: frozenset[str]
    """Parameters with one row per label, by name."""
    old_rows: Mapping[int, int]
    """Kept rows: row in the model -> row in the files."""
    note: str

    def copy_into(self, model: PreTrainedModel, name: str) -> None:
        """Copy the kept rows from the files of the folder or hub id `name` into a model in memory."""
        parameters = dict(model.named_parameters())
        with find_files(name, model.config) as files, torch.no_grad():
            for tensor in self.tensors:
                fill_rows(parameters[tensor], files.read(tensor), self.old_rows)


def find_head_rows(request: ModelRequest, config: PreTrainedConfig) -> HeadRows | None:
    """Return the rows of a pretrained head that have to move, or None if the head is loaded unchanged.

    `config`: the configuration with the labels of the run. Reads no weights.
    """
    if "id2label" not in request.head_config:
        return None
    name, runs_code = str(request.config.from_), request.config.runs_code
    saved, _ = read_config(name, runs_code=runs_code)
    old, new = _ordered_labels(saved), _ordered_labels(config)
    if old == new or len(old) == len(new) == 1:  # a single output has no order
        return None
    with find_files(name, saved) as files:
        tensors = frozenset(_find_label_tensors(request, config) & set(files.names))
    if not tensors:
        return None
    old_rows = _match_rows(old, new)
    return HeadRows(tensors, old_rows, _describe_rows(name, old, new, old_rows))


def _ordered_labels(config: PreTrainedConfig) -> list[str]:
    return [str(config.id2label[label_id]) for label_id in sorted(config.id2label)]


def _find_label_tensors(request: ModelRequest, config: PreTrainedConfig) -> set[str]:
    """Return the names of parameters that get one more row with one more label."""
    larger = copy.deepcopy(config)
    larger.num_labels = config.num_labels + 1
    shapes = [
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for model in (
            build_without_weights(head_config, request.auto_class, request.heads, request.config.runs_code)
            for head_config in (config, larger)
        )
    ]
    small, large = shapes
    return {name for name, shape in small.items() if shape and large[name] == (shape[0] + 1, *shape[1:])}


def _match_rows(old: Sequence[str], new: Sequence[str]) -> dict[int, int]:
    """Map each new row with a label of the saved head to the saved row.

    Case is ignored, unless labels differ only by it. LABEL_3 is label 3. If the new labels have names, the saved ones
    have none, and there are equally many, rows keep their order.
    """
    if all(_UNNAMED.fullmatch(label) for label in old) and not any(_UNNAMED.fullmatch(label) for label in new):
        old = [label.removeprefix("LABEL_") for label in old]
        if len(old) == len(new) and not set(old) & set(new):
            return {row: row for row in range(len(new))}
    exact = {label: row for row, label in enumerate(old)}
    old_rows = {row: exact[label] for row, label in enumerate(new) if label in exact}
    folded_old, folded_new = ([label.casefold() for label in labels] for labels in (old, new))
    saved_row_of = {label: row for row, label in enumerate(folded_old)}
    counts = Counter(folded_old), Counter(folded_new)
    for row, label in enumerate(folded_new):
        if row not in old_rows and all(count[label] == 1 for count in counts):
            old_rows[row] = saved_row_of[label]
    return old_rows


def _describe_rows(name: str, old: Sequence[str], new: Sequence[str], old_rows: Mapping[int, int]) -> str:
    """Return the note for the user: labels whose rows are kept, initialized and left out."""
    rows = [
        new[row] if new[row] == old[old_row] else f"{new[row]} (there {old[old_row]})"
        for row, old_row in old_rows.items()
    ]
    new_labels = [label for row, label in enumerate(new) if row not in old_rows]
    left_out = [old[row] for row in sorted({*range(len(old))} - {*old_rows.values()})]
    groups = (("rows kept", rows), ("newly initialized", new_labels), ("left out", left_out))
    clauses = [f"{title}: {join_names(labels, _MAX_LISTED)}" for title, labels in groups if labels]
    note = f"head of {name}, by label: {'; '.join(clauses)}"
    if rows and not new_labels and all(_UNNAMED.fullmatch(label) for label in old) and not any(map(str.isdigit, new)):
        note += ". Its labels have no names there: if this is not their order, write the labels in it"
    return note
