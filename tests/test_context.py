"""Sequences shared by processes: the same loss and gradients as one process, whatever is exchanged and how."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import BlockMask
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    ModernBertConfig,
    Qwen3Config,
    RobertaConfig,
    T5Config,
)

from artel.errors import InputError
from artel.models import IGNORED
from artel.models.activation_checkpointing import recompute
from artel.models.attention_masks import allow_block_masks
from artel.models.attention_switch import use_artel_attention
from artel.models.compile import repeated_layers
from artel.objectives import Batch
from artel.objectives.chat import shift_rows
from artel.objectives.collate import document_tensors, target_tensors
from artel.objectives.per_token import inputs_of, token_sums
from artel.parallel.context_exchange import SequenceShard
from artel.parallel.context_parallel import check_context, context_problems, exchange_choice, exchanging, split_batch
from artel.tokens import Rows
from support.ranks import run_ranks

LENGTH = 32
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "vocab_size": 120, "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = GPT2Config(n_layer=2, n_embd=36, n_head=4, vocab_size=120, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
LLAMA = LlamaConfig(**GROUPED)
ONE_LAYER = LlamaConfig(**{**GROUPED, "num_hidden_layers": 1})
QWEN3 = Qwen3Config(**GROUPED, head_dim=12)
GEMMA3 = Gemma3TextConfig(**GROUPED, head_dim=12, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
ROBERTA = RobertaConfig(**SMALL, **QUIET)
MODERNBERT = ModernBertConfig(
    **SMALL, cls_token_id=0, bos_token_id=0, eos_token_id=2, sep_token_id=2, local_attention=6,
    layer_types=["sliding_attention", "full_attention"], embedding_dropout=0.0, mlp_dropout=0.0,
)  # fmt: skip
DECODERS, ENCODERS = [GPT2, LLAMA, QWEN3, GEMMA3], [ROBERTA, MODERNBERT]


def built(config):
    """A model whose tokens' influence on one another would be seen: weights ten times as large as usual."""
    torch.manual_seed(0)
    kind = AutoModelForMaskedLM if config in ENCODERS else AutoModelForCausalLM
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model


def batch_of(kind, length=LENGTH):
    """Two rows: `joined` with a target for most tokens; `answers` with few and an odd length; `documents` apart."""
    chance = np.random.default_rng(0)
    if kind == "answers":
        length -= 5
    ids, targets = chance.integers(5, 120, (2, length)), chance.integers(5, 120, (2, length))
    targets[chance.random((2, length)) < (0.7 if kind == "answers" else 0.05)] = IGNORED
    tensors = {"input_ids": torch.from_numpy(ids)}
    if kind == "documents":
        numbers = np.repeat([[1, 2, 3, 0], [1, 2, 3, 4]], [13, 1, 9, length - 23], axis=1)  # 0: padding
        targets[numbers == 0] = IGNORED
        tensors |= document_tensors(numbers)
    return Batch(tensors | target_tensors(targets), int((targets != IGNORED).sum()), 2 * length - 3)


def sums_of(model, batch, config):
    inputs = inputs_of(model, batch, causal=config not in ENCODERS)
    return token_sums(model, inputs if config in ENCODERS else inputs | {"use_cache": False}, batch)


def gradients(model):
    by_name = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    return by_name


def summed(part, sums):
    """What the processes found, added up: the objective's sums, and targets and tokens as they were counted."""
    total = torch.cat([sums.detach(), torch.tensor([part.targets, part.tokens])])
    dist.all_reduce(total)
    return total


def difference(config, kind, how, rank, world, prepare=None):
    """The largest relative difference to one process, of loss, counts and any gradient."""
    model, batch = built(config), batch_of(kind)
    sums = sums_of(model, batch, config)  # by transformers' own attention
    sums[0].backward()
    reference = gradients(model)
    expected = torch.cat([sums.detach(), torch.tensor([batch.targets, batch.tokens])])
    assert use_artel_attention(model, encoders=True)
    if prepare is not None:
        prepare(model)
    part = split_batch(batch, rank, world, config not in ENCODERS)
    with exchanging(model, dist.group.WORLD, how):
        sums = sums_of(model, part, config)
        sums[0].backward()
    differences = [float(((summed(part, sums) - expected) / expected.clamp(min=1)).abs().max())]
    for name, gradient in gradients(model).items():
        dist.all_reduce(gradient)
        # Relative to the gradient's largest; where all of it is rounding (biases of keys have none), to 1.
        largest = reference[name].abs().max().clamp(min=1.0)
        differences.append(float((gradient - reference[name]).abs().max() / largest))
    return max(differences)


