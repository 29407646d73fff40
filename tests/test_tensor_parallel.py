"""Matrices split over processes: loss, gradients, guesses and what is saved are those of one process."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    BertConfig,
    DeepseekV2Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
)

from artel.config import LoraConfig
from artel.errors import InputError
from artel.models import IGNORED
from artel.models.activation_checkpointing import recompute
from artel.models.attention_switch import use_artel_attention
from artel.models.compile import repeated_layers
from artel.models.logits_loss import target_log_probs
from artel.models.lora.adapters import add_adapters
from artel.models.loss import model_losses
from artel.models.output_head import output_head
from artel.parallel.tensor_parallel import shard_dimension, split_by_tensor, tensor_problems
from support.ranks import run_ranks

SMALL = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
WIDE = SMALL | {"num_key_value_heads": 4}
ROUTED = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 101, "bos_token_id": 0, "eos_token_id": 0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CAUSAL = {
    "gpt2": GPT2Config(**GPT2),
    "llama": LlamaConfig(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, **ROUTED, mlp_only_layers=[1]),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4),
    "gpt_neox": GPTNeoXConfig(**SMALL),
    "phi3": Phi3Config(**GROUPED),
    "gemma2": Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=0.05),
    "opt": OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
}
FOR_FOUR = {"gpt2": CAUSAL["gpt2"], "llama": LlamaConfig(**WIDE), "qwen3_moe": Qwen3MoeConfig(**WIDE, **ROUTED)}
MASKED = {"roberta": RobertaConfig(**SMALL, **STILL), "bert": BertConfig(**SMALL, **STILL)}
NO_SEQUENCE = ("opt",)


def build(config, *, auto=AutoModelForCausalLM, adapters=False, one_expert=False):
    torch.manual_seed(0)
    model = auto.from_config(config)
    for name, parameter in model.named_parameters():  # biases too, so that a wrong one shows
        if parameter.ndim == 1:
            torch.manual_seed(len(name))
            parameter.data += 0.1 * torch.randn(parameter.shape)
        if one_expert and name.endswith("mlp.gate.weight"):
            parameter.data.zero_()  # all are equally likely, and the first ones are taken
    if one_expert:
        model.set_experts_implementation("eager")  # which computes no expert that has no token
    use_artel_attention(model)
    if adapters:
        add_adapters(model, LoraConfig(rank=4), base="", generates=True, new_modules=[], seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros at first, behind which lora_A has no gradient
                torch.manual_seed(len(name))
                parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def batch(*, length=12, seed=1):
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 101, (3, length), generator=random)
    targets = torch.randint(3, 101, (3, length), generator=random)
    targets[:, ::3] = IGNORED
    ids[0, -2:] = 1  # the padding id, whose row is looked up and has no gradient
    return ids, targets


def learn(model, ids, targets):
    """Two micro-batches, the second of them with places: (losses, guesses)."""
    places = (targets.flatten() != IGNORED).nonzero().flatten()
    results = []
    for where in (None, places):
        loss, guesses = model_losses(model, {"input_ids": ids}, targets, where)
        (loss * 0.1).backward()
        results.append((float(loss.detach()), guesses))
    return results


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(reference, model, ids, targets):
    """Largest differences of losses and of gradients, relative; and the same weights under the same names."""
    expected, actual = learn(reference, ids, targets), learn(model, ids, targets)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(expected, actual, strict=True))
    difference = max(abs(a[0] - b[0]) / abs(a[0]) for a, b in zip(expected, actual, strict=True))
    return {"loss": difference} | compare_gradients(reference, model)


def compare_gradients(reference, model):
    theirs, mine = dict(reference.named_parameters()), dict(model.named_parameters())
    assert mine.keys() == theirs.keys()
    largest = max(float(each.grad.abs().max()) for each in theirs.values() if each.grad is not None)
    off = {}
    for name, parameter in mine.items():
        expected, gradient = theirs[name].grad, parameter.grad
        assert (gradient is None) == (expected is None), name
        assert torch.equal(whole(parameter), theirs[name]), f"{name} is in another order"
        if gradient is None:
            continue
        assert not isinstance(gradient, DTensor) or not any(each.is_partial() for each in gradient.placements), name
        # Keys' biases have no gradient but rounding.
        scale = float(expected.abs().max()) + 1e-3 * largest
        off[name] = float((whole(gradient) - expected).abs().max()) / scale
    worst = max(off, key=off.__getitem__)
    return {"gradient": off[worst], "of": worst}


def case(mesh, config, *, sequence=False, adapters=False, auto=AutoModelForCausalLM, recomputed="none", **options):
    reference, model = (build(config, auto=auto, adapters=adapters, **options) for _ in range(2))
    assert tensor_problems(model, mesh.size(), sequence=sequence) == []
    said = split_by_tensor(model, mesh, sequence=sequence)
    recompute(model, recomputed)
    assert (output_head(model) is None) == (output_head(reference) is None)
    return compare(reference, model, *batch()) | {"said": said}


def on_two(rank, world):
    mesh, results = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",)), {}
    lonely = Qwen3MoeConfig(**GROUPED, **(ROUTED | {"num_experts_per_tok": 1}))
    results["no tokens for a process"] = case(mesh, lonely, one_expert=True)
    for name, config in (CAUSAL | MASKED).items():
        auto = AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM
        results[name] = case(mesh, config, auto=auto)
        if name not in NO_SEQUENCE:
            results[f"{name}, sequence"] = case(mesh, config, sequence=True, auto=auto)
    for name in ("gpt2", "llama"):
        results[f"{name}, adapters"] = case(mesh, CAUSAL[name], adapters=True)
        results[f"{name}, adapters, sequence"] = case(mesh, CAUSAL[name], adapters=True, sequence=True)
        results[f"{name}, recomputed"] = case(mesh, CAUSAL[name], sequence=True, recomputed="full")
    for name, config in {"gpt2": CAUSAL["gpt2"], "llama": CAUSAL["llama"], "roberta": MASKED["roberta"]}.items():
        auto = AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM
        results[f"{name}, logits"] = logits_case(mesh, config, auto, length=12)
        results[f"{name}, logits of an odd length"] = logits_case(mesh, config, auto, length=11)
    results["bert, tokens"] = logits_case(mesh, MASKED["bert"], AutoModelForTokenClassification, length=12)
    results["llama, log-probabilities"] = log_probs_case(mesh, CAUSAL["llama"])
    return results


def log_probs_case(mesh, config):
    """Log-probabilities, and entropies in place of the loss."""
    reference, model = (build(config) for _ in range(2))
    split_by_tensor(model, mesh, sequence=False)
    ids, targets = batch()
    places = torch.arange(targets.numel())
    found = []
    for each in (reference, model):
        log_probs, entropies = target_log_probs(each, {"input_ids": ids}, targets.flatten().clamp(min=0), places)
        log_probs.sum().backward()
        found.append(entropies)
    difference = float(((found[1] - found[0]) / found[0]).abs().max())
    return {"loss": difference} | compare_gradients(reference, model)


def logits_case(mesh, config, auto, length):
    """As objectives use a model that have a loss of their own."""
    reference, model = (build(config, auto=auto) for _ in range(2))
    split_by_tensor(model, mesh, sequence=True)
    ids, targets = batch(length=length)
    losses = []
    for each in (reference, model):
        logits = each(input_ids=ids).logits.flatten(0, 1)
        expected = targets.flatten() % logits.shape[-1]
        losses.append(F.cross_entropy(logits, expected, reduction="sum"))
        losses[-1].backward()
    expected, actual = (float(loss.detach()) for loss in losses)
    return {"loss": abs(expected - actual) / expected} | compare_gradients(reference, model)


def more_on_two(rank, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    return {
        "communication": {sequence: communication(mesh, sequence == "sequence") for sequence in ("whole", "sequence")},
        "written": [written(mesh, CAUSAL[name], sequence) for name in ("gpt2", "llama") for sequence in (False, True)],
        "saved": [saved(mesh, CAUSAL["gpt2"]), saved(mesh, CAUSAL["qwen3_moe"])],
        "from meta": from_meta(mesh),
    }


def communication(mesh, sequence):
    """What a Llama's two layers send in a forward and a backward pass, by kind."""
    model = build(CAUSAL["llama"])
    split_by_tensor(model, mesh, sequence=sequence)
    shapes = []
    norm = model.model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda _, inputs, output: shapes.append(output.shape[1]))
    with CommDebugMode() as counted:
        model.model(batch()[0], use_cache=False).last_hidden_state.square().sum().backward()
    sent = {str(kind).rpartition(".")[2]: count for kind, count in counted.get_comm_counts().items()}
    return {"sent": sent, "tokens": shapes}


