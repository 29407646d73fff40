"""Finds the structure of a model: its layers, and which parameters are used before and after them.

There is no list of architectures. The model runs once without its layers on fake tensors. Then the autograd graph is
followed back from the inputs of the layers and from the output of the model. This also shows whether only hidden states
pass from layer to layer. If not, the model cannot be split between layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

OUTPUT_FORMS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda hidden: hidden,
    lambda hidden: (hidden,),
    lambda hidden: (hidden, None),
    lambda hidden: (hidden, None, None),
)
"""Forms that a layer's output may have: hidden states, or a tuple that starts with them."""


class NotSequential(Exception):
    """The model is not a sequence of layers that pass on hidden states. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class ModelStructure:
    """The layers of a model, and the parameters around them."""

    stack: str
    """Name of the list of layers."""
    layers: int
    output_form: int
    """Index in `OUTPUT_FORMS` of the form that layers return."""
    before: frozenset[str]
    """Parameters that contribute to the first layer's input."""
    after: frozenset[str]
    """Parameters between the last layer's output and the model's."""
    side_inputs: dict[str, frozenset[int]]
    """Parameters outside the layers that contribute to layer inputs other than hidden states -> those layers."""

    def layer_of(self, name: str) -> int | None:
        """Return the index of the layer that holds a parameter, or None."""
        inside = name.removeprefix(f"{self.stack}.")
        return None if inside == name else int(inside.partition(".")[0])