def parity(rank, world):
    """Differences by case; exchanges that a model is refused are left out. Over four processes fewer models."""
    results = {}
    for config in [*DECODERS, *ENCODERS] if world == 2 else [LLAMA, GEMMA3, ROBERTA]:
        for how in ("gather", "ulysses", "ring"):
            for kind in ("joined", "documents") if config in ENCODERS else ("joined", "answers", "documents"):
                if how != "ring" or (kind != "documents" and config not in (GEMMA3, MODERNBERT)):
                    results[f"{config.model_type} {how} {kind}"] = difference(config, kind, how, rank, world)
    return results


def parity_otherwise(rank, world):
    """Layers that are computed again and compiled (as one graph each, no code is generated); masks of blocks."""

    def compiled(model):
        recompute(model, "selective")
        for layer in repeated_layers(model):
            layer.compile(backend="aot_eager", fullgraph=True)

    results = {}
    for how in ("gather", "ulysses", "ring"):
        ways = {"full": partial(recompute, how="full"), "selective": partial(recompute, how="selective")}
        for name, way in {**ways, "compiled": compiled}.items():
            results[f"{how} {name}"] = difference(ONE_LAYER, "joined", how, rank, world, way)
    return results | {f"blocks {config.model_type} {how}": of_blocks(config, how, rank, world)
                    for config in (LLAMA, ROBERTA) for how in ("gather", "ulysses")}  # fmt: skip


def of_blocks(config, how, rank, world):
    """The difference of the loss where documents are kept apart by FlexAttention, which has no backward here."""
    model, batch = built(config), batch_of("documents")
    use_artel_attention(model, encoders=True)
    with torch.no_grad():
        expected = sums_of(model, batch, config)[0]
        allow_block_masks(model, True)
        part = split_batch(batch, rank, world, config not in ENCODERS)
        with exchanging(model, dist.group.WORLD, how):
            inputs = inputs_of(model, part, causal=config not in ENCODERS)
            assert isinstance(inputs["attention_mask"], BlockMask)
            actual = summed(part, sums_of(model, part, config))[0]
    return float((actual - expected).abs() / expected)


@pytest.mark.processes
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.ci), 4])
def test_loss_and_gradients_are_those_of_one_process(world):
    (results, *_) = run_ranks(world, __file__, "parity", 400)
    assert len(results) == {2: 39, 4: 19}[world]
    assert {case: gap for case, gap in results.items() if not gap < 1e-5} == {}


@pytest.mark.processes
def test_layers_computed_again_and_compiled_and_masks_of_blocks():
    (results, *_) = run_ranks(2, __file__, "parity_otherwise", 400)
    assert {case: gap for case, gap in results.items() if not gap < 1e-5} == {}


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_are_the_whole_and_balanced(size, balanced):
    whole = torch.arange(24.0)[None, None, :, None].expand(2, 3, 24, 5)
    own = 24 // size
    places = [SequenceShard(rank, size, balanced).positions(own) for rank in range(size)]
    assert sorted(torch.cat(places).tolist()) == list(range(24))
    if balanced:  # a token at place p sees p + 1
        assert len({int(each.sum()) for each in places}) == 1
    shard = SequenceShard(0, size, balanced)
    cut = shard.split(whole)
    for rank in range(size):
        assert torch.equal(cut[rank], whole[:, :, places[rank]])
    assert torch.equal(shard.join(cut), whole)


