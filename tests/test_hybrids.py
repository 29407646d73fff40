"""Layers with a state, where documents share a block: each document begins with an empty one, as if it stood alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
    xLSTMConfig,
)

import artel
from artel.config import RunConfig, load_run
from artel.errors import InputError
from artel.models.activation_checkpointing import recompute
from artel.models.attention_switch import use_artel_attention
from artel.models.document_mask import check_documents, document_inputs
from artel.models.hybrid_state import document_split, state_modules
from artel.models.loading.build import build_model
from artel.models.loading.request import ModelRequest
from artel.objectives import build_objective
from artel.objectives.collate import document_tensors
from artel.planning import StartConditions, check_run
from support.runs import losses, write_run

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 120, "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
ATTENTION = {**SIZES, "head_dim": 8, "max_position_embeddings": 64}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
NO_EXPERTS = {"num_local_experts": 0, "num_experts_per_tok": 0}
HYBRIDS = [
    Qwen3_5TextConfig(**ATTENTION, **DELTA),
    Qwen3NextConfig(**ATTENTION, **DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                    shared_expert_intermediate_size=16),
    KimiLinearConfig(**{**SIZES, "num_key_value_heads": 4}, linear_num_heads=4, linear_head_dim=8, kv_lora_rank=8,
                     q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8,
                     layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_token=2,
                     moe_intermediate_size=16),
    Mamba2Config(hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=8,
                 vocab_size=120),
    MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=120),
    GraniteMoeHybridConfig(**SIZES, **MAMBA, **NO_EXPERTS, layer_types=["mamba", "attention"],
                           shared_intermediate_size=64),
    BambaConfig(**SIZES, **MAMBA, attn_layer_indices=[1]),
    FalconH1Config(**ATTENTION, **MAMBA, mamba_d_ssm=64),
    NemotronHConfig(**ATTENTION, layers_block_type=["mamba", "attention"], mamba_num_heads=8, mamba_head_dim=8,
                    ssm_state_size=8, n_groups=1, chunk_size=8),
    Zamba2Config(**{**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 4}, mamba_d_state=8, n_mamba_heads=8,
                 mamba_headdim=8, chunk_size=8, layers_block_type=["mamba", "hybrid", "hybrid"]),
    JambaConfig(**SIZES, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, num_experts=2),
    Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
]  # fmt: skip
LENGTHS = (13, 1, 9, 12, 5)


def built(config):
    """A model whose documents' influence on one another would be seen."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.1)
    return model


def gradients(model):
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    return found


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        scale = max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(gradient, expected[name], atol=1e-5 * scale, rtol=1e-5, msg=name)


@pytest.mark.parametrize("config", HYBRIDS, ids=lambda config: config.model_type)
def test_each_document_gives_what_it_gives_alone(config):
    model = built(config)
    ids = torch.randint(5, 120, (2, sum(LENGTHS)))
    targets = torch.randint(5, 120, ids.shape)

    def sums(logits):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="mean")

    expected = torch.cat([model(input_ids=each, use_cache=False).logits for each in ids.split(LENGTHS, dim=1)], dim=1)
    sums(expected).backward()
    alone = gradients(model)

    use_artel_attention(model)
    numbers = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)[None].repeat(2, axis=0)
    inputs = document_inputs(model, **document_tensors(numbers), causal=True)
    packed = model(input_ids=ids, use_cache=False, **inputs).logits
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
    sums(packed).backward()
    assert_same(gradients(model), alone)
    # Without the documents they do influence one another, also behind a batch that had them.
    joined = model(input_ids=ids, use_cache=False).logits
    assert (joined - expected).abs().max() > 1e-2
    check_documents(model, causal=True)


def test_what_is_computed_again_is_computed_by_documents():
    model = built(HYBRIDS[0]).train()
    ids = torch.randint(5, 120, (1, sum(LENGTHS)))
    numbers = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)[None]
    found = []
    for how in ("none", "full"):
        recompute(model, how)
        inputs = document_inputs(model, **document_tensors(numbers), causal=True)
        model(input_ids=ids, use_cache=False, **inputs).logits.square().mean().backward()
        found.append(gradients(model))
    assert_same(*found)


