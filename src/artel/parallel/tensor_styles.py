"""Splits layers over processes: parameters become DTensors, and hooks communicate inputs and outputs.

Between split layers every process has the same values and the same complete gradients, or with `sequence` a shard of
the sequence (Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation Recomputation
in Large Transformer Models").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from transformers.pytorch_utils import Conv1D

from artel.integers import ceil_div
from artel.models.half_base import HalfEmbedding, linear

_SEQUENCE_DIM = 1  # the dimension of the sequence: hidden states are (rows, length, width)


class SequenceSplit:
    """State of one forward pass: whether tensors between the matrices are split along the sequence."""

    active = False
    """True if the length of the sequence is a multiple of the processes."""


def copy_to_group(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a replicated tensor for different uses on each process. Its gradient is the sum over processes."""
    replicated = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])


def reduce_from_group(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum a tensor over processes. All get the result."""
    partial = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=[Replicate()]).to_local()


def scatter_sequence(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this process's shard of the sequence of a replicated tensor."""
    replicated = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=[Shard(_SEQUENCE_DIM)]).to_local()


def gather_sequence(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Inverse of `scatter_sequence`: return the full sequence, for the same use on all processes."""
    sharded = DTensor.from_local(tensor, mesh, [Shard(_SEQUENCE_DIM)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local()


def split_parameter(parameter: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Keep this process's shard of a replicated parameter, without communication. It may be on the meta device."""
    sharded = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


class ColumnParallel(ParallelStyle):
    """A linear layer split by outputs.

    Each process computes some of them, and keeps them unless they are `gathered`.
    """

    def __init__(self, *, gathered: bool = False) -> None:
        super().__init__()
        self._gathered = gathered

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        split_outputs(module, device_mesh)
        return _with_hooks(module, device_mesh, self._prepare_inputs, self._convert_outputs)

    def _prepare_inputs(self, _: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return (_replicate(inputs[0], mesh), *inputs[1:])

    def _convert_outputs(self, _: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        if self._gathered:
            outputs = outputs.redistribute(placements=[Replicate()])
        return outputs.to_local()


class RowParallel(ParallelStyle):
    """A linear layer split by inputs. Each process computes a summand, from its own inputs or from `full_input`.

    While `sequence` is active, each process gets the sum for its shard of the sequence. Otherwise it gets the full sum.
    """

    def __init__(self, *, full_input: bool = False, sequence: SequenceSplit | None = None) -> None:
        super().__init__()
        self._full_input = full_input
        self._sequence = sequence

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.weight = split_parameter(module.weight, device_mesh, Shard(0 if isinstance(module, Conv1D) else 1))
        if module.bias is not None:
            module.bias = split_parameter(module.bias, device_mesh, Replicate())
        return _with_hooks(module, device_mesh, self._prepare_inputs, self._convert_outputs)

    def _prepare_inputs(self, _: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        if self._full_input:
            return (_replicate(inputs[0], mesh).redistribute(placements=[Shard(-1)]), *inputs[1:])
        return (DTensor.from_local(inputs[0], mesh, [Shard(-1)], run_check=False), *inputs[1:])

    def _convert_outputs(self, _: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        split = self._sequence is not None and self._sequence.active
        return outputs.redistribute(placements=[Shard(_SEQUENCE_DIM) if split else Replicate()]).to_local()


class FusedColumnParallel(ParallelStyle):
    """A linear layer that concatenates `num_matrices` matrices (queries, keys, values), each split by columns.

    The columns that a process needs are not contiguous. It keeps a contiguous shard, because checkpoints have the order
    of the full matrix. The matrix is gathered for the matmul, and its gradient is summed and scattered: 3 x width^2
    numbers per layer (GPT-2 XL: 7.7 million), fewer than the activations of a few rows.
    """

    def __init__(self, num_matrices: int) -> None:
        super().__init__()
        self._num_matrices = num_matrices

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        split_outputs(module, device_mesh)
        module.forward = MethodType(_fused_forward(device_mesh, self._num_matrices), module)
        return module


@cache  # one function for all layers, so that compiled layers share one graph
def _fused_forward(mesh: DeviceMesh, num_matrices: int) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def local_columns(parameter: DTensor, dim: int) -> torch.Tensor:
        """Return this process's columns of each matrix."""
        full = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        columns = full.unflatten(dim, (num_matrices, mesh.size(), -1))
        return columns.select(dim + 1, mesh.get_local_rank()).flatten(dim, dim + 1)

    def forward(module: Any, inputs: torch.Tensor) -> torch.Tensor:
        inputs = _replicate(inputs, mesh).to_local(grad_placements=[Partial()])
        weight = local_columns(module.weight, 1).T if isinstance(module, Conv1D) else local_columns(module.weight, 0)
        return linear(inputs, weight, None if module.bias is None else local_columns(module.bias, 0))

    return forward


class VocabParallelHead(ParallelStyle):
    """An output head already split by vocabulary. Logits are gathered, unless the loss reads the shards (`loss`)."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        def before(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            return (_replicate(inputs[0], mesh), *inputs[1:])

        def after(_: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> torch.Tensor:
            return outputs.redistribute(placements=[Replicate()]).to_local()

        return _with_hooks(module, device_mesh, before, after)


class VocabParallelEmbedding(ParallelStyle):
    """An embedding already split by vocabulary: each process looks up its own ids, and the results are summed."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = MethodType(_look_up_ids, module)
        return module


def _look_up_ids(module: Any, ids: torch.Tensor) -> torch.Tensor:
    rows = module.weight.to_local()
    first_id = first_row(module.weight)
    padding = module.padding_idx
    local_ids = ids - first_id
    is_local = (local_ids >= 0) & (local_ids < rows.shape[0])
    if padding is not None:
        padding = padding - first_id if 0 <= padding - first_id < rows.shape[0] else None
    embedded = F.embedding(local_ids.where(is_local, 0), rows, padding)
    if isinstance(module, HalfEmbedding):
        embedded = embedded.float()
    return reduce_from_group(embedded.masked_fill(~is_local[..., None], 0.0), module.weight.device_mesh)


def first_row(weight: DTensor) -> int:
    """Return the index of this process's first row of a parameter sharded by rows. The last shard may be smaller."""
    mesh = weight.device_mesh
    return mesh.get_local_rank() * ceil_div(weight.shape[0], mesh.size())


class ExpertParallel(ParallelStyle):
    """A mixture of experts: each process computes its own experts for all tokens, and results are summed.

    The model's own code computes them. In transformers, the index `num_experts` means an expert of another process.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            setattr(module, name, split_parameter(getattr(module, name), device_mesh, Shard(0)))
        module.num_experts = module.num_experts // device_mesh.size()
        module._is_expert_parallel = True
        experts = view(module, names, _to_local)
        module.forward = MethodType(_local_experts_forward(device_mesh), experts)
        return module


@cache  # see `_fused_forward`
def _local_experts_forward(mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    def forward(
        experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        num_local = experts.num_experts
        tokens, top_k_weights = copy_to_group(hidden_states, mesh), copy_to_group(top_k_weights, mesh)
        index = top_k_index - mesh.get_local_rank() * num_local
        is_local = (index >= 0) & (index < num_local)
        output = type(experts).forward(
            experts, tokens, index.where(is_local, num_local), top_k_weights.masked_fill(~is_local, 0.0)
        )
        if not output.requires_grad and torch.is_grad_enabled():
            # No token chose a local expert. The gradients are zero, but the other processes wait for them.
            weights = [getattr(experts, name) for name in experts._parameters]
            output = output + 0.0 * sum(tensor.sum() for tensor in (tokens, top_k_weights, *weights))
        return reduce_from_group(output, mesh)

    return forward


def clear_mesh_caches() -> None:
    """Clear the functions cached by mesh: meshes of two ranks compare equal, and one process may plan for both."""
    _fused_forward.cache_clear()
    _local_experts_forward.cache_clear()


def split_outputs(module: Any, mesh: DeviceMesh) -> None:
    """Keep this process's shard of the outputs of a linear layer."""
    module.weight = split_parameter(module.weight, mesh, Shard(1 if isinstance(module, Conv1D) else 0))
    if module.bias is not None:
        module.bias = split_parameter(module.bias, mesh, Shard(0))


def share_inputs(module: nn.Module, mesh: DeviceMesh, sequence: SequenceSplit | None) -> None:
    """Gather a module's input once for all its split layers, and reduce their gradients once.

    All of the module's parameters must be in split layers.
    """

    def before(hidden: torch.Tensor) -> torch.Tensor:
        if sequence is None or not sequence.active:
            return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        sharded = DTensor.from_local(hidden, mesh, [Shard(_SEQUENCE_DIM)], run_check=False)
        return sharded.redistribute(placements=[Replicate()])

    _change_input(module, before)


def gather_sequence_around(module: nn.Module, mesh: DeviceMesh, sequence: SequenceSplit) -> None:
    """Give a module the full sequence, and split its output again."""
    _change_input(module, lambda hidden: gather_sequence(hidden, mesh) if sequence.active else hidden)
    _change_output(module, lambda hidden: scatter_sequence(hidden, mesh) if sequence.active else hidden)


def split_sequence(first: nn.Module, last: nn.Module, mesh: DeviceMesh, sequence: SequenceSplit) -> None:
    """Shard the sequence from the input of the first layer to the output of the last.

    Sequences whose length is not a multiple of the number of processes are not split (prompts, generated tokens).
    """

    def before(hidden: torch.Tensor) -> torch.Tensor:
        sequence.active = hidden.shape[_SEQUENCE_DIM] % mesh.size() == 0
        return scatter_sequence(hidden, mesh) if sequence.active else hidden

    _change_input(first, before)
    _change_output(last, lambda hidden: gather_sequence(hidden, mesh) if sequence.active else hidden)


def keep_local(module: nn.Module) -> None:
    """Give a module plain tensors even if its input is a DTensor. The module's gradient must be complete."""
    _change_input(module, lambda hidden: hidden.to_local() if isinstance(hidden, DTensor) else hidden)


def sum_gradients(module: nn.Module, mesh: DeviceMesh, sequence: SequenceSplit | None) -> None:
    """Sum a replicated module's gradients over processes: each sees some of the heads, or of `sequence`'s tokens."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    module_view = view(module, names, _CopyToGroup(mesh, sequence))
    module.forward = MethodType(type(module_view).forward, module_view)


@dataclass(frozen=True, slots=True)
class _CopyToGroup:
    mesh: DeviceMesh
    sequence: SequenceSplit | None

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or (self.sequence is not None and not self.sequence.active):
            return parameter
        return copy_to_group(parameter, self.mesh)


def _to_local(parameter: DTensor) -> torch.Tensor:
    return parameter.to_local()


def view(module: nn.Module, names: list[str], read: Callable[[Any], torch.Tensor]) -> nn.Module:
    """Return a view of the module whose code reads `read(parameter)` for the parameters with these names.

    The view reads values on each access, because FSDP replaces a layer's parameters before and after its forward pass.
    FSDP and checkpoints see the unchanged parameters of the module.
    """
    module_view: nn.Module = object.__new__(_view_class(type(module), tuple(names), read))  # type: ignore[arg-type]
    object.__setattr__(module_view, "__dict__", module.__dict__)
    return module_view


@cache  # one class for the modules of all layers, so that compiled layers share one graph
def _view_class(base: type[nn.Module], names: tuple[str, ...], read: Callable[[Any], torch.Tensor]) -> type[nn.Module]:
    return type(base.__name__, (base,), {name: _create_property(name, read) for name in names})


def _create_property(name: str, read: Callable[[Any], torch.Tensor]) -> property:
    def get(module: nn.Module) -> Any:
        parameter = module._parameters[name]
        return parameter if parameter is None else read(parameter)

    return property(get)


def _replicate(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _with_hooks(
    module: nn.Module, mesh: DeviceMesh, before: Callable[..., Any], after: Callable[..., Any]
) -> nn.Module:
    """Add hooks for inputs and outputs to a module whose parameters are already split."""
    return distribute_module(module, mesh, lambda *_: None, before, after)


def _change_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply `change` to the hidden states: the first argument, or the one with that name."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _change_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply `change` to the hidden states: the only output, or the first."""

    def hook(_: nn.Module, args: Any, outputs: Any) -> Any:
        return (change(outputs[0]), *outputs[1:]) if isinstance(outputs, tuple) else change(outputs)

    module.register_forward_hook(hook)
