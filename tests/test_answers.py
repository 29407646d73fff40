"""Several answers to each prompt: their log-probabilities, their seeds, and the prompt that is read once."""

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from artel.generation import GenerationPrompt
from artel.generation.answers import sample_answers
from artel.generation.generate import Sampling
from artel.generation.slot_model import SlotModel
from artel.tokens.tokenizer.chat_template import TurnEnd
from support.chat_models import trained_tokenizer
from support.engines import CONTEXT, ROWS, SIZES, made, prompt_of

GPT2 = {"vocab_size": ROWS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer([])


def prompts_of(lengths, ends=frozenset(), texts=()):
    return [GenerationPrompt(prompt_of(length, length), TurnEnd(ends, texts)) for length in lengths]


def write(model, tokenizer, prompts, seeds, **settings):
    sampling = Sampling(NEW_TOKENS, temperature=1.0, top_k=0)
    return sample_answers(model, tokenizer, prompts, seeds, sampling, **settings)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "config", [LlamaConfig(**SIZES), GPT2Config(**GPT2),
               Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)],
    ids=["llama", "gpt2", "experts"],
)  # fmt: skip
def test_log_probabilities_are_those_of_the_model(config, temperature, tokenizer):
    model = made(config).train()
    prompts = prompts_of((3, 40, 17))
    sampling = Sampling(NEW_TOKENS, temperature=temperature, top_k=5)
    groups = sample_answers(model, tokenizer, prompts, [[1, 2], [3, 4], [5, 6]], sampling)
    assert model.training
    model.eval()
    for prompt, group in zip(prompts, groups, strict=True):
        for answer in group:
            with torch.no_grad():
                logits = model(torch.tensor([prompt.ids + answer.ids])).logits[0, len(prompt.ids) - 1 : -1]
            expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
            assert torch.tensor(answer.log_probs).allclose(expected, atol=1e-5)


@pytest.mark.parametrize("together", [True, False])
def test_rows_without_a_token_count_in_log_probabilities(together, tokenizer):
    model = made(LlamaConfig(**SIZES | {"vocab_size": 3 * ROWS}))
    assert tokenizer.vocabulary < 3 * ROWS
    (prompt,) = prompts_of((7,))
    ((answer,),) = write(model, tokenizer, [prompt], [[0]], together=together)
    with torch.no_grad():
        log_probs = model(torch.tensor([prompt.ids + answer.ids])).logits[0, len(prompt.ids) - 1 : -1].log_softmax(-1)
    expected = log_probs.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
    assert torch.tensor(answer.log_probs).allclose(expected, atol=1e-5)


def test_an_answer_depends_on_its_seed_alone(tokenizer):
    model = made(LlamaConfig(**SIZES))
    prompts = prompts_of((3, 40, 17, 90, 2))
    seeds = [[10 * row + column for column in range(4)] for row in range(5)]
    groups = write(model, tokenizer, prompts, seeds)
    one_by_one = write(model, tokenizer, prompts, seeds, together=False)
    assert [[answer.ids for answer in group] for group in one_by_one] == [
        [answer.ids for answer in group] for group in groups
    ]
    (reversed_group,) = write(model, tokenizer, prompts[1:2], [seeds[1][::-1]])
    assert [answer.ids for answer in reversed_group[::-1]] == [answer.ids for answer in groups[1]]
    assert len({tuple(answer.ids) for answer in groups[1]}) > 1
    assert write(model, tokenizer, prompts, seeds) == groups  # bit for bit


def test_a_prompt_is_read_once_for_all_its_answers(tokenizer, monkeypatch):
    read = []
    logits = SlotModel.logits
    monkeypatch.setattr(SlotModel, "logits", lambda self, chunks: (
        read.extend(len(chunk.ids) for chunk in chunks), logits(self, chunks))[1])  # fmt: skip
    write(made(LlamaConfig(**SIZES)), tokenizer, prompts_of((200,)), [list(range(16))])
    trial = 8 + 5
    assert sum(read) - trial <= 200 + 16 * NEW_TOKENS


def test_the_end_is_part_of_the_ids_and_not_of_the_text(tokenizer):
    model = made(LlamaConfig(**SIZES))
    (free,) = write(model, tokenizer, prompts_of((5,)), [[0]])
    end = free[0].ids[4]
    (ended,) = write(model, tokenizer, prompts_of((5,), frozenset({end})), [[0]])
    first = free[0].ids.index(end)
    assert ended[0].ids == free[0].ids[: first + 1]
    assert not ended[0].cut_off
    assert free[0].cut_off
    assert ended[0].text == tokenizer.decode(free[0].ids[:first])
