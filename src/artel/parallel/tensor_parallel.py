"""Tensor parallelism: the matrices of each layer and the vocabulary split over processes (Megatron-LM, 2019).

Split parameters become DTensors over the tensor mesh, and `fully_shard` may shard them again. Unsplit
parameters stay plain tensors with the same values and the same complete gradients on every process.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from artel.errors import InputError, Problem
from artel.integers import ceil_div
from artel.models.compile import repeated_layers
from artel.models.experts import adapted_experts, find_experts
from artel.models.half_base import HalfConv1D, HalfEmbedding, HalfLinear
from artel.parallel.mesh import format_divisors
from artel.parallel.tensor_plans import Plan, Split, read_plan, wildcards
from artel.parallel.tensor_styles import (
    ColumnParallel,
    ExpertParallel,
    FusedColumnParallel,
    RowParallel,
    SequenceSplit,
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_sequence_around,
    keep_local,
    share_inputs,
    split_parameter,
    split_sequence,
    sum_gradients,
)

_KEY = "parallel.tensor"
_SPLIT_BY_OUTPUTS = (Split.COLUMNS, Split.GATHERED_COLUMNS, Split.FUSED)
_SPLIT_BY_INPUTS = (Split.ROWS, Split.ROWS_OF_FULL_INPUT)


def tensor_problems(model: PreTrainedModel, size: int, *, sequence: bool) -> list[Problem]:
    """Return the reasons why a model cannot be split over `size` processes.

    The model may be on the meta device, with adapters. `sequence`: also split tensors between the matrices, by
    sequence.
    """
    model_type = model.config.model_type
    plan = read_plan(model)
    if getattr(model, "is_quantized", False):
        return [
            Problem(_KEY, "quantized matrices cannot be split", "write model.quantize: none, or parallel.tensor: 1")
        ]
    if plan.unknown:
        what = f"transformers splits {model_type} in ways that artel does not support: {', '.join(plan.unknown)}"
        return [Problem(_KEY, what, f"write {_KEY}: 1")]
    if not plan.splits:
        what = f"neither transformers nor artel can split {model_type}"
        return [Problem(_KEY, what, f"write {_KEY}: 1, or split it another way (parallel.data, parallel.pipeline)")]
    problems = _size_problems(model, plan, size) + _layer_problems(model, plan)
    if adapted_experts(model):
        what = "model.lora.target names experts, whose adapters cannot be split"
        problems.append(Problem(_KEY, what, f"remove them from the target, or set {_KEY}: 1"))
    return problems + (_sequence_problems(model, plan) if sequence else [])


def split_by_tensor(model: PreTrainedModel, mesh: DeviceMesh, *, sequence: bool) -> str:
    """Split a model in place over `mesh` (1-D, dimension `tensor`). Return a summary for the log.

    The model may be on the meta device; otherwise its weights must be the same on all processes. `tensor_problems` must
    have found none. Call `split_experts` first: experts that it has sharded stay as they are. From then on all
    processes of the mesh need the same batches and the same dropout.
    """
    plan = read_plan(model)
    modules = dict(model.named_modules())
    sequence_split = SequenceSplit() if sequence else None
    replicated_experts = {
        name
        for name, split in plan.splits.items()
        if split is Split.EXPERTS and not _can_split_experts(modules[name], mesh)
    }
    gathering_names = _gathering_modules(modules, plan)
    for name, split in plan.splits.items():
        is_gathered = any(name.startswith(f"{outer}.") for outer in gathering_names)
        if name not in replicated_experts:
            layer_sequence = None if is_gathered else sequence_split
            _split_layer(modules[name], split, plan.fused_counts.get(name, 1), mesh, layer_sequence)
    for name, key in plan.divided:
        setattr(modules[name], key, getattr(modules[name], key) // mesh.size())
    for name in dict.fromkeys(_parent(name) for name, split in plan.splits.items() if split in _SPLIT_BY_OUTPUTS):
        if name not in gathering_names:
            share_inputs(modules[name], mesh, sequence_split)
    if sequence_split is not None:
        _split_sequences_between_matrices(model, modules, plan, gathering_names, mesh, sequence_split)
    vocabulary = _split_vocabulary(model, mesh)
    counts = Counter(
        "experts" if split is Split.EXPERTS else "matrices"
        for split in plan.splits.values()
        if split is not Split.SUMMED
    )
    summary = [f"{counts['matrices']} matrices"]
    if counts["experts"]:
        summary.append("experts" if not replicated_experts else "experts not")
    summary += ["vocabulary"] * vocabulary + ["sequences between them"] * sequence
    return f"split over {mesh.size()} processes: {', '.join(summary)}"


def shard_dimension(parameter: torch.Tensor, shards: int) -> Shard | None:
    """Return the dimension that fully_shard must split over `shards` processes, or None for the first.

    This is its `shard_placement_fn`. If the vocabulary does not divide, the last process has a smaller shard. DTensor
    reassembles shards of such shards in the wrong order (torch 2.13: `_StridedShard` assumes equal sizes), and
    checkpoints would be wrong. Splitting columns is right. Raise InputError if the columns do not divide either.
    """
    if not isinstance(parameter, DTensor) or shards == 1 or not parameter.placements[0].is_shard(0):
        return None
    vocabulary = parameter.shape[0]
    size = parameter.device_mesh.size()
    if vocabulary % size == 0:
        return None
    if parameter.ndim == 2 and parameter.shape[1] % shards == 0:
        return Shard(1)
    largest_shard = ceil_div(vocabulary, size)
    smallest_shard = vocabulary - largest_shard * (size - 1)
    # The order is right if each inner shard has the rounded-up size that DTensor assumes.
    for rank in range(shards):
        inner, last_inner = (_shard_size(length, shards, rank) for length in (largest_shard, smallest_shard))
        if inner != ceil_div(inner * (size - 1) + last_inner, size):
            what = f"a vocabulary of {vocabulary:,} cannot be sharded over {size} x {shards} processes"
            raise InputError.at(_KEY, what, f"write {_KEY}: 1, or model.config.vocab_size: {largest_shard * size}")
    return None


def _shard_size(length: int, shards: int, rank: int) -> int:
    largest = ceil_div(length, shards)
    return max(0, min(largest, length - largest * rank))


def _size_problems(model: PreTrainedModel, plan: Plan, size: int) -> list[Problem]:
    """Return one problem with all dimensions that `size` does not divide, and the sizes that would."""
    config = model.config.get_text_config()
    heads = {
        "attention heads": getattr(config, "num_attention_heads", None),
        "key-value heads": getattr(config, "num_key_value_heads", None),
    }
    dimensions: dict[str, int] = {}
    for label, count in heads.items():
        for num_heads in count if isinstance(count, list | tuple) else [count]:
            if num_heads:
                dimensions.setdefault(f"{num_heads} {label}", num_heads)
    for name, module in model.named_modules():
        split = plan.splits.get(name)
        if split in _SPLIT_BY_OUTPUTS or split in _SPLIT_BY_INPUTS:
            outputs, inputs = _linear_dimensions(module)
            width = inputs if split in _SPLIT_BY_INPUTS else outputs // plan.fused_counts.get(name, 1)
            layer = wildcards(name).rpartition("*.")[2]
            dimensions.setdefault(f"{width} {'inputs' if split in _SPLIT_BY_INPUTS else 'outputs'} of {layer}", width)
    indivisible = [label for label, dimension in dimensions.items() if dimension % size]
    if not indivisible:
        return []
    # Report only heads if there are any, because they determine the sizes of the matrices.
    reported = [label for label in indivisible if label.endswith("heads")] or indivisible[:3]
    what = f"{model.config.model_type} has {' and '.join(reported)}, not divisible by {size}"
    return [Problem(_KEY, what, f"write one of: {format_divisors(math.gcd(*dimensions.values()))}")]


def _linear_dimensions(module: Any) -> tuple[int, int]:
    """Return (outputs, inputs) of a linear layer, with adapters or without."""
    module = getattr(module, "base_layer", module)
    outputs, inputs = module.weight.shape
    return (inputs, outputs) if isinstance(module, Conv1D) else (outputs, inputs)


def _layer_problems(model: PreTrainedModel, plan: Plan) -> list[Problem]:
    """Return a problem if a layer has been replaced by one that the plan does not cover."""
    for name, module in model.named_modules():
        split = plan.splits.get(name)
        if split is None or split in (Split.EXPERTS, Split.SUMMED):
            continue
        if hasattr(module, "original_module"):
            return [Problem("model.lora.save", f"{name} is trained in full and cannot be split", "remove it")]
        if any(getattr(module, "lora_variant", {}).values()) or getattr(module, "lora_bias", {}).get("default"):
            return [Problem("model.lora", f"adapters of this kind cannot be split ({name})", "write dora: false")]
        base = getattr(module, "base_layer", module)
        if type(base) not in (nn.Linear, Conv1D, HalfLinear, HalfConv1D):
            what = f"{name} is a {type(base).__name__}, which cannot be split"
            return [Problem(_KEY, what, f"write {_KEY}: 1, or train.precision: bf16")]
    return []


def _sequence_problems(model: PreTrainedModel, plan: Plan) -> list[Problem]:
    layers = {id(layer) for layer in repeated_layers(model)}
    modules = dict(model.named_modules())
    layer_modules = {id(module) for layer in repeated_layers(model) for module in layer.modules()}
    if not layers or any(id(modules[name]) not in layer_modules for name in plan.splits):
        reason = "its layers are not all of one kind"
    elif any(id(modules[_parent(name)]) in layers for name, split in plan.splits.items() if split in _SPLIT_BY_OUTPUTS):
        reason = "its layers have matrices outside of attention and MLP"
    elif model.config.is_encoder_decoder or getattr(model.config, "add_cross_attention", False):
        reason = "its layers look at a second sequence"
    else:
        return []
    what = f"{model.config.model_type} cannot be split along the sequence: {reason}"
    return [Problem("parallel.sequence", what, "write sequence: false")]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _can_split_experts(experts: Any, mesh: DeviceMesh) -> bool:
    """True if the mesh size divides the number of experts, and they are not split yet."""
    return bool(
        find_experts(experts)
        and experts.num_experts % mesh.size() == 0
        and all(
            "." not in name and not isinstance(tensor, DTensor) and tensor.shape[0] == experts.num_experts
            for name, tensor in experts.named_parameters()
        )
    )


def _split_layer(
    module: nn.Module, split: Split, fused_count: int, mesh: DeviceMesh, sequence: SequenceSplit | None
) -> None:
    if split is Split.SUMMED:
        sum_gradients(module, mesh, None)
        return
    styles: dict[Split, ParallelStyle] = {
        Split.COLUMNS: ColumnParallel(),
        Split.GATHERED_COLUMNS: ColumnParallel(gathered=True),
        Split.ROWS: RowParallel(sequence=sequence),
        Split.ROWS_OF_FULL_INPUT: RowParallel(full_input=True, sequence=sequence),
        Split.FUSED: FusedColumnParallel(fused_count),
        Split.EXPERTS: ExpertParallel(),
    }
    if not hasattr(module, "base_layer"):
        parallelize_module(module, mesh, styles[split])
        return
    # Adapters: outputs = base(x) + B(A(x)). Splitting the outputs splits B, splitting the inputs splits A.
    adapters: Any = module
    parallelize_module(adapters.base_layer, mesh, styles[split])
    for key in adapters.lora_A:
        lora_a, lora_b = adapters.lora_A[key], adapters.lora_B[key]
        if split in _SPLIT_BY_OUTPUTS:
            keep_local(adapters.lora_dropout[key])
            parallelize_module(lora_b, mesh, styles[split])
        else:
            parallelize_module(lora_a, mesh, styles[split])
            if sequence is not None:
                sum_gradients(lora_b, mesh, sequence)


def _gathering_modules(modules: dict[str, nn.Module], plan: Plan) -> list[str]:
    """Return the parents of split layers that must see the full sequence: they hold unsplit parameters or experts.

    A router, for example, would see only some of the tokens.
    """
    split_kinds = (*_SPLIT_BY_OUTPUTS, Split.EXPERTS)
    parents = dict.fromkeys(_parent(name) for name, split in plan.splits.items() if split in split_kinds)
    return [name for name in parents if not _is_covered(name, modules[name], parents, plan)]


def _is_covered(name: str, module: nn.Module, parents: dict[str, None], plan: Plan) -> bool:
    """True if all parameters in a module belong to split layers that take the module's own input."""
    if any(parent.startswith(f"{name}.") for parent in parents):
        return False
    prefixes = tuple(f"{layer}." for layer, split in plan.splits.items() if split is not Split.EXPERTS)
    return all(f"{name}.{key}".startswith(prefixes) for key, _ in module.named_parameters())


def _split_sequences_between_matrices(
    model: PreTrainedModel,
    modules: dict[str, nn.Module],
    plan: Plan,
    gathering_names: list[str],
    mesh: DeviceMesh,
    sequence: SequenceSplit,
) -> None:
    """Split tensors between the matrices by sequence, from the first layer to the last."""
    layers = repeated_layers(model)
    split_sequence(layers[0], layers[-1], mesh, sequence)
    outermost = [name for name in gathering_names if not any(name.startswith(f"{outer}.") for outer in gathering_names)]
    for name in outermost:
        gather_sequence_around(modules[name], mesh, sequence)
    layer_modules = {id(module) for layer in layers for module in layer.modules()}
    for name, module in modules.items():
        is_covered = any(f"{name}.".startswith(f"{outer}.") for outer in (*outermost, *plan.splits))
        if id(module) in layer_modules and not is_covered and next(module.parameters(recurse=False), None) is not None:
            sum_gradients(module, mesh, sequence)


def _split_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> bool:
    """Split the embedding and the output head by vocabulary. Return True if either was split.

    Does not split modules other than plain embeddings and linear layers, or tied to such a module. Does not split
    heads that are not over the vocabulary, and vocabularies so small that a process would get no ids.
    """
    vocabulary_modules: dict[Any, Any] = {
        VocabParallelEmbedding: model.get_input_embeddings(),
        VocabParallelHead: model.get_output_embeddings(),
    }
    # A pipeline stage has one of them, or none.
    modules_with_weight: dict[Any, Any] = {
        style: module for style, module in vocabulary_modules.items() if getattr(module, "weight", None) is not None
    }
    supported = {VocabParallelEmbedding: (nn.Embedding, HalfEmbedding), VocabParallelHead: (nn.Linear, HalfLinear)}
    supported_modules: dict[type[ParallelStyle], Any] = {
        style: module for style, module in modules_with_weight.items() if type(module) in supported[style]
    }
    unsupported_weights = {
        id(module.weight) for style, module in modules_with_weight.items() if style not in supported_modules
    }
    size = mesh.size()
    is_split = False
    vocabularies = {module.weight.shape[0] for module in supported_modules.values()}
    if any(ceil_div(vocabulary, size) * (size - 1) >= vocabulary for vocabulary in vocabularies):
        return False
    for style, module in supported_modules.items():
        if id(module.weight) in unsupported_weights or getattr(module, "max_norm", None) is not None:
            continue
        for parameter in list(module.parameters(recurse=False)):
            if not isinstance(parameter, DTensor):  # a tied weight is already split
                _replace_parameter(model, parameter, split_parameter(parameter, mesh, Shard(0)))
        parallelize_module(module, mesh, style())
        is_split = True
    return is_split


def _replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter under all of its names."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(module, name, new)