def find_structure(model: PreTrainedModel) -> ModelStructure:
    """Find the structure of `model`. Raise NotSequential if it is not a sequence of layers."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise NotSequential("it has an encoder and a decoder")
    if any(getattr(config, key, 0) for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")):
        raise NotSequential("it leaves out layers at random (layerdrop)")
    num_layers = getattr(config, "num_hidden_layers", None)
    reason: Exception = NotSequential("its layers are not in one list")
    for name, stack in _outermost_lists(model, num_layers):
        for form in range(len(OUTPUT_FORMS)):
            try:
                return _trace_structure(model, name, len(stack), form)
            except Exception as error:  # whatever the architecture's code raises if the guess is wrong
                reason = error
    if isinstance(reason, NotSequential):
        raise reason
    if isinstance(reason, DataDependentOutputException):
        raise NotSequential("what it does depends on the values of its inputs")
    raise NotSequential(" ".join(str(reason).split())[:200] or type(reason).__name__)


def _outermost_lists(model: PreTrainedModel, num_layers: int | None) -> Iterator[tuple[str, nn.ModuleList]]:
    outer_names: list[str] = []
    for name, module in model.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in outer_names)
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not is_nested:
            outer_names.append(name)
            yield name, module


def _trace_structure(model: PreTrainedModel, stack: str, layers: int, form: int) -> ModelStructure:
    """Return the structure that a forward pass on fake tensors shows, assuming that the layers are the list `stack`."""
    recorder = _LayerRecorder(form, layers)
    # transformers avoids value-dependent checks on fake tensors, but not on tensors of the meta device.
    with FakeTensorMode(allow_non_fake_inputs=True):
        skeleton = _copy_skeleton(model, stack, recorder)
        names = _untie_parameters(skeleton)
        ids = torch.zeros((2, 3), dtype=torch.int64)
        output = skeleton(input_ids=ids, **({"use_cache": False} if hasattr(skeleton.config, "use_cache") else {}))
    if len(recorder.inputs) != layers:
        raise NotSequential(f"{len(recorder.inputs)} of its {layers} layers are called")
    leaves_before, nodes_before = _find_ancestors([recorder.inputs[0]])
    leaves_after, nodes_after = _find_ancestors(tree_leaves(output))
    if nodes_before & nodes_after:
        raise NotSequential("what is made before the layers is needed after them")
    outputs = {id(hidden) for hidden in recorder.outputs}
    if leaves_after & outputs != {id(recorder.outputs[-1])}:
        raise NotSequential("not only the last layer's output is used")
    side_inputs: dict[str, set[int]] = {}
    for index, tensors in enumerate(recorder.side_inputs):
        needed, _ = _find_ancestors(tensors)
        if needed & outputs:
            raise NotSequential("a layer takes more of the earlier ones than hidden states")
        for leaf in needed:
            side_inputs.setdefault(names[leaf], set()).add(index)
    return ModelStructure(
        stack,
        layers,
        form,
        frozenset(names[leaf] for leaf in leaves_before),
        frozenset(names[leaf] for leaf in leaves_after - outputs),
        {name: frozenset(indices) for name, indices in side_inputs.items()},
    )


class _LayerRecorder:
    """Records the inputs of each layer, and returns new hidden states in its place."""

    def __init__(self, form: int, layers: int) -> None:
        self.form = OUTPUT_FORMS[form]
        self.layers = layers
        self.inputs: list[torch.Tensor] = []
        self.side_inputs: list[list[torch.Tensor]] = []
        self.outputs: list[torch.Tensor] = []

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = get_hidden_states(args, kwargs)
        if index != len(self.inputs):
            raise NotSequential("its layers are not called one after another")
        if self.outputs and hidden is not self.outputs[-1]:
            raise NotSequential("something happens between layers")
        if hidden.ndim != 3 or hidden.shape[:2] != (2, 3):
            raise NotSequential(f"hidden states of shape {tuple(hidden.shape)}, not (rows, length, size)")
        side_values = [value for value in (*args[1:], *kwargs.values()) if value is not hidden]
        if any(hasattr(value, "update") and not len(value) for value in side_values):
            raise NotSequential("its layers write into something that others read")
        self.inputs.append(hidden)
        self.side_inputs.append([leaf for leaf in tree_leaves(side_values) if isinstance(leaf, torch.Tensor)])
        self.outputs.append(torch.empty_like(hidden).requires_grad_())
        return self.form(self.outputs[-1])


class _RecordedLayer(nn.Module):
    """Replaces a layer in the skeleton."""

    def __init__(self, layer: nn.Module, index: int, recorder: _LayerRecorder) -> None:
        super().__init__()
        copy_attributes(layer, self)
        self._index = index
        self._recorder = recorder

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.call(self._index, args, kwargs)


def _copy_skeleton(model: PreTrainedModel, stack: str, recorder: _LayerRecorder) -> PreTrainedModel:
    """Return a copy of `model` with fake tensors, and with recorders in place of its layers."""
    memo: dict[int, Any] = {}
    for index, layer in enumerate(model.get_submodule(stack).children()):
        memo[id(layer)] = _RecordedLayer(layer, index, recorder)
    prefix = f"{stack}."
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not name.startswith(prefix):
            fake = torch.empty(tensor.shape, dtype=tensor.dtype)
            memo[id(tensor)] = nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake
    skeleton: PreTrainedModel = copy.deepcopy(model, memo).eval()
    return skeleton


def _untie_parameters(skeleton: nn.Module) -> dict[int, str]:
    """Give each name a separate parameter, to track each name separately. Return the names by id."""
    names = {}
    for prefix, module in skeleton.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = untied = nn.Parameter(torch.empty(parameter.shape))
                names[id(untied)] = f"{prefix}.{name}" if prefix else name
    return names


def _find_ancestors(tensors: Iterable[Any]) -> tuple[set[int], set[Any]]:
    """Return (ids of the leaves that `tensors` are computed from, nodes of the autograd graph in between)."""
    leaves: set[int] = set()
    nodes: set[Any] = set()
    open_nodes: list[Any] = []
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            if tensor.grad_fn is None:
                leaves.add(id(tensor))
            else:
                open_nodes.append(tensor.grad_fn)
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in nodes:
            continue
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        else:
            nodes.add(node)
            open_nodes += [next_node for next_node, _ in node.next_functions]
    return leaves, nodes


def copy_attributes(layer: nn.Module, replacement: nn.Module) -> None:
    inherited = {*vars(nn.Module()), "forward", "_compiled_call_impl"}
    vars(replacement).update({name: value for name, value in vars(layer).items() if name not in inherited})


def get_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden
