"""CUDA's autocast in a trace with the operators of a CPU: what it computes in float32 and a CPU's does not.

"CUDA Ops that can autocast to float32" of PyTorch's documentation (docs.pytorch.org/docs/stable/amp.html), of which
GPT-2's GELU has the power: in bf16 it keeps 20 % more there (benchmarks/plan_gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_IN_FLOAT32 = (
    _aten.pow.Tensor_Scalar,
    _aten.pow.Tensor_Tensor,
    _aten.pow.Scalar,
    _aten.exp.default,
    _aten.log.default,
    _aten.rsqrt.default,
    _aten.reciprocal.default,
    _aten.softplus.default,
    _aten.cumsum.default,
    _aten.layer_norm.default,
    _aten.group_norm.default,
)
"""Those that transformers' models use."""
_WITH_DTYPE = (
    _aten.softmax.int,
    _aten.log_softmax.int,
    _aten.sum.default,
    _aten.sum.dim_IntList,
)
"""They return float32, unless a dtype is passed."""
_HALVES = (torch.bfloat16, torch.float16)
_KEY = "AutocastCPU"
_OWN_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Within the block the CPU's autocast, where it is on, converts inputs of those operators to float32 as well."""
    library = torch.library.Library("aten", "IMPL")
    for operator in _IN_FLOAT32:
        library.impl(operator.name(), _in_float32(operator), _KEY)
    for operator in _WITH_DTYPE:
        library.impl(operator.name(), _giving_float32(operator), _KEY)
    try:
        yield
    finally:
        library._destroy()


def _in_float32(operator: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_OWN_KEY):
            wide, named = tree_map_only(torch.Tensor, _wide, (args, kwargs))
            return operator(*wide, **named)

    return kernel


def _giving_float32(operator: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(tensor: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if args and isinstance(args[-1], torch.dtype):
            args, dtype = args[:-1], args[-1]
        with torch._C._ExcludeDispatchKeyGuard(_OWN_KEY):
            if dtype is None and tensor.dtype in _HALVES:
                dtype = torch.float32
            return operator(tensor, *args, dtype=dtype, **kwargs)

    return kernel


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor
