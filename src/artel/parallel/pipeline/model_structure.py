"""How a model is made: where its layers are, and which parameters are used before and after them.

Without a list of architectures: the model is run once without its layers, on tensors that have shapes and no values,
and the graph of gradients is followed back from what the layers are called with, and from what the model returns. So it
is seen as well whether only hidden states pass from layer to layer, without which a model cannot be cut between them.
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

FORMS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda hidden: hidden,
    lambda hidden: (hidden,),
    lambda hidden: (hidden, None),
    lambda hidden: (hidden, None, None),
)
"""What a layer may return, as the model that calls it expects it."""


class NotSequential(Exception):
    """Why a model is not a row of layers that hand on hidden states."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Where a model's layers are, and what is around them."""

    stack: str
    """The name of the list of layers."""
    layers: int
    form: int
    """What the layers return: which of `FORMS`."""
    before: frozenset[str]
    """Parameters that the first layer's input is made with."""
    after: frozenset[str]
    """Parameters that the outputs are made with, from what the last layer returns."""
    everywhere: dict[str, frozenset[int]]
    """Parameters outside of the layers whose values layers take besides hidden states -> those layers."""

    def place(self, name: str) -> int | None:
        """The number of the layer that a parameter is in."""
        inside = name.removeprefix(f"{self.stack}.")
        return None if inside == name else int(inside.partition(".")[0])


def examine(model: PreTrainedModel) -> Anatomy:
    """Raises NotSequential."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise NotSequential("it has an encoder and a decoder")
    if any(getattr(config, key, 0) for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")):
        raise NotSequential("it leaves out layers at random (layerdrop)")
    count = getattr(config, "num_hidden_layers", None)
    reason: Exception = NotSequential("its layers are not in one list")
    for name, stack in _outermost_lists(model, count):
        for form in range(len(FORMS)):
            try:
                return _traced(model, name, len(stack), form)
            except Exception as error:  # whatever an architecture's own code raises where it is not what we take it for
                reason = error
    if isinstance(reason, NotSequential):
        raise reason
    if isinstance(reason, DataDependentOutputException):
        raise NotSequential("what it does depends on the values of its inputs")
    raise NotSequential(" ".join(str(reason).split())[:200] or type(reason).__name__)


def _outermost_lists(model: PreTrainedModel, count: int | None) -> Iterator[tuple[str, nn.ModuleList]]:
    seen: list[str] = []
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in seen)
        if isinstance(module, nn.ModuleList) and len(module) == count and not inner:
            seen.append(name)
            yield name, module


def _traced(model: PreTrainedModel, stack: str, layers: int, form: int) -> Anatomy:
    """What a forward pass without values and without the layers shows, if they are the list `stack`."""
    tape = _Tape(form, layers)
    # transformers knows these tensors, and asks nothing about their values; those of the meta device it does not know.
    with FakeTensorMode(allow_non_fake_inputs=True):
        skeleton = _skeleton(model, stack, tape)
        names = _untied(skeleton)
        ids = torch.zeros((2, 3), dtype=torch.int64)
        output = skeleton(input_ids=ids, **({"use_cache": False} if hasattr(skeleton.config, "use_cache") else {}))
    if len(tape.inputs) != layers:
        raise NotSequential(f"{len(tape.inputs)} of its {layers} layers are called")
    before, made_before = _reached([tape.inputs[0]])
    after, made_after = _reached(tree_leaves(output))
    if made_before & made_after:
        raise NotSequential("what is made before the layers is needed after them")
    handed = {id(hidden) for hidden in tape.handed}
    if after & handed != {id(tape.handed[-1])}:
        raise NotSequential("not only the last layer's output is used")
    everywhere: dict[str, set[int]] = {}
    for place, others in enumerate(tape.others):
        needed, _ = _reached(others)
        if needed & handed:
            raise NotSequential("a layer takes more of the earlier ones than hidden states")
        for leaf in needed:
            everywhere.setdefault(names[leaf], set()).add(place)
    return Anatomy(
        stack,
        layers,
        form,
        frozenset(names[leaf] for leaf in before),
        frozenset(names[leaf] for leaf in after - handed),
        {name: frozenset(places) for name, places in everywhere.items()},
    )


class _Tape:
    """What the layers of a model are called with, and what they return."""

    def __init__(self, form: int, layers: int) -> None:
        self.form = FORMS[form]
        self.layers = layers
        self.inputs: list[torch.Tensor] = []
        self.others: list[list[torch.Tensor]] = []
        self.handed: list[torch.Tensor] = []

    def see(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_of(args, kwargs)
        if place != len(self.inputs):
            raise NotSequential("its layers are not called one after another")
        if self.handed and hidden is not self.handed[-1]:
            raise NotSequential("something happens between layers")
        if hidden.ndim != 3 or hidden.shape[:2] != (2, 3):
            raise NotSequential(f"hidden states of shape {tuple(hidden.shape)}, not (rows, length, size)")
        rest = [value for value in (*args[1:], *kwargs.values()) if value is not hidden]
        if any(hasattr(value, "update") and not len(value) for value in rest):
            raise NotSequential("its layers write into something that others read")
        self.inputs.append(hidden)
        self.others.append([leaf for leaf in tree_leaves(rest) if isinstance(leaf, torch.Tensor)])
        self.handed.append(torch.empty_like(hidden).requires_grad_())
        return self.form(self.handed[-1])


class _Taped(nn.Module):
    """In the place of a layer of the skeleton."""

    def __init__(self, layer: nn.Module, place: int, tape: _Tape) -> None:
        super().__init__()
        copy_attributes(layer, self)
        self._place, self._tape = place, tape

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._tape.see(self._place, args, kwargs)


def _skeleton(model: PreTrainedModel, stack: str, tape: _Tape) -> PreTrainedModel:
    """A copy without values, with a tape in the place of the layers."""
    known: dict[int, Any] = {}
    for place, layer in enumerate(model.get_submodule(stack).children()):
        known[id(layer)] = _Taped(layer, place, tape)
    inside = f"{stack}."
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not name.startswith(inside):
            fake = torch.empty(tensor.shape, dtype=tensor.dtype)
            known[id(tensor)] = nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake
    skeleton: PreTrainedModel = copy.deepcopy(model, known).eval()
    return skeleton


def _untied(skeleton: nn.Module) -> dict[int, str]:
    """Give each name a parameter of its own, so that it is seen which one is used where: id of each -> name."""
    names = {}
    for prefix, module in skeleton.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = own = nn.Parameter(torch.empty(parameter.shape))
                names[id(own)] = f"{prefix}.{name}" if prefix else name
    return names


def _reached(tensors: Iterable[Any]) -> tuple[set[int], set[Any]]:
    """(ids of the leaves that `tensors` are computed from, the nodes of the graph in between)."""
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
            open_nodes += [following for following, _ in node.next_functions]
    return leaves, nodes


def copy_attributes(layer: nn.Module, stand_in: nn.Module) -> None:
    inherited = {*vars(nn.Module()), "forward", "_compiled_call_impl"}
    vars(stand_in).update({name: value for name, value in vars(layer).items() if name not in inherited})


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden
