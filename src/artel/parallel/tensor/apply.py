"""The matrices of each layer split over processes, and the vocabulary with them (Shoeybi et al. 2019, "Megatron-LM").

Parameters that are split become DTensors over the processes that share them; `fully_shard` may share them out once
more. The others stay plain tensors, the same on every process, with gradients that are the same and complete.
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
from artel.models.compile import repeated_layers
from artel.models.experts import adapted_experts, experts_of
from artel.models.half_base import HalfConv1D, HalfEmbedding, HalfLinear
from artel.parallel.tensor.plans import Cut, Plan, read_plan, wildcards
from artel.parallel.tensor.styles import (
    Columns,
    Embedding,
    Experts,
    Fused,
    Head,
    Rows,
    Sequence,
    keep_local,
    share_inputs,
    split_parameter,
    split_sequence,
    sum_gradients,
    take_whole,
)

_KEY = "parallel.tensor"
_OUTPUTS = (Cut.COLUMNS, Cut.GATHERED, Cut.FUSED)
_INPUTS = (Cut.ROWS, Cut.CHOSEN)


def tensor_problems(model: PreTrainedModel, size: int, *, sequence: bool) -> list[Problem]:
    """Why a model cannot be split over `size` processes; it may be on the meta device, with adapters in it.

    `sequence`: also what is between the matrices, along the sequence.
    """
    kind, plan = model.config.model_type, read_plan(model)
    if getattr(model, "is_quantized", False):
        return [
            Problem(_KEY, "quantized matrices cannot be split", "write model.quantize: none, or parallel.tensor: 1")
        ]
    if plan.unknown:
        what = f"transformers splits {kind} in ways that artel does not know: {', '.join(plan.unknown)}"
        return [Problem(_KEY, what, f"write {_KEY}: 1")]
    if not plan.cuts:
        what = f"neither transformers nor artel knows how {kind} is split"
        return [Problem(_KEY, what, f"write {_KEY}: 1, or split it otherwise (parallel.data, parallel.pipeline)")]
    problems = _sizes(model, plan, size) + _layers(model, plan)
    if adapted_experts(model):
        what = "model.lora.target names experts, whose adapters cannot be split"
        problems.append(Problem(_KEY, what, f"leave them out of the target, or write {_KEY}: 1"))
    return problems + (_sequence_problems(model, plan) if sequence else [])


def split_by_tensor(model: PreTrainedModel, mesh: DeviceMesh, *, sequence: bool) -> str:
    """Split a model in place over `mesh` (1-D, the dimension `tensor`); what was done, in words.

    The model may be on the meta device; else each process takes its share of its own weights, which are the same on
    all. `tensor_problems` must have found none. Experts that `split_experts` has shared out stay with those processes,
    so it comes before this. All processes of the mesh must then be given the same batches and draw the same dropout.
    """
    plan, modules = read_plan(model), dict(model.named_modules())
    own = Sequence() if sequence else None
    spare_experts = {name for name, cut in plan.cuts.items() if cut is Cut.EXPERTS and not _splits(modules[name], mesh)}
    wholes = _wholes(modules, plan)
    for name, cut in plan.cuts.items():
        inside = any(name.startswith(f"{whole}.") for whole in wholes)
        if name not in spare_experts:
            _split_layer(modules[name], cut, plan.parts.get(name, 1), mesh, None if inside else own)
    for name, key in plan.divided:
        setattr(modules[name], key, getattr(modules[name], key) // mesh.size())
    shared = _sharing(modules, plan, wholes)
    for name in shared:
        share_inputs(modules[name], mesh, own)
    if own is not None:
        _split_between(model, modules, plan, wholes, mesh, own)
    vocabulary = _split_vocabulary(model, mesh)
    counts = Counter(
        "experts" if cut is Cut.EXPERTS else "matrices" for cut in plan.cuts.values() if cut is not Cut.SUMMED
    )
    done = [f"{counts['matrices']} matrices"]
    if counts["experts"]:
        done.append("experts" if not spare_experts else "experts not")
    done += ["vocabulary"] * vocabulary + ["sequences between them"] * sequence
    return f"split over {mesh.size()} processes: {', '.join(done)}"


def shard_dimension(parameter: torch.Tensor, shards: int) -> Shard | None:
    """For fully_shard's `shard_placement_fn`, over `shards` processes: along which dimension; None: its first.

    A vocabulary that does not divide leaves a smaller share for the last process. Shares of such shares are put
    together in the wrong order (torch 2.13: DTensor's `_StridedShard` takes the pieces for equal), so that weights
    would be saved wrongly; by columns they are right. Raises InputError where the columns do not divide either.
    """
    if not isinstance(parameter, DTensor) or shards == 1 or not parameter.placements[0].is_shard(0):
        return None
    rows, size = parameter.shape[0], parameter.device_mesh.size()
    if rows % size == 0:
        return None
    if parameter.ndim == 2 and parameter.shape[1] % shards == 0:
        return Shard(1)
    most = -(-rows // size)
    least = rows - most * (size - 1)
    # In order as long as the share of each share is the ceiling of what DTensor takes it for.
    for rank in range(shards):
        pieces = [_piece(whole, shards, rank) for whole in (most, least)]
        if pieces[0] != -(-(pieces[0] * (size - 1) + pieces[1]) // size):
            what = f"a vocabulary of {rows:,} cannot be shared out over {size} x {shards} processes"
            raise InputError.at(_KEY, what, f"write {_KEY}: 1, or model.config.vocab_size: {most * size}")
    return None


def _piece(whole: int, shards: int, rank: int) -> int:
    each = -(-whole // shards)
    return max(0, min(each, whole - each * rank))


def _sizes(model: PreTrainedModel, plan: Plan, size: int) -> list[Problem]:
    """Numbers that the processes do not divide, in one problem, with those numbers of processes that divide all."""
    config = model.config.get_text_config()
    heads = {
        "attention heads": getattr(config, "num_attention_heads", None),
        "key-value heads": getattr(config, "num_key_value_heads", None),
    }
    numbers: dict[str, int] = {}
    for label, count in heads.items():
        for number in count if isinstance(count, list | tuple) else [count]:
            if number:
                numbers.setdefault(f"{number} {label}", number)
    for name, module in model.named_modules():
        cut = plan.cuts.get(name)
        if cut in _OUTPUTS or cut in _INPUTS:
            outputs, inputs = _sides(module)
            number = inputs if cut in _INPUTS else outputs // plan.parts.get(name, 1)
            of = wildcards(name).rpartition("*.")[2]
            numbers.setdefault(f"{number} {'inputs' if cut in _INPUTS else 'outputs'} of {of}", number)
    wrong = [label for label, number in numbers.items() if number % size]
    if not wrong:
        return []
    # Heads first; matrices that are made of them say nothing new.
    named = [label for label in wrong if label.endswith("heads")] or wrong[:3]
    common = math.gcd(*numbers.values())
    fits = ", ".join(str(each) for each in range(1, common + 1) if common % each == 0)
    what = f"{model.config.model_type} has {' and '.join(named)}, no multiple of {size}"
    return [Problem(_KEY, what, f"write one of: {fits}")]


def _sides(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, with adapters or without."""
    module = getattr(module, "base_layer", module)
    outputs, inputs = module.weight.shape
    return (inputs, outputs) if isinstance(module, Conv1D) else (outputs, inputs)


def _layers(model: PreTrainedModel, plan: Plan) -> list[Problem]:
    """Layers that are no longer those that the plan was made for."""
    for name, module in model.named_modules():
        cut = plan.cuts.get(name)
        if cut is None or cut in (Cut.EXPERTS, Cut.SUMMED):
            continue
        if hasattr(module, "original_module"):
            return [Problem("model.lora.save", f"{name} is trained whole and cannot be split", "leave it out")]
        if any(getattr(module, "lora_variant", {}).values()) or getattr(module, "lora_bias", {}).get("default"):
            return [Problem("model.lora", f"adapters of this kind cannot be split ({name})", "write dora: false")]
        plain = getattr(module, "base_layer", module)
        if type(plain) not in (nn.Linear, Conv1D, HalfLinear, HalfConv1D):
            what = f"{name} is a {type(plain).__name__}, which cannot be split"
            return [Problem(_KEY, what, f"write {_KEY}: 1, or train.precision: bf16")]
    return []


def _sequence_problems(model: PreTrainedModel, plan: Plan) -> list[Problem]:
    kind, layers = model.config.model_type, {id(layer) for layer in repeated_layers(model)}
    modules = dict(model.named_modules())
    inside = {id(module) for layer in repeated_layers(model) for module in layer.modules()}
    why = None
    if not layers or any(id(modules[name]) not in inside for name in plan.cuts):
        why = "its layers are not all of one kind"
    elif any(id(modules[_parent(name)]) in layers for name, cut in plan.cuts.items() if cut in _OUTPUTS):
        why = "its layers hold matrices of their own, beside attention and network"
    elif model.config.is_encoder_decoder or getattr(model.config, "add_cross_attention", False):
        why = "its layers look at a second sequence"
    if why is None:
        return []
    return [Problem("parallel.sequence", f"{kind} cannot be split along the sequence: {why}", "write sequence: false")]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _splits(experts: Any, mesh: DeviceMesh) -> bool:
    """Whether a layer's experts can be split by their number, and have not been already."""
    return bool(
        experts_of(experts)
        and experts.num_experts % mesh.size() == 0
        and all(
            "." not in name and not isinstance(each, DTensor) and each.shape[0] == experts.num_experts
            for name, each in experts.named_parameters()
        )
    )


def _split_layer(module: nn.Module, cut: Cut, parts: int, mesh: DeviceMesh, sequence: Sequence | None) -> None:
    if cut is Cut.SUMMED:
        sum_gradients(module, mesh, None)
        return
    styles: dict[Cut, ParallelStyle] = {
        Cut.COLUMNS: Columns(),
        Cut.GATHERED: Columns(gathered=True),
        Cut.ROWS: Rows(sequence=sequence),
        Cut.CHOSEN: Rows(chosen=True, sequence=sequence),
        Cut.FUSED: Fused(parts),
        Cut.EXPERTS: Experts(),
    }
    if not hasattr(module, "base_layer"):
        parallelize_module(module, mesh, styles[cut])
        return
    # Adapters: outputs = base(x) + B(A(x)). What splits the outputs splits B, what splits the inputs splits A.
    adapters: Any = module
    parallelize_module(adapters.base_layer, mesh, styles[cut])
    for key in adapters.lora_A:
        narrow, wide = adapters.lora_A[key], adapters.lora_B[key]
        if cut in _OUTPUTS:
            keep_local(adapters.lora_dropout[key])
            parallelize_module(wide, mesh, styles[cut])
        else:
            parallelize_module(narrow, mesh, styles[cut])
            if sequence is not None:
                sum_gradients(wide, mesh, sequence)


def _wholes(modules: dict[str, nn.Module], plan: Plan) -> list[str]:
    """Modules around split layers that also hold what is not split, or experts: theirs is the whole sequence.

    A router would see tokens of which another process sees the rest; so there all see all.
    """
    parents = dict.fromkeys(_parent(name) for name, cut in plan.cuts.items() if cut in (*_OUTPUTS, Cut.EXPERTS))
    return [name for name in parents if not _is_covered(name, modules[name], parents, plan)]


def _is_covered(name: str, module: nn.Module, parents: dict[str, None], plan: Plan) -> bool:
    """Whether all parameters within a module are of split layers, each of which takes the module's own input."""
    if any(other.startswith(f"{name}.") for other in parents):
        return False
    for key, _ in module.named_parameters():
        full = f"{name}.{key}"
        if not any(full.startswith(f"{cut}.") for cut, how in plan.cuts.items() if how is not Cut.EXPERTS):
            return False
    return True


def _sharing(modules: dict[str, nn.Module], plan: Plan, wholes: list[str]) -> list[str]:
    """Modules around split layers, and nothing else: their input is made ready once for all of these."""
    parents = dict.fromkeys(_parent(name) for name, cut in plan.cuts.items() if cut in _OUTPUTS)
    return [name for name in parents if name not in wholes]


def _split_between(
    model: PreTrainedModel,
    modules: dict[str, nn.Module],
    plan: Plan,
    wholes: list[str],
    mesh: DeviceMesh,
    sequence: Sequence,
) -> None:
    """What is between the matrices is split along the sequence, from the first of the layers to the last."""
    layers = repeated_layers(model)
    split_sequence(layers[0], layers[-1], mesh, sequence)
    outermost = [name for name in wholes if not any(name.startswith(f"{other}.") for other in wholes)]
    for name in outermost:
        take_whole(modules[name], mesh, sequence)
    inside = {id(module) for layer in layers for module in layer.modules()}
    for name, module in modules.items():
        covered = any(f"{name}.".startswith(f"{other}.") for other in (*outermost, *plan.cuts))
        if id(module) in inside and not covered and next(module.parameters(recurse=False), None) is not None:
            sum_gradients(module, mesh, sequence)


def _split_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> bool:
    """Split the embedding by vocabulary, and the output head with it; whether any of it was split.

    Whole stay: what is not a plain embedding or linear layer, with whatever is tied to it, heads that are not over the
    vocabulary, and vocabularies so small that a process would have none of it.
    """
    ends: dict[Any, Any] = {Embedding: model.get_input_embeddings(), Head: model.get_output_embeddings()}
    # A stage of a pipeline has one of them, or none.
    weighted: dict[Any, Any] = {
        style: module for style, module in ends.items() if getattr(module, "weight", None) is not None
    }
    plain = {Embedding: (nn.Embedding, HalfEmbedding), Head: (nn.Linear, HalfLinear)}
    chosen: dict[type[ParallelStyle], Any] = {
        style: module for style, module in weighted.items() if type(module) in plain[style]
    }
    refused = {id(module.weight) for style, module in weighted.items() if style not in chosen}
    rows = {module.weight.shape[0] for module in chosen.values()}
    size, done = mesh.size(), False
    if any(-(-count // size) * (size - 1) >= count for count in rows):
        return False
    for style, module in chosen.items():
        if id(module.weight) in refused or getattr(module, "max_norm", None) is not None:
            continue
        for parameter in list(module.parameters(recurse=False)):
            if not isinstance(parameter, DTensor):  # tied: the other one has split it
                _exchange(model, parameter, split_parameter(parameter, mesh, Shard(0)))
        parallelize_module(module, mesh, style())
        done = True
    return done


def _exchange(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter in another's place, under all its names."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(module, name, new)