def test_a_split_has_every_token_once_and_little_padding():
    chance = np.random.default_rng(0)
    numbers = np.sort(chance.integers(0, 40, (3, 256)), axis=1)
    split = document_split(torch.from_numpy(numbers))
    places = torch.cat([group.flatten() for group in split.groups])
    torch.testing.assert_close(places[split.inverse], torch.arange(numbers.size))
    assert split.tokens < numbers.size / 0.75
    assert len(split.groups) < 15
    for group in split.groups:  # no document goes over the end of a row, none is mixed with another
        assert (group // 256 == group[:, :1] // 256).all()
        flat = torch.from_numpy(numbers).flatten()[group]
        assert (flat == flat[:, :1]).all()
    assert document_split(torch.ones(3, 16, dtype=torch.int64)) is None
    assert document_split(torch.ones(3, 16, dtype=torch.int64, device="meta")) is None


def test_a_state_that_is_not_found_is_refused_by_name():
    config = xLSTMConfig(hidden_size=32, num_blocks=2, num_heads=4, vocab_size=120, chunk_size=8)
    model = built(config)
    assert state_modules(model) == []
    with pytest.raises(InputError, match=r"data\.document_mask.*xlstm"):
        check_documents(model, causal=True)


CONFIGS = {config.model_type: config for config in HYBRIDS}
NOT_GIVEN = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba2", "granitemoehybrid"])
def test_the_loop_packs_them(model_type, tmp_path):
    """The losses of two steps, and the gradient between, are those of the pieces of documents, each alone."""
    values = {name: value for name, value in given(model_type).items() if name not in NOT_GIVEN}
    run = write_run(
        tmp_path / "run.yaml",
        data={"packing": "best_fit", "validation": 0, "sources": [{"format": "dummy", "documents": 12}]},
        model={"config": {"model_type": model_type, **values}},
        train={"steps": 2, "batch": 500, "micro_batch": 4, "learning_rate": 0.1, "optimizer": "sgd", "momentum": 0,
               "schedule": "constant", "warmup": 0, "clip": None, "weight_decay": 0},
        track=["jsonl"],
    )  # fmt: skip
    prepared = artel.prepare(str(run))
    config = load_run(str(run))
    objective = build_objective(config, prepared.tokenizer())
    blocks = objective.dataset(prepared.open().train)
    request = ModelRequest(config.model, objective.auto_class, objective.heads, config.data.block, config.seed)
    model = build_model(request, prepared.tokenizer()).model
    expected = []
    for _ in range(2):
        total, targets = torch.zeros(()), 0
        for index in range(len(blocks)):
            sample = blocks.read(index)
            numbers, may = sample.flags >> 1, sample.flags & 1
            for number in range(1, int(numbers[:-1].max()) + 1):
                at = np.flatnonzero(numbers[:-1] == number)
                logits = model(input_ids=torch.from_numpy(sample.ids[at])[None], use_cache=False).logits[0]
                follow = torch.from_numpy(np.where(may[at + 1], sample.ids[at + 1], -100))
                total = total + F.cross_entropy(logits, follow, ignore_index=-100, reduction="sum")
                targets += int((follow != -100).sum())
        (total / targets).backward()
        norm = torch.stack([value.grad.norm() for value in model.parameters() if value.grad is not None]).norm()
        expected.append((float(total.detach()) / targets, float(norm)))
        with torch.no_grad():
            for value in model.parameters():
                if value.grad is not None:
                    value -= 0.1 * value.grad
        model.zero_grad()
    artel.train(str(run), {"train.batch": len(blocks)})
    by_step = losses(tmp_path / "run")
    assert [by_step[1], by_step[2]] == [pytest.approx(values, rel=1e-5) for values in expected]


def given(model_type):
    """The keys that a test gave its configuration."""
    config = CONFIGS[model_type]
    plain = type(config)().to_dict()
    return {name: value for name, value in config.to_dict().items() if name in plain and value != plain[name]}


def test_what_shares_sequences_or_layers_is_refused_before_text_is_read():
    values = {"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8}
    run = {"data": {"sources": [{"format": "dummy"}], "packing": "best_fit"}, "model": {"config": values}}
    for dimension in ("context", "pipeline"):
        config = RunConfig.model_validate(run | {"parallel": {dimension: 2}})
        with pytest.raises(
            InputError, match=rf"parallel\.{dimension}.*mamba2 has (layers with a state|linear_attention)"
        ):
            check_run(config, StartConditions(world_size=2))