def written(mesh, config, sequence):
    """Whether what is generated is what one process generates."""
    reference, model = (build(config).eval() for _ in range(2))
    split_by_tensor(model, mesh, sequence=sequence)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = batch(length=4)[0]
    mask = torch.ones_like(ids)
    theirs, mine = (each.generate(ids, attention_mask=mask, **options) for each in (reference, model))
    return torch.equal(theirs, mine)


def saved(mesh, config):
    """Whether a checkpoint, which goes by places in the whole, gives the weights in the model's own order."""
    reference, model = (build(config) for _ in range(2))
    split_by_tensor(model, mesh, sequence=False)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(dict(model.named_parameters()), checkpoint_id=folder[0])
    empty = {name: torch.zeros_like(each) for name, each in reference.named_parameters()}
    dcp.load(empty, checkpoint_id=folder[0])
    return all(torch.equal(each, empty[name]) for name, each in reference.named_parameters())


def from_meta(mesh):
    """Split without weights, then filled: tied weights stay tied, and logits are those of one process."""
    reference = build(CAUSAL["gpt2"])
    model = skeleton(CAUSAL["gpt2"])
    split_by_tensor(model, mesh, sequence=False)
    assert model.lm_head.weight is model.transformer.wte.weight
    model.to_empty(device="cpu")
    model.lm_head.weight = model.transformer.wte.weight
    weights = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                placements = parameter.placements
                parameter.copy_(distribute_tensor(weights[name], mesh, placements, src_data_rank=None))
            else:
                parameter.copy_(weights[name])
    ids = batch()[0]
    return float((model.eval()(ids).logits - reference.eval()(ids).logits).abs().max().detach())


