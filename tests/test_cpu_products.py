"""Gradients of weights in compiled layers: a smaller left matrix is laid out row by row, with the same products."""

import shutil

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from artel.models.cpu.matmul_pass import ContiguousMatmul

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


def gradients(layer, inputs, **options):
    """Gradients of the weight and the inputs."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, options={"fx_graph_cache": False, **options}, dynamic=False)
    inputs = inputs.clone().requires_grad_()
    layer.weight.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(inputs).float().square().sum().backward()
    return layer.weight.grad, inputs.grad


def is_laid_out(graph):
    """Of each product whether its left matrix was laid out beforehand."""
    products = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    return [
        "force_stride_order" in str(node.args[0].target) and node.args[0].meta["val"].is_contiguous()
        for node in products
    ]


class Watched(ContiguousMatmul):
    """Tells after each graph which of its products it has changed."""

    def __init__(self):
        self.laid_out = []

    def __call__(self, graph):
        super().__call__(graph)
        self.laid_out += is_laid_out(graph)


@pytest.mark.parametrize(("outputs", "count"), [(96, 1), (48, 1), (32, 0)])
def test_where_the_left_matrix_is_no_larger_it_is_laid_out(outputs, count):
    torch.manual_seed(0)
    layer, inputs = Conv1D(outputs, 48), torch.randn(4, 16, 48)
    plain = gradients(layer, inputs)
    watched = Watched()
    result = gradients(layer, inputs, post_grad_custom_pre_pass=watched)
    assert sum(watched.laid_out) == count
    for own, other in zip(result, plain, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("dtype", "dynamic"), [(torch.float32, False), (torch.bfloat16, True)])
def test_products_in_float32_and_of_unknown_sizes_stay_as_they_are(dtype, dynamic):
    torch._dynamo.reset()
    watched = Watched()
    options = {"fx_graph_cache": False, "post_grad_custom_pre_pass": watched}
    torch.compile(lambda matrix: matrix.T @ matrix, options=options, dynamic=dynamic)(torch.randn(8, 8).to(dtype))
    assert watched.laid_out == [False]
