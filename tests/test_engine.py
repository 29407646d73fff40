"""Engines: which one a model gets, and that answers written together are those of each prompt alone."""

from __future__ import annotations

import queue
from contextlib import closing

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3MoeConfig,
)

from artel.errors import InputError
from artel.generation import paged, slots
from artel.generation.base import EngineError, Generation
from artel.generation.make import SequentialEngine, make_engine
from artel.generation.paged import BatchingEngine
from artel.generation.sampler import Sampler, SamplingOptions
from artel.generation.slot_model import Chunk, SlotModel, SlotsUnsupported
from artel.generation.slots import SlotEngine
from artel.models.cpu.build import load_library
from artel.models.cpu.packed import pack, packable_bytes
from support.chat_models import trained_tokenizer
from support.engines import CONTEXT, ROWS, SIZES, alone, made, prompt_of, together

GPT2 = {"vocab_size": ROWS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
BLOOM = {"vocab_size": ROWS, "hidden_size": 64, "n_layer": 2, "n_head": 4}


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer([])


@pytest.mark.parametrize(
    ("config", "kind", "why"),
    [
        (LlamaConfig(**SIZES), SlotEngine, ""),
        (GPT2Config(**GPT2), SlotEngine, ""),
        (Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32), SlotEngine, ""),
        (MistralConfig(**SIZES, sliding_window=CONTEXT), SlotEngine, ""),
        (MistralConfig(**SIZES, sliding_window=8), BatchingEngine, "a window is not computed in slots"),
        (Gemma2Config(**SIZES, sliding_window=CONTEXT, head_dim=16), BatchingEngine, "softcap"),
        (BloomConfig(**BLOOM), SequentialEngine, "; "),
    ],
    ids=["llama", "gpt2", "experts", "wide window", "window", "softcap", "alibi"],
)
def test_answers_together_are_those_of_each_prompt_alone(config, kind, why, tokenizer):
    model = made(config)
    prompts = [prompt_of(length, length) for length in (1, 5, 40, 3, 17, 2, 90)]
    expected = [alone(model, tokenizer, prompt, 8) for prompt in prompts]
    attention = model.config._attn_implementation
    with closing(make_engine(model, tokenizer, 4, CONTEXT)) as engine:
        assert isinstance(engine, kind), engine.note
        assert why in engine.note
        assert together(engine, tokenizer, prompts, 8) == expected
    assert model.config._attn_implementation == attention
    assert not any("forward" in vars(module) for module in model.modules())


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 16.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
BY_LAYER = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, rope_parameters=LONGROPE),
        Phi3Config(**SIZES, original_max_position_embeddings=32, rope_parameters=dict(LONGROPE)),
        LlamaConfig(**{**SIZES, "max_position_embeddings": 32}, rope_parameters=DYNAMIC),
        Gemma3TextConfig(**SIZES, head_dim=16, rope_parameters=BY_LAYER),
    ],
    ids=["longrope", "phi3", "dynamic", "by type of layer"],
)
def test_an_answer_does_not_depend_on_a_longer_one_beside_it_where_positions_follow_the_longest(config, tokenizer):
    model = made(config)
    prompts = [prompt_of(8, 8), prompt_of(60, 60)]
    with closing(make_engine(model, tokenizer, 2, 128)) as engine:
        beside = together(engine, tokenizer, prompts, 12)[0]
    assert beside == alone(model, tokenizer, prompts[0], 12)
    assert isinstance(engine, SequentialEngine)
    assert "beyond 32 tokens" in engine.note
    within = make_engine(model, tokenizer, 2, 32)
    within.close()
    assert not isinstance(within, SequentialEngine), within.note


def test_a_prompt_that_begins_as_another_did_takes_over_what_was_computed(tokenizer):
    model = made(LlamaConfig(**SIZES))
    computed = []
    model.register_forward_pre_hook(lambda *given: computed.append(given[2]["input_ids"].shape[1]), with_kwargs=True)
    first, other = prompt_of(60, 1), prompt_of(30, 2)
    longer, beside = [*first, *prompt_of(9, 3)], [*first[:50], *prompt_of(5, 4)]
    prompts = [first, other, longer, beside, first]
    expected = [alone(model, tokenizer, prompt, 4) for prompt in prompts]
    computed.clear()
    with closing(make_engine(model, tokenizer, 3, CONTEXT)) as engine:
        computed.clear()
        written = []
        for prompt in prompts:  # one behind another: the slots of those before are free, and hold them still
            written += together(engine, tokenizer, [prompt], 4)
        assert written == expected
        assert computed == [60, 1, 1, 1, 30, 1, 1, 1, 9, 1, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1]
        computed.clear()
        assert together(engine, tokenizer, [longer, beside, first], 4) == expected[2:]
        assert sum(computed) < 60