def on_four(rank, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    results = {name: case(mesh, config) for name, config in FOR_FOUR.items()}
    results |= {f"{name}, sequence": case(mesh, config, sequence=True) for name, config in FOR_FOUR.items()}
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for name in ("gpt2", "qwen3", "qwen3_moe", "roberta"):
        config = (CAUSAL | MASKED)[name]
        auto = AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM
        for sequence in (False, True):
            results[f"{name}, sharded{', sequence' * sequence}"] = sharded(root, config, sequence, auto)
    return results


def sharded(root, config, sequence, auto):
    """Each of the two in dimension `shard` takes the same batch: gradients, means over it, are those of one process."""
    reference, model = (build(config, auto=auto) for _ in range(2))
    split_by_tensor(model, root["tensor"], sequence=sequence)
    for layer in repeated_layers(model):
        fully_shard(layer, mesh=root["shard"])
    shards = root["shard"].size()
    fully_shard(model, mesh=root["shard"], shard_placement_fn=lambda parameter: shard_dimension(parameter, shards))
    return compare(reference, model, *batch())


def agree(results):
    for rank, cases in enumerate(results):
        wrong = {name: each for name, each in cases.items() if each["loss"] > 2e-6 or each["gradient"] > 1e-5}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.processes
def test_two_processes_compute_what_one_does():
    agree(run_ranks(2, __file__, "on_two"))


@pytest.mark.processes
def test_four_processes_and_shards_of_shares():
    agree(run_ranks(4, __file__, "on_four"))


@pytest.mark.processes
def test_what_is_sent_written_saved_and_loaded():
    results = run_ranks(2, __file__, "more_on_two")
    for rank in results:
        assert rank["written"] == [True] * 4
        assert rank["saved"] == [True] * 2
        assert rank["from meta"] < 1e-5
        traffic = rank["communication"]
        # One after each attention and each network, and one for the embedding; backward, one before each.
        assert traffic["whole"] == {"sent": {"all_reduce": 2 * 2 + 1 + 2 * 2}, "tokens": [12]}
        # Half of each is gathered before and half scattered after; the ends of the stack gather once more each, and
        # the gradients of four norms are summed.
        sent = {"all_gather_into_tensor": 4 + 1 + 4 + 1, "reduce_scatter_tensor": 4 + 4, "all_reduce": 1 + 4}
        assert traffic["sequence"] == {"sent": sent, "tokens": [6]}


def skeleton(config, auto=AutoModelForCausalLM):
    with torch.device("meta"):
        return auto.from_config(config)


REFUSED = [
    (LlamaConfig(**GROUPED), 4, False, ["2 key-value heads", "1, 2"]),
    (LlamaConfig(**(GROUPED | {"intermediate_size": 45})), 2, False, ["45 outputs of mlp.gate_proj", "of: 1"]),
    (GPT2Config(**GPT2), 3, False, ["gpt2 has 4 attention heads", "1, 2, 4"]),
    (MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2), 2, False, ["can split mamba"]),
    (DeepseekV2Config(), 2, False, ["in ways that artel does not support: mla_kv_a_proj"]),
    (CAUSAL["opt"], 2, True, ["cannot be split along the sequence"]),
    (GPT2Config(**GPT2, add_cross_attention=True), 2, True, ["a second sequence"]),
]


@pytest.mark.parametrize(("config", "size", "sequence", "messages"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_cannot_be_split_is_refused_with_what_would_do(config, size, sequence, messages):
    (problem,) = tensor_problems(skeleton(config), size, sequence=sequence)
    for each in messages:
        assert each in str(problem)


def test_adapters_that_cannot_be_split_are_refused():
    for options, key in ((LoraConfig(dora=True), "model.lora"), (LoraConfig(save=["down_proj"]), "model.lora.save")):
        model = build(CAUSAL["llama"])
        add_adapters(model, options, base="", generates=True, new_modules=[], seed=0)
        assert [problem.where for problem in tensor_problems(model, 2, sequence=False)] == [key]


def test_shares_of_a_vocabulary_are_shared_out_so_that_they_come_together_again():
    """GPT-2's 50,257 over 2 x 4 processes is one that DTensor puts together wrongly by rows."""

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "shard", "tensor"))["tensor"]

        def share(*shape):
            return distribute_tensor(torch.empty(shape, device="meta"), mesh, [Shard(0)], src_data_rank=None)

        assert shard_dimension(share(50_257, 64), 4) == Shard(1)
        assert shard_dimension(share(50_256, 64), 4) is None  # divides
        assert shard_dimension(share(50_257, 63), 2) is None  # comes together rightly
        assert shard_dimension(torch.empty(50_257, 64), 4) is None  # whole
        with pytest.raises(InputError, match="vocab_size: 50258"):
            shard_dimension(share(50_257, 63), 4)
    finally:
        dist.destroy_process_group()