@pytest.mark.parametrize("kind", ["joined", "answers", "documents"])
def test_a_batch_is_split_with_every_target_once(kind):
    batch = batch_of(kind)
    length = batch.tensors["input_ids"].shape[1]
    filled = -(-length // 8) * 8
    parts = [split_batch(batch, rank, 4, True) for rank in range(4)]
    assert sum(part.targets for part in parts) == batch.targets
    assert sum(part.tokens for part in parts) == batch.tokens
    for rank, part in enumerate(parts):
        places = SequenceShard(rank, 4, True).positions(filled // 4)
        real = places < length
        for name in {"input_ids", "targets", "positions"} & set(batch.tensors):
            assert torch.equal(part.tensors[name][:, real], batch.tensors[name][:, places[real]])
        assert (part.tensors["targets"][:, ~real] == IGNORED).all()
        is_target = part.tensors["targets"].flatten() != IGNORED
        assert part.targets == int(is_target.sum())
        if kind == "answers":
            assert part.tensors["target_positions"].tolist() == is_target.nonzero()[:, 0].tolist()
        if kind == "documents":
            assert part.tensors["documents"].shape[1] == filled


def test_conversations_and_rows_of_padding_are_split():
    flags = np.array([[0, 0, 1, 1, 0, 1, 0], [1] * 7], dtype=np.uint8)
    ids = np.arange(14).reshape(2, 7) + 5
    valid = np.array([True, False])
    rows = Rows(ids, np.array([7, 7]), valid, np.arange(2), np.zeros(2, np.int64), flags, np.zeros((2, 0), np.int64))
    batch = shift_rows(rows)
    parts = [split_batch(batch, rank, 2, True) for rank in range(2)]
    assert sum(part.targets for part in parts) == batch.targets == 3
    assert sum(part.tokens for part in parts) == batch.tokens == 6


def test_padding_that_would_be_attended_to_is_refused():
    with pytest.raises(ValueError, match="padding would be attended to"):
        split_batch(batch_of("answers"), 0, 2, False)


@pytest.mark.parametrize(
    ("config", "size", "requested", "chosen"),
    [
        (LLAMA, 2, "gather", "gather"),
        (LLAMA, 2, "auto", "gather"),  # two heads of queries for each of keys: keys are cheaper to send
        (LLAMA, 4, "auto", "ulysses"),
        (GPT2, 2, "auto", "ulysses"),
        (GPT2, 3, "auto", "gather"),  # 4 heads over 3
    ],
)
def test_auto_chooses_what_sends_less(config, size, requested, chosen):
    assert exchange_choice(built(config), size, requested).value == chosen


@pytest.mark.parametrize(
    ("config", "size", "exchange", "block", "options", "messages"),
    [
        (LLAMA, 2, "auto", 32, {}, []),
        (LLAMA, 4, "ulysses", 32, {}, []),
        (ROBERTA, 2, "ring", 34, {}, []),  # an encoder needs multiples of 2 alone
        (LLAMA, 2, "gather", 34, {}, ["34 tokens cannot be cut into 4 chunks", "write 32 or 36"]),
        (LLAMA, 3, "ulysses", 24, {}, ["llama's 4 heads are not divisible by 3", "one of 1, 2, 4"]),
        (LLAMA, 4, "ulysses", 32, {"tensor": 2}, ["the 2 heads of llama on each of 2 processes"]),
        (GEMMA3, 2, "ring", 32, {}, ["a window of 5 tokens"]),
        (LLAMA, 2, "ring", 32, {"documents": True}, ["no masks to keep documents apart"]),
        (RobertaConfig(**SMALL), 2, "ring", 32, {}, ["dropout in its attention"]),
        (LLAMA, 2, "gather", 32, {"objective": "span_qa"}, ["span_qa is computed on full samples"]),
        (BloomConfig(n_layer=1, hidden_size=48, n_head=4, vocab_size=120), 2, "auto", 32, {}, ["its own attention"]),
        (MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=120), 2, "auto", 32, {},
         ["more than attention looks at other tokens"]),
        (Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]), 2, "auto", 32, {}, ["lfm2 has conv"]),
        (T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=120), 2, "auto", 32, {},
         ["an encoder and a decoder"]),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)  # fmt: skip
def test_what_cannot_be_split_is_told(config, size, exchange, block, options, messages):
    kind = AutoModelForMaskedLM if config.model_type == "roberta" else AutoModelForCausalLM
    if config.model_type == "t5":
        kind = AutoModelForSeq2SeqLM
    with torch.device("meta"):
        model = kind.from_config(config)
    use_artel_attention(model, encoders=True)
    problems = context_problems(model, size, exchange, block, **options)
    words = " ".join(f"{problem.what} {problem.fix}" for problem in problems)
    assert len(problems) == min(len(messages), 1)
    assert [part for part in messages if part not in words] == []


@pytest.mark.parametrize("config", [*DECODERS, *ENCODERS], ids=lambda config: config.model_type)
def test_models_that_can_are_found_able(config):
    model = built(config)
    use_artel_attention(model, encoders=True)
    assert context_problems(model, 2, "auto", LENGTH) == []
    check_context(model)
    assert model.training


@pytest.mark.parametrize("how", ["looks behind", "counts for itself"])
def test_a_model_that_sees_tokens_by_another_way_is_found_out(how):
    model = built(LLAMA)
    use_artel_attention(model)
    if how == "looks behind":
        model.model.embed_tokens.register_forward_hook(lambda _, __, embedded: embedded + embedded.roll(1, dims=1))
    else:
        model.model.register_forward_pre_hook(
            lambda _, args, given: (args, given | {"position_ids": None}), with_kwargs=True
        )
    with pytest.raises(InputError, match=r"parallel\.context.*llama mixes tokens"):
        check_context(model)


def test_outside_of_the_block_nothing_is_exchanged():
    model = built(LLAMA)
    ids = torch.arange(16)[None] + 20
    expected = model(input_ids=ids).logits
    use_artel_attention(model)
    check_context(model)
    torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
