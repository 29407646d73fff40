"""Training on one GPU: kernels beside a reference, every objective beside a CPU, precisions, stops, memory."""

import json
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from artel.config import load_run
from artel.errors import Interrupted
from artel.models import IGNORED
from artel.models.attention import AttentionOptions, attend, block_mask
from artel.models.attention_switch import use_artel_attention
from artel.models.cross_entropy import cross_entropy_, gpu_rows
from artel.models.cross_entropy_rows import Rows
from artel.models.document_mask import check_documents, obeys_shared_prefixes
from artel.models.logits_loss import linear_log_probs
from artel.models.loss import linear_cross_entropy
from artel.parallel import World, join_world
from artel.preparing import prepare
from artel.training import loop
from support.cross_entropy import assert_exact, some
from support.cross_entropy import exact as exact_cross_entropy
from support.messages import logged
from support.objectives import OBJECTIVES, objective_run
from support.runs import largest_difference, losses, merged, write_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GPU, CPU = torch.device("cuda"), torch.device("cpu")
BF16 = 2.0**-8
LLAMA = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 512}  # fmt: skip


def trained(file: Path, device: torch.device = GPU, callbacks=()) -> list[str]:
    """The run, trained on a device; what it said."""
    prepared = prepare(load_run(str(file)))
    said = logged()
    if device.type == "cpu":
        loop.train(prepared.config, prepared, World(0, 1, 0, device), callbacks)
        return said
    with join_world(prepared.config.train.threads) as world:
        assert world.device.type == "cuda"
        loop.train(prepared.config, prepared, world, callbacks)
    return said


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.detach().double() - expected.detach()).norm() / expected.norm())


# Attention and the loss beside float64 ----------------------------------------------


