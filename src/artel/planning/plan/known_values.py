"""The values of a batch's whole numbers, beside a trace, which has shapes alone.

Attention to answers that share a row asks where each answer begins. FakeTensors cannot say. So what is computed of
such numbers alone is computed in earnest too, and its values are remembered with the FakeTensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

_VALUES = "artel_values"


def remember_values(fake: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`fake`, with the values of `tensor`, if these are whole numbers or bools."""
    if not tensor.is_floating_point():
        setattr(fake, _VALUES, tensor)
    return fake


def known_result(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives of tensors whose values are all known, with values; None where one is not known.

    An operator that changes a tensor whose values are known, by values that are not, makes them unknown.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not tensors or not all(hasattr(tensor, _VALUES) for tensor in tensors):
        for tensor in tensors if getattr(getattr(func, "_schema", None), "is_mutable", False) else ():
            vars(tensor).pop(_VALUES, None)
        return None
    real_args, real_kwargs = tree_map(_values, (args, kwargs))
    with no_dispatch():
        return func(*real_args, **real_kwargs)


def with_values(result: Any, known: Any) -> Any:
    """`result`, of FakeTensors, with the values of `known`."""
    for fake, tensor in zip(tree_leaves(result), tree_leaves(known), strict=True):
        if isinstance(fake, FakeTensor):
            remember_values(fake, tensor)
    return result


def _values(leaf: Any) -> Any:
    return getattr(leaf, _VALUES) if isinstance(leaf, torch.Tensor) else leaf
