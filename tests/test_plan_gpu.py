"""What a plan for a GPU imitates on a CPU: which tensors compiled layers keep, and what CUDA's autocast computes in."""

from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, BertConfig, GPT2Config, LlamaConfig, Qwen3Config
from transformers.activations import NewGELUActivation

from artel.config import parse_run
from artel.models.attention_switch import use_artel_attention
from artel.models.compile import repeated_layers
from artel.planning.hardware import find_hardware
from artel.planning.operations import MATMUL
from artel.planning.plan import make_plan
from artel.planning.plan.gpu_trace import CompiledSaving, cuda_autocast, save_as_compiled
from artel.planning.plan.live_bytes import ACTIVATIONS, OPTIMIZER, LiveBytes, bytes_by_kind
from artel.planning.plan.rank_memory import FRAMEWORK
from support.runs import TINY, merged

SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 384,
         "vocab_size": 100, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
CONFIGS = [
    LlamaConfig(**SIZES, num_key_value_heads=2),
    Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32),
    GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=100, n_positions=128, resid_pdrop=0, embd_pdrop=0,
               attn_pdrop=0, bos_token_id=0, eos_token_id=0),
    BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
]  # fmt: skip


def called(config, change):
    """The model, and the layers' calls as `change` makes them of their own."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config).train()
    use_artel_attention(model)
    for layer in repeated_layers(model):
        layer.forward = change(layer.forward)
    with torch.autocast("cpu", torch.bfloat16):
        return model, model(input_ids=torch.arange(4 * 96).remainder(100).view(4, 96))


def bytes_of(model, tensors):
    """Of their storages, without the model's weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for place, size in sizes.items() if place not in weights)


def saved_by(config, compiled):
    """Bytes that the layers' calls save for the backward pass."""
    held = []

    def pack(tensor):
        held.append(tensor)
        return tensor

    def change(forward):
        if compiled:
            forward = torch.compile(forward, backend="aot_eager_decomp_partition")

        def saving(*args, **kwargs):
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                return forward(*args, **kwargs)

        return saving

    torch._dynamo.reset()
    model, _ = called(config, change)
    return bytes_of(model, held)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_layers_keep_what_the_compilers_partitioner_keeps(config):
    """Beside the bytes that the graphs of PyTorch's own partitioner save: within 2 %, and less than eager ones save."""
    calls = []

    def imitating(forward):
        def saving(*args, **kwargs):
            calls.append(CompiledSaving((args, kwargs)))
            with calls[-1]:
                return forward(*args, **kwargs)

        return saving

    model, output = called(config, imitating)
    imitated = bytes_of(model, [tensor for call in calls for tensor in call.saved_tensors()])
    assert output is not None  # the graph is alive
    compiled, eager = saved_by(config, compiled=True), saved_by(config, compiled=False)
    assert imitated == pytest.approx(compiled, rel=0.02)
    assert compiled < 0.95 * eager


def test_what_was_let_go_has_its_shape_in_the_backward_pass():
    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIGS[0]).train()
    save_as_compiled(model)
    model(input_ids=torch.zeros(2, 8, dtype=torch.int64)).last_hidden_state.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("compiled", [False, True])
def test_what_lives_between_two_products_alone_is_never_written_by_compiled_layers(compiled):
    """x @ x, then exp and tanh, then a product that reads the tanh: of exp's result there is no memory."""
    x = torch.ones(64, 64)
    with LiveBytes(compiled=compiled) as live:
        product = x @ x
        between = product.exp()
        product = between.tanh()
        del between
        product = product @ x
    del product
    assert bytes_by_kind(live.events)[ACTIVATIONS] == (2 if compiled else 3) * x.nbytes


def test_what_compiled_layers_recompute_takes_no_memory_in_their_forward_pass():
    """A layer's activation is dropped at its end: before, a plan held it until then."""
    torch.manual_seed(0)
    sizes = []
    for is_told in (True, False):
        model = AutoModel.from_config(CONFIGS[2]).train()
        live = LiveBytes(compiled=True)
        save_as_compiled(model, live.ignore_bytes if is_told else lambda _: None)
        with torch.autocast("cpu", torch.bfloat16), cuda_autocast(), live:
            output = model(input_ids=torch.zeros(4, 96, dtype=torch.int64)).last_hidden_state
        sizes.append(bytes_by_kind(live.events)[ACTIVATIONS])
        assert output.requires_grad
    assert sizes[0] < 0.9 * sizes[1]