def visible(kind: str, length: int, documents: torch.Tensor) -> torch.Tensor:
    """bool (rows, 1, length, length): which keys a query of a case sees."""
    distance = torch.arange(length, device=GPU)[:, None] - torch.arange(length, device=GPU)
    seen = torch.ones(len(documents), 1, length, length, dtype=torch.bool, device=GPU)
    if kind in ("causal", "window", "documents"):
        seen = seen & (distance >= 0)
    if kind == "window":
        seen = seen & (distance < 100)
    if kind in ("documents", "documents both ways"):
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    if kind == "padding":
        seen = seen & (documents > 1)[:, None, None, :]
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("kind", ["causal", "window", "whole", "padding", "documents", "documents both ways"])
def test_attention_and_its_gradients_are_those_of_the_reference(kind, size, dtype):
    """Grouped heads, 512 tokens; relative to float64: bf16 within two roundings, float32 within what TF32 rounds."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 512, size, device=GPU, dtype=dtype, requires_grad=True) for heads in (8, 2, 2)
    )
    documents = torch.randint(1, 6, (2, 512), device=GPU).sort(dim=1).values
    seen = visible(kind, 512, documents)
    mask = None
    if kind.startswith("documents"):
        mask = block_mask(documents, torch.arange(512, device=GPU), causal=kind == "documents")
    elif kind == "padding":
        mask = seen
    options = AttentionOptions(mask, kind in ("causal", "window"), 100 if kind == "window" else None, 0.0, None)
    gradient = torch.randn_like(query)
    output = attend(query, key, value, options)
    actual = torch.autograd.grad(output, (query, key, value), gradient)
    double = [each.detach().double().requires_grad_() for each in (query, key, value)]
    wide = [each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in double]
    scores = (wide[0] @ wide[1].mT / size**0.5).masked_fill(~seen, -torch.inf)
    expected = scores.softmax(dim=-1) @ wide[2]
    gradients = torch.autograd.grad(expected, double, gradient.double())
    most = 2 * BF16 if dtype == torch.bfloat16 else 2e-3
    assert relative(output, expected) < most
    for mine, theirs in zip(actual, gradients, strict=True):
        assert relative(mine, theirs) < most


@pytest.mark.parametrize("vocabulary", [50257, 1000])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_loss_and_its_gradients_are_those_of_the_reference(precision, frozen, vocabulary):
    """In pieces of 128 positions; a head whose rows are padded for the tensor cores, in bf16."""
    torch.manual_seed(0)
    hidden = torch.randn(700, 64, device=GPU, requires_grad=True)
    weight = (torch.randn(vocabulary, 64, device=GPU) / 8).requires_grad_(not frozen)
    targets = torch.randint(vocabulary, (700,), device=GPU)
    targets[::3] = IGNORED
    inputs = [hidden] if frozen else [hidden, weight]
    with torch.autocast("cuda", precision, enabled=precision == torch.bfloat16):
        loss, guesses = linear_cross_entropy(hidden, weight, None, targets, chunk_bytes=1)
    actual = torch.autograd.grad(loss, inputs)
    rounded = [each.to(precision).double() for each in (hidden, weight)]
    logits = F.linear(*rounded)
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    most = 2 * BF16 if precision == torch.bfloat16 else 1e-5
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=most)
    for mine, theirs in zip(actual, torch.autograd.grad(expected, inputs), strict=True):
        assert relative(mine, theirs.double()) < most
    best = logits.max(dim=1).values
    assert float((best - logits.gather(1, guesses[:, None])[:, 0]).max() / best.max()) < most
    with torch.autocast("cuda", precision, enabled=precision == torch.bfloat16):
        each, _ = linear_log_probs(hidden, weight, None, targets.clamp(min=0), chunk_bytes=1)
    reference = -F.cross_entropy(logits, targets.clamp(min=0), reduction="none")
    assert relative(each, reference) < most


@pytest.mark.parametrize("vocabulary", [50257, 1000, 7])
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_of_cross_entropy_is_exact(dtype, soft_cap, vocabulary):
    """With factors, padding and ignored rows; then the gradient by the statistics alone, as of a shard."""
    logits, targets = (each.to(GPU) for each in some(70, vocabulary, dtype))
    factors = torch.randn(70, device=GPU)
    expected = exact_cross_entropy(logits, targets, factors, soft_cap)
    padded = F.pad(logits, (0, -vocabulary % 64))
    statistics, guesses = torch.empty(4, 70, device=GPU), torch.empty_like(targets)
    rows = Rows(padded.clone(), targets, factors, statistics, guesses, vocabulary, 0, vocabulary, soft_cap)
    gpu_rows(rows, with_statistics=True, with_grad=False)
    assert torch.equal(rows.logits, padded)
    gpu_rows(rows, with_statistics=False, with_grad=True)
    arguments = {"compute": gpu_rows, "vocabulary": vocabulary, "factors": factors, "soft_cap": soft_cap}
    assert_exact(cross_entropy_(padded, targets, **arguments), padded[:, :vocabulary], expected, dtype)
    assert torch.equal(rows.logits, padded)
    assert not padded[:, vocabulary:].any()


@pytest.mark.parametrize("compiled", [False, True])
def test_documents_and_branches_are_kept_apart_by_flexattention(compiled):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA, vocab_size=300, pad_token_id=None)).to(GPU)
    use_artel_attention(model)
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    check_documents(model, causal=True)
    assert obeys_shared_prefixes(model)


# Objectives -----------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_learns_on_a_gpu_as_on_a_cpu(tmp_path, name):
    """Loss and gradient norm of five steps in float32, by SGD, in four micro-batches."""
    train = {"optimizer": "sgd", "learning_rate": 0.05, "batch": 16, "steps": 5, "micro_batch": 4}
    for place, device in (("gpu", GPU), ("cpu", CPU)):
        trained(objective_run(tmp_path / f"{place}.yaml", name, train=train), device)
    assert largest_difference(losses(tmp_path / "cpu"), losses(tmp_path / "gpu")) < 1e-3


LONG = {"data": {"sources": [{"format": "dummy", "documents": 2000}], "block": 256},
        "train": {"steps": 8, "batch": 16, "micro_batch": 8, "compile": "auto", "precision": "auto",
                  "optimizer": "sgd", "learning_rate": 0.05}}  # fmt: skip
MODELS = {
    "gpt2": {},
    "llama": LLAMA,
    "qwen3_moe": {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 128, "head_dim": 64},
    "gemma3_text": {**LLAMA, "model_type": "gemma3_text", "head_dim": 64, "sliding_window": 64,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_next": {**LLAMA, "model_type": "qwen3_next", "num_experts": 0, "mlp_only_layers": [0, 1], "head_dim": 64,
                   "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_in_bf16_a_model_learns_as_in_float32(tmp_path, name, packing):
    """Documents side by side in a block, too. On a GPU the choice of `auto` is bf16 and compiled layers."""
    data = {"packing": packing, "document_mask": packing == "best_fit"}
    base = merged(LONG, {"data": data, "model": {"config": MODELS[name]} if MODELS[name] else {}})
    exact = merged(base, {"train": {"compile": "off", "precision": "fp32"}})
    trained(write_run(tmp_path / "exact.yaml", **exact))
    said = "\n".join(trained(write_run(tmp_path / "auto.yaml", **base)))
    assert "bf16" in said
    assert "could not be compiled" not in said, said
    assert "not compiled" not in said, said
    assert largest_difference(losses(tmp_path / "exact"), losses(tmp_path / "auto")) < 0.03


@pytest.mark.parametrize("name", ["chat", "dpo", "masked", "seq2seq", "embedding"])
def test_compiled_in_bf16_an_objective_learns_as_in_float32(tmp_path, name):
    train = {"optimizer": "sgd", "learning_rate": 0.05, "batch": 16, "steps": 5, "micro_batch": 4}
    trained(objective_run(tmp_path / "exact.yaml", name, train=train))
    train |= {"compile": "on", "precision": "bf16"}
    said = "\n".join(trained(objective_run(tmp_path / "auto.yaml", name, train=train)))
    assert "could not be compiled" not in said, said
    for (exact, _), (loss, _) in zip(
        losses(tmp_path / "exact").values(), losses(tmp_path / "auto").values(), strict=True
    ):
        assert loss == pytest.approx(exact, rel=0.05, abs=0.01)


# Precisions and optimizers ----------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_other_precisions_learn_as_bf16_does(tmp_path, precision):
    if precision == "fp8":
        pytest.importorskip("torchao", reason="torchao is not installed")
    train = {"steps": 20, "learning_rate": 1e-3, "optimizer": "adamw"}
    for name in ("bf16", precision):
        base = merged(LONG, {"model": {"config": LLAMA}, "train": {**train, "precision": name}})
        said = "\n".join(trained(write_run(tmp_path / f"{name}.yaml", **base)))
    assert precision in said
    before, after = (losses(tmp_path / name) for name in ("bf16", precision))
    assert after[20][0] == pytest.approx(before[20][0], rel=0.03)
    assert after[20][0] < after[1][0] - 0.3


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adafactor", "muon", "sgd"])
def test_every_optimizer_lowers_the_loss(tmp_path, optimizer):
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    rate = {"sgd": 0.3, "muon": 0.02, "adafactor": 1e-2}.get(optimizer, 1e-3)
    train = {"steps": 20, "learning_rate": rate, "optimizer": optimizer, "compile": "off"}
    trained(write_run(tmp_path / "run.yaml", **merged(LONG, {"train": train})))
    by_step = losses(tmp_path / "run")
    assert by_step[20][0] < by_step[1][0] - 0.1


def test_weights_in_bf16_learn_as_those_of_float32(tmp_path):
    train = {"steps": 20, "learning_rate": 1e-3, "optimizer": "adamw", "compile": "off"}
    trained(write_run(tmp_path / "wide.yaml", **merged(LONG, {"train": train})))
    trained(write_run(tmp_path / "half.yaml", **merged(LONG, {"train": {**train, "weights": "bf16"}})))
    wide, half = losses(tmp_path / "wide"), losses(tmp_path / "half")
    assert half[20][0] == pytest.approx(wide[20][0], rel=0.03)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_computing_activations_again_changes_nothing(tmp_path, mode, compiled):
    base = merged(LONG, {"model": {"config": LLAMA}, "train": {"compile": compiled, "precision": "fp32"}})
    trained(write_run(tmp_path / "kept.yaml", **base))
    trained(write_run(tmp_path / "again.yaml", **merged(base, {"train": {"activation_checkpointing": mode}})))
    assert largest_difference(losses(tmp_path / "kept"), losses(tmp_path / "again")) < 1e-4


@pytest.mark.parametrize("quantize", ["none", "int8", "nf4"])
def test_adapters_learn_over_weights_of_any_width(tmp_path, quantize):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    base = merged(LONG, {"model": {"config": LLAMA}, "train": {"steps": 2}})
    trained(write_run(tmp_path / "base.yaml", **base))
    model = {"config": None, "from": str(tmp_path / "base" / "model"), "lora": {"rank": 8}, "quantize": quantize}
    train = {"steps": 20, "optimizer": "adamw", "learning_rate": 3e-3}
    changes = merged(base, {"train": train}) | {"model": model, "tokenizer": {"train": None}}
    trained(write_run(tmp_path / "tuned.yaml", **changes))
    by_step = losses(tmp_path / "tuned")
    assert by_step[20][0] < by_step[1][0] - 0.05


# Stops, memory, the profile -----------------------------------------------------------


class StopAfter:
    """SIGTERM after a step, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, run: loop.Run) -> None:
        if run.step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path, compiled):
    """In bf16. On an H200 bit for bit; other kernels may add in another order each time."""
    train = {"compile": compiled, "optimizer": "adamw", "learning_rate": 1e-3}
    base = merged(LONG, {"model": {"config": LLAMA}, "train": train, "checkpoint": {"every": 3}})
    trained(write_run(tmp_path / "whole.yaml", **base))
    stopped = write_run(tmp_path / "stopped.yaml", **base)
    with pytest.raises(Interrupted):
        trained(stopped, callbacks=[StopAfter(4)])
    said = "\n".join(trained(stopped))
    assert "resuming from step" in said
    difference = largest_difference(losses(tmp_path / "whole"), losses(tmp_path / "stopped"))
    assert difference < 1e-6


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A micro-batch that another test found, with other memory, is not remembered here."""
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))


def test_a_micro_batch_is_found_that_fits_the_memory(tmp_path, own_cache):
    """Of 15 % of the card, 10 % are kept free: the largest micro-batch does not fit, and a smaller one is found."""
    model = {"model_type": "gpt2", "n_layer": 8, "n_embd": 512, "n_head": 8,
             "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # fmt: skip
    train = {"steps": 2, "batch": 256, "micro_batch": "auto", "compile": "off", "activation_checkpointing": "none"}
    run = write_run(tmp_path / "run.yaml", **merged(LONG, {"model": {"config": model}, "train": train}))
    torch.cuda.set_per_process_memory_fraction(0.15)
    try:
        said = "\n".join(trained(run))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "micro-batches of" in said
    assert "micro-batches of 256" not in said
    assert losses(tmp_path / "run").keys() == {1, 2}


def test_memory_that_runs_out_in_a_step_costs_a_smaller_micro_batch(tmp_path, own_cache):
    model = {"model_type": "gpt2", "n_layer": 8, "n_embd": 512, "n_head": 8,
             "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # fmt: skip
    train = {"steps": 3, "batch": 256, "micro_batch": "auto", "compile": "off", "activation_checkpointing": "none"}
    run = write_run(tmp_path / "run.yaml", **merged(LONG, {"model": {"config": model}, "train": train}))
    held: list[torch.Tensor] = []

    def take_memory(running: loop.Run) -> None:
        """Another program takes nearly all of what is free."""
        if running.step == 1:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
            torch.cuda.set_per_process_memory_fraction(1.0)
            held.append(torch.empty(free - 2**31, dtype=torch.uint8, device=GPU))

    said = "\n".join(trained(run, callbacks=[take_memory]))
    held.clear()
    torch.cuda.empty_cache()
    assert losses(tmp_path / "run").keys() == {1, 2, 3}
    assert "out of memory with micro-batches of 256" in said


def test_the_profile_accounts_for_the_whole_step(tmp_path):
    base = merged(LONG, {"model": {"config": LLAMA}, "train": {"steps": 12}, "profile": True})
    trained(write_run(tmp_path / "run.yaml", **base))
    table = json.loads((tmp_path / "run" / "profile" / "table.json").read_text())
    kinds = {row["kind"]: row["milliseconds"] for row in table["kinds"]}
    assert table["device"] == "cuda"
    assert sum(kinds.values()) >= table["milliseconds"] * 0.99
    for kind in ("matrix products", "attention", "loss", "elementwise and norms", "optimizer and clipping"):
        assert kinds[kind] > 0, kinds


def test_a_run_with_dropout_is_the_same_twice(tmp_path):
    """In attention, within documents: FlexAttention has no dropout."""
    model = {**LLAMA, "attention_dropout": 0.2}
    data = {"packing": "best_fit", "document_mask": True}
    for name in ("one", "other"):
        base = merged(LONG, {"model": {"config": model}, "data": data, "train": {"compile": "off"}})
        trained(write_run(tmp_path / f"{name}.yaml", **base))
    assert largest_difference(losses(tmp_path / "one"), losses(tmp_path / "other")) < 1e-2
