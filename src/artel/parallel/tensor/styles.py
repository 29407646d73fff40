"""What is done to a layer that is split over processes: its parameters become DTensors, and who speaks to whom, when.

Between the layers that are split every process has the same values, and the same complete gradients; under `sequence`
it has a part of the sequence of them (Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models").
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

from artel.models.half_base import HalfEmbedding, linear

_TOKENS = 1  # the dimension of the sequence: hidden states are (rows, length, width)


class Sequence:
    """Whether what is between the matrices is split along the sequence: in this forward pass, if its length divides."""

    split = False


def copied(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A tensor that all processes have alike and each uses for its own ends: its gradient is the sum of theirs."""
    shared = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])


def summed(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of all processes' tensors, which they then have alike."""
    summands = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    return summands.redistribute(placements=[Replicate()]).to_local()


def part_of(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This process's part of the sequence of a tensor that all have alike."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(_TOKENS)]).to_local()


def whole_of(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The other way: all parts of the sequence, for uses that are alike on all processes."""
    part = DTensor.from_local(tensor, mesh, [Shard(_TOKENS)], run_check=False)
    return part.redistribute(placements=[Replicate()]).to_local()


def split_parameter(parameter: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Each process takes its share of what all have alike; nothing is sent. It may be on the meta device."""
    shared = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(shared, requires_grad=parameter.requires_grad)


class Columns(ParallelStyle):
    """A linear layer of which each process computes some outputs: they stay with it, or are `gathered`."""

    def __init__(self, *, gathered: bool = False) -> None:
        super().__init__()
        self._gathered = gathered

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        split_outputs(module, device_mesh)
        return _speaking(module, device_mesh, self._before, self._behind)

    def _before(self, _: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return (_as_shared(inputs[0], mesh), *inputs[1:])

    def _behind(self, _: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        if self._gathered:
            outputs = outputs.redistribute(placements=[Replicate()])
        return outputs.to_local()


class Rows(ParallelStyle):
    """A linear layer of which each process computes a summand, of its own inputs or of what it has `chosen` of all.

    With `sequence` each gets the sum of a part of the sequence where that is split, else all of it.
    """

    def __init__(self, *, chosen: bool = False, sequence: Sequence | None = None) -> None:
        super().__init__()
        self._chosen = chosen
        self._sequence = sequence

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.weight = split_parameter(module.weight, device_mesh, Shard(0 if isinstance(module, Conv1D) else 1))
        if module.bias is not None:
            module.bias = split_parameter(module.bias, device_mesh, Replicate())
        return _speaking(module, device_mesh, self._before, self._behind)

    def _before(self, _: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        if self._chosen:
            return (_as_shared(inputs[0], mesh).redistribute(placements=[Shard(-1)]), *inputs[1:])
        return (DTensor.from_local(inputs[0], mesh, [Shard(-1)], run_check=False), *inputs[1:])

    def _behind(self, _: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        split = self._sequence is not None and self._sequence.split
        return outputs.redistribute(placements=[Shard(_TOKENS) if split else Replicate()]).to_local()


class Fused(ParallelStyle):
    """A linear layer in which `parts` matrices lie side by side (queries, keys, values), each split by columns.

    What a process needs of them does not lie together. It keeps a contiguous share, so that what is saved and loaded
    is in the order of the whole; the matrix is gathered for the product, and its gradient summed and shared out
    again. That is 3 x width^2 numbers a layer (GPT-2 XL: 7.7 million), fewer than the activations of a few rows.
    """

    def __init__(self, parts: int) -> None:
        super().__init__()
        self._parts = parts

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        split_outputs(module, device_mesh)
        module.forward = MethodType(_fused(device_mesh, self._parts), module)
        return module


@cache  # one function for all layers: one graph, when they are compiled
def _fused(mesh: DeviceMesh, parts: int) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def own(parameter: DTensor, dim: int) -> torch.Tensor:
        """This process's columns of each of the matrices."""
        whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        pieces = whole.unflatten(dim, (parts, mesh.size(), -1))
        return pieces.select(dim + 1, mesh.get_local_rank()).flatten(dim, dim + 1)

    def forward(module: Any, inputs: torch.Tensor) -> torch.Tensor:
        inputs = _as_shared(inputs, mesh).to_local(grad_placements=[Partial()])
        weight = own(module.weight, 1).T if isinstance(module, Conv1D) else own(module.weight, 0)
        return linear(inputs, weight, None if module.bias is None else own(module.bias, 0))

    return forward


class Head(ParallelStyle):
    """An output head whose weight is split by vocabulary already: logits are gathered, unless it is open (`loss`)."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        def before(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            return (_as_shared(inputs[0], mesh), *inputs[1:])

        def behind(_: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> torch.Tensor:
            return outputs.redistribute(placements=[Replicate()]).to_local()

        return _speaking(module, device_mesh, before, behind)


class Embedding(ParallelStyle):
    """An embedding whose weight is split by vocabulary already: each process looks up its own ids, and they add up."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = MethodType(_look_up, module)
        return module


def _look_up(module: Any, ids: torch.Tensor) -> torch.Tensor:
    rows, first, padding = module.weight.to_local(), first_row(module.weight), module.padding_idx
    row = ids - first
    is_local = (row >= 0) & (row < rows.shape[0])
    if padding is not None:
        padding = padding - first if 0 <= padding - first < rows.shape[0] else None
    embedded = F.embedding(row.where(is_local, 0), rows, padding)
    if isinstance(module, HalfEmbedding):
        embedded = embedded.float()
    return summed(embedded.masked_fill(~is_local[..., None], 0.0), module.weight.device_mesh)


def first_row(weight: DTensor) -> int:
    """The first of this process's rows of a parameter in shards of rows (the last of which may be smaller)."""
    mesh = weight.device_mesh
    return mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())


class Experts(ParallelStyle):
    """A mixture of experts: each process computes its own experts, for all tokens, and results add up.

    The model's own code computes them: transformers has agreed that a choice of `num_experts` is of an expert that is
    elsewhere.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            setattr(module, name, split_parameter(getattr(module, name), device_mesh, Shard(0)))
        module.num_experts = module.num_experts // device_mesh.size()
        module._is_expert_parallel = True
        experts = view(module, names, _to_local)
        module.forward = MethodType(_own_experts(device_mesh), experts)
        return module


@cache  # as `_fused`
def _own_experts(mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    def forward(
        experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        count = experts.num_experts
        tokens, shares = copied(hidden_states, mesh), copied(top_k_weights, mesh)
        place = top_k_index - mesh.get_local_rank() * count
        is_local = (place >= 0) & (place < count)
        output = type(experts).forward(
            experts, tokens, place.where(is_local, count), shares.masked_fill(~is_local, 0.0)
        )
        if not output.requires_grad and torch.is_grad_enabled():
            # No token came here. Its gradients are zero, but the others wait for them.
            weights = [getattr(experts, name) for name in experts._parameters]
            output = output + 0.0 * sum(tensor.sum() for tensor in (tokens, shares, *weights))
        return summed(output, mesh)

    return forward


def forget_meshes() -> None:
    """Forget the functions of all meshes: two ranks' meshes are equal, and a process that plans for both asks twice."""
    _fused.cache_clear()
    _own_experts.cache_clear()


def split_outputs(module: Any, mesh: DeviceMesh) -> None:
    """Each process keeps the weights and biases of some outputs of a linear layer."""
    module.weight = split_parameter(module.weight, mesh, Shard(1 if isinstance(module, Conv1D) else 0))
    if module.bias is not None:
        module.bias = split_parameter(module.bias, mesh, Shard(0))


def share_inputs(module: nn.Module, mesh: DeviceMesh, sequence: Sequence | None) -> None:
    """Let all layers in a module that take its input wait for it once, and send their gradients of it once.

    All of the module's parameters must be in layers that are split.
    """

    def before(hidden: torch.Tensor) -> torch.Tensor:
        if sequence is None or not sequence.split:
            return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        part = DTensor.from_local(hidden, mesh, [Shard(_TOKENS)], run_check=False)
        return part.redistribute(placements=[Replicate()])

    _change_input(module, before)


def take_whole(module: nn.Module, mesh: DeviceMesh, sequence: Sequence) -> None:
    """Within the module every process has the whole sequence, whatever the module does with it."""
    _change_input(module, lambda hidden: whole_of(hidden, mesh) if sequence.split else hidden)
    _change_output(module, lambda hidden: part_of(hidden, mesh) if sequence.split else hidden)


def split_sequence(first: nn.Module, last: nn.Module, mesh: DeviceMesh, sequence: Sequence) -> None:
    """From the input of the first layer to the output of the last each process has a part of the sequence.

    Lengths that do not divide stay whole: a prompt's, and single tokens that are written.
    """

    def before(hidden: torch.Tensor) -> torch.Tensor:
        sequence.split = hidden.shape[_TOKENS] % mesh.size() == 0
        return part_of(hidden, mesh) if sequence.split else hidden

    _change_input(first, before)
    _change_output(last, lambda hidden: whole_of(hidden, mesh) if sequence.split else hidden)


def keep_local(module: nn.Module) -> None:
    """The module takes plain tensors, also of inputs that are shared; its gradient of them is complete."""
    _change_input(module, lambda hidden: hidden.to_local() if isinstance(hidden, DTensor) else hidden)


def sum_gradients(module: nn.Module, mesh: DeviceMesh, sequence: Sequence | None) -> None:
    """A module whose parameters are whole, and that sees a part of the heads, or with `sequence` of the tokens."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    seen = view(module, names, _Copied(mesh, sequence))
    module.forward = MethodType(type(seen).forward, seen)


@dataclass(frozen=True, slots=True)
class _Copied:
    mesh: DeviceMesh
    sequence: Sequence | None

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or (self.sequence is not None and not self.sequence.split):
            return parameter
        return copied(parameter, self.mesh)


def _to_local(parameter: DTensor) -> torch.Tensor:
    return parameter.to_local()


def view(module: nn.Module, names: list[str], read: Callable[[Any], torch.Tensor]) -> nn.Module:
    """The same module once more, whose code gets `read(parameter)` for its parameters of these names.

    What is read is made each time: FSDP exchanges a layer's parameters before and after its forward pass. The module
    itself shows its parameters as they are, to FSDP and to whoever saves them.
    """
    seen: nn.Module = object.__new__(_reading(type(module), tuple(names), read))  # type: ignore[arg-type]
    object.__setattr__(seen, "__dict__", module.__dict__)
    return seen


@cache  # one class for the modules of all layers: one graph, when layers are compiled
def _reading(plain: type[nn.Module], names: tuple[str, ...], read: Callable[[Any], torch.Tensor]) -> type[nn.Module]:
    return type(plain.__name__, (plain,), {name: _reader(name, read) for name in names})


def _reader(name: str, read: Callable[[Any], torch.Tensor]) -> property:
    def get(module: nn.Module) -> Any:
        parameter = module._parameters[name]
        return parameter if parameter is None else read(parameter)

    return property(get)


def _as_shared(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _speaking(module: nn.Module, mesh: DeviceMesh, before: Callable[..., Any], behind: Callable[..., Any]) -> nn.Module:
    """A module whose parameters are split already, with what is done to its inputs and outputs."""
    return distribute_module(module, mesh, lambda *_: None, before, behind)


def _change_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Hidden states come first, or under that name."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _change_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Hidden states are all there is, or come first."""

    def hook(_: nn.Module, args: Any, outputs: Any) -> Any:
        return (change(outputs[0]), *outputs[1:]) if isinstance(outputs, tuple) else change(outputs)

    module.register_forward_hook(hook)