def test_cudas_autocast_computes_powers_in_float32():
    activation, values = NewGELUActivation(), torch.randn(4, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        here = activation(values)
        with cuda_autocast():
            there = activation(values)
    assert (here.dtype, there.dtype) == (torch.bfloat16, torch.float32)
    with cuda_autocast():
        assert activation(values).dtype == torch.bfloat16  # no autocast


def test_cudas_autocast_gives_softmax_and_sums_in_float32():
    values = torch.randn(4, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), cuda_autocast():
        given = [values.softmax(-1), values.log_softmax(-1), values.sum(), values.sum(-1)]
        given.append(values.softmax(-1, torch.half))
        wide = values.float().softmax(-1)
    assert [tensor.dtype for tensor in given] == [torch.float32] * 4 + [torch.half]
    assert torch.equal(given[0], wide)
    assert values.softmax(-1).dtype == torch.bfloat16


def test_what_is_computed_again_is_computed_in_the_same_precision():
    activation, values = NewGELUActivation(), torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), cuda_autocast():
        checkpoint(activation, values, use_reentrant=False).sum().backward()  # which compares what is saved
    assert values.grad is not None


def test_layers_in_float8_multiply_and_keep_as_they_train() -> None:
    """Three products a layer in float8, the head's in bf16. A compiled layer computes the converted inputs again."""
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
              "num_attention_heads": 4}  # fmt: skip
    plans = {}
    for precision in ("bf16", "fp8"):
        train = {"precision": precision, "batch": 8, "micro_batch": 8, "compile": "on"}
        run = parse_run(merged(TINY, {"model": {"config": config}, "train": train}), {}, {})
        plans[precision] = make_plan(run, find_hardware("h200:1"))
    flops = {
        precision: Counter({operation.dtype: 0 for operation in plan.fullest.passes})
        for precision, plan in plans.items()
    }
    for precision, plan in plans.items():
        for operation, count in plan.fullest.passes.items():
            flops[precision][operation.dtype] += operation.flops * count * (operation.kind == MATMUL)
    assert sum(flops["fp8"].values()) == sum(flops["bf16"].values())
    layers = 2 * (4 * 256 * 256 + 3 * 256 * 512)
    tokens = 8 * run.data.block
    assert flops["fp8"]["fp8"] == 6 * layers * tokens
    assert plans["fp8"].fullest.by_kind[ACTIVATIONS] < plans["bf16"].fullest.by_kind[ACTIVATIONS]
    assert plans["fp8"].fullest.by_kind[OPTIMIZER] == plans["bf16"].fullest.by_kind[OPTIMIZER]


@pytest.mark.long
def test_float8_is_planned_as_it_was_measured() -> None:
    """Llama 1.57 billion on an H200: 64,684 tokens/s in 63.8 GiB (benchmarks/NOTES.md)."""
    config = {"model_type": "llama", "num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 5632,
              "num_attention_heads": 16, "max_position_embeddings": 2048}  # fmt: skip
    train = {"precision": "fp8", "batch": 16, "micro_batch": 16, "compile": "on", "activation_checkpointing": "none"}
    changes = {"model": {"config": config}, "train": train, "data": {"block": 2048}}
    run = parse_run(merged(TINY, changes | {"tokenizer": {"train": {"vocab": 32_000}}}), {}, {})
    plan = make_plan(run, find_hardware("h200:1"))
    allocated = plan.fullest.allocated - plan.fullest.by_kind[FRAMEWORK]
    assert allocated / 2**30 == pytest.approx(63.8, rel=0.05)
    assert plan.tokens_per_second is not None
    assert plan.tokens_per_second.mid == pytest.approx(64_684, rel=0.25)