@pytest.mark.parametrize(
    ("module", "room", "config", "places", "lengths", "count"),
    [
        # Four texts of 256 tokens, or two of 512: all of them grow beyond 256, and the youngest wait.
        (slots, 1024, LlamaConfig(**SIZES), (8, CONTEXT), (250, 251, 252, 253, 20, 254), 12),
        # Four of the answers, with their prompts, have 320: some are set aside, and finished.
        (paged, 160, Gemma2Config(**SIZES, sliding_window=8, head_dim=16), (4, 128), (30, 60, 20, 50, 5), 40),
    ],
    ids=["slots", "pages"],
)
def test_where_memory_is_short_every_answer_is_whole(
    module, room, config, places, lengths, count, tokenizer, monkeypatch
):
    monkeypatch.setattr(module, "tokens_in_memory", lambda *_: room)
    model = made(config)
    prompts = [prompt_of(length, length) for length in lengths]
    expected = [alone(model, tokenizer, prompt, count) for prompt in prompts]
    with closing(make_engine(model, tokenizer, *places)) as engine:
        assert isinstance(engine, SlotEngine if module is slots else BatchingEngine), engine.note
        assert together(engine, tokenizer, prompts, count) == expected


def test_what_an_engine_cannot_compute_is_refused(tokenizer, monkeypatch):
    model = made(LlamaConfig(**SIZES))
    ids = torch.tensor([prompt_of(6, 1), prompt_of(6, 2)])
    one = model(ids[:1]).logits
    with closing(make_engine(model, tokenizer, 2, CONTEXT)):
        with pytest.raises(SlotsUnsupported, match="needs a mask"):  # a padded batch beside the engine
            model(ids, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]))
        torch.testing.assert_close(model(ids[:1]).logits, one)
    with pytest.raises(InputError) as error:
        make_engine(model, tokenizer, 1, 10**12)
    assert error.value.problems[0].where == "--context"
    # An error of the engine itself is not taken for a model that cannot be batched.
    monkeypatch.setattr(slots, "tokens_in_memory", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        make_engine(model, tokenizer, 4, CONTEXT)
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_fails_does_not_end_the_engine(tokenizer):
    model = made(LlamaConfig(**SIZES))
    prompt = prompt_of(5, 5)
    expected = alone(model, tokenizer, prompt, 4)
    with closing(make_engine(model, tokenizer, 2, CONTEXT)) as engine:
        assert isinstance(together(engine, tokenizer, [[ROWS + 7]], 4)[0], EngineError)  # it has no embedding
        assert together(engine, tokenizer, [prompt], 4) == [expected]
        with pytest.raises(EngineError, match="context has 512"):
            together(engine, tokenizer, [prompt], CONTEXT)
    with pytest.raises(EngineError, match="stopping"):
        together(engine, tokenizer, [prompt], 4)


class _Closing(list):
    """A prompt that closes the engine when it is read."""

    def __init__(self, prompt, engine):
        super().__init__(prompt)
        self._engine = engine

    def __iter__(self):
        self._engine.close()
        return super().__iter__()


def test_a_request_that_comes_while_the_engine_closes_is_refused(tokenizer):
    model, prompt = made(LlamaConfig(**SIZES)), prompt_of(5, 5)
    for engine in (make_engine(model, tokenizer, 2, CONTEXT), SequentialEngine(model, tokenizer, "")):
        items = queue.SimpleQueue()
        sampler = Sampler(SamplingOptions(temperature=0), prompt, tokenizer.vocabulary)
        generation = Generation(sampler, 4, frozenset(), items.put)
        if isinstance(engine, SequentialEngine):
            engine.close()
        with pytest.raises(EngineError, match="stopping"):
            engine.submit(_Closing(prompt, engine), generation)


def test_slots_that_memory_does_not_suffice_for_leave_the_cache_as_it_was(tokenizer):
    model = made(LlamaConfig(**SIZES))
    texts = [prompt_of(6, 1), prompt_of(9, 2)]
    with closing(SlotModel(model, CONTEXT)) as slot_model:
        slot_model.resize([None, None], 16)
        slot_model.logits([Chunk(number, 0, ids[:-1]) for number, ids in enumerate(texts)])
        with pytest.raises(RuntimeError):
            slot_model.resize([0, 1], 10**15)
        given = slot_model.logits([Chunk(number, len(ids) - 1, ids[-1:]) for number, ids in enumerate(texts)])
    for row, ids in zip(given, texts, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(row, model(torch.tensor([ids])).logits[0, -1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pad_id", range(9))
def test_the_trial_of_slots_has_no_padding_token(pad_id):
    """At an end of a row transformers takes it for padding, and warns that there is no mask."""
    model, ends = made(GPT2Config(**GPT2, pad_token_id=pad_id)), set()
    model.register_forward_pre_hook(
        lambda _, inputs, named: ends.update(named["input_ids"][:, [0, -1]].flatten().tolist()), with_kwargs=True
    )
    SlotModel(model, CONTEXT).close()
    assert len(ends) > 2
    assert pad_id not in ends


def test_packed_layers_multiply_as_before_and_are_undone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 7, bias=False))
    inputs = [torch.randn(*shape) for shape in ((1, 48), (16, 48), (2, 33, 48))]
    with torch.no_grad():
        expected = [model(each) for each in inputs]
        undo = pack(model)
        packed = [model(each) for each in inputs]
        undo()
        for before, between, each in zip(expected, packed, inputs, strict=True):
            torch.testing.assert_close(between, before)
            assert torch.equal(model(each), before)


def test_a_model_whose_packed_weights_have_no_room_stays_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(torch.zeros(1).expand(10**8, 10**8), requires_grad=False)  # 40 PB, if it were copied
    if load_library("packed") is None or not packable_bytes(model):
        pytest.skip("nothing is packed on this processor, or without a C++ compiler")
    with pytest.raises(RuntimeError):
        pack(model)
    assert not any("forward" in vars(module) for module in model)
