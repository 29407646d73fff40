"""Answers to one prompt in one row: each with the logits, the loss and the gradients of a row of its own."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    RwkvConfig,
)

from artel.config import TokenizerTraining
from artel.models.attention_masks import allow_block_masks
from artel.models.attention_switch import use_artel_attention
from artel.models.document_mask import obeys_shared_prefixes, shared_prefix_inputs
from artel.objectives.answer_rows import Answer, answer_tensors
from artel.tokens import evaluation_rows, train_tokenizer
from support.preferences import CONTROL, MODEL, PAIRS, preferring, stored

SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "vocab_size": 120, "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
OBEYING = [
    GPT2Config(n_layer=2, n_embd=36, n_head=4, vocab_size=120, attn_pdrop=0),
    LlamaConfig(**GROUPED),
    Qwen3Config(**GROUPED, head_dim=12),
    MistralConfig(**GROUPED, sliding_window=5),
    Gemma3TextConfig(**GROUPED, head_dim=12, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
]


def built(config):
    """A model with weights ten times as large as usual: what is wrongly seen shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    use_artel_attention(model)
    return model


def answers(random):
    """Three samples with two answers: of unequal length, with nothing in common, and with one that is missing."""

    def answer(prompt, length):
        ids = np.concatenate([prompt, random.integers(5, 120, length)])
        return Answer(ids, (np.arange(len(ids)) >= len(prompt)).astype(np.uint8))

    prompt, empty = random.integers(5, 120, 13), np.empty(0, dtype=np.int64)
    return [
        [answer(prompt, 9), answer(prompt, 14)],
        [answer(empty, 7), answer(empty, 8)],
        [answer(prompt, 6), Answer(empty, empty.astype(np.uint8))],
    ]  # fmt: skip


def logits_of_targets(model, tensors):
    inputs = {"input_ids": tensors["input_ids"], "use_cache": False}
    if "branches" in tensors:
        inputs |= shared_prefix_inputs(model, *(tensors[name] for name in ("documents", "branches", "positions")))
    return model(**inputs).logits.flatten(0, 1)[tensors["target_positions"]], inputs


@pytest.mark.parametrize("config", OBEYING, ids=lambda config: config.model_type)
def test_each_answer_gets_the_logits_and_gradients_of_its_own_row(config):
    model = built(config)
    assert obeys_shared_prefixes(model)
    samples = answers(np.random.default_rng(0))
    gradients, logits = [], []
    for shared in (False, True):
        tensors = answer_tensors(samples, share_prompts=shared)
        found, _ = logits_of_targets(model, tensors)
        model.zero_grad()
        (found * torch.linspace(-1, 1, len(found))[:, None]).sum().backward()
        logits.append(found.detach())
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    assert tensors["documents"].max(dim=1).values.tolist() == [2, 1]  # three samples in two rows
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in gradients[0].values())
    for name, expected in gradients[0].items():
        # Keys' biases have no gradient but rounding.
        limit = 1e-5 * float(expected.abs().max()) + 1e-6 * largest
        torch.testing.assert_close(gradients[1][name], expected, atol=limit, rtol=1e-5)


@pytest.mark.parametrize("config", OBEYING[:3], ids=lambda config: config.model_type)
def test_block_masks_say_the_same(config):
    """As on a GPU: FlexAttention runs on a processor too, uncompiled and without backward."""
    model = built(config)
    samples = answers(np.random.default_rng(0))
    expected, _ = logits_of_targets(model, answer_tensors(samples, share_prompts=False))
    allow_block_masks(model, True)
    assert obeys_shared_prefixes(model)
    with torch.no_grad():
        actual, inputs = logits_of_targets(model, answer_tensors(samples, share_prompts=True))
    assert isinstance(inputs["attention_mask"], BlockMask)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(n_layer=2, hidden_size=48, n_head=4, vocab_size=120),  # places of its own
        RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=120),
        Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_do_not_obey_are_found(config):
    assert not obeys_shared_prefixes(built(config))


def test_what_answers_begin_with_is_read_once():
    samples = answers(np.random.default_rng(0))
    tensors = answer_tensors(samples[:1], share_prompts=True)
    one, other = (answer.ids for answer in samples[0])
    row = tensors["input_ids"][0, : int(tensors["documents"].sum())].tolist()
    assert row == [*one[:-1], *other[13:-1]]
    assert tensors["positions"][0, : len(row)].tolist() == [*range(21), *range(13, 26)]
    chosen, rejected = (tensors["answer_targets"][0, side] for side in (0, 1))
    assert tensors["targets"][chosen[chosen < 23]].tolist() == one[13:].tolist()
    assert tensors["targets"][rejected].tolist() == other[13:].tolist()
    assert tensors["target_positions"][[0, 9]].tolist() == [12, 12]  # the end of the prompt predicts both


def test_samples_share_rows_as_long_as_they_fit():
    random = np.random.default_rng(1)
    pairs = [
        [Answer(random.integers(5, 120, 4 + length), np.repeat([0, 1], [4, length]).astype(np.uint8))] * 2
        for length in (60, 20, 27, 8)
    ]
    tensors = answer_tensors(pairs, share_prompts=True)
    rows, length = tensors["input_ids"].shape
    sizes = [int((tensors["documents"] == number).sum()) for number in range(1, 4)]
    assert (rows, length) == (2, 64)
    assert sum(sizes) == int((tensors["documents"] > 0).sum()) == sum(len(pair[0].ids) - 1 for pair in pairs)
    for pair, members in zip(pairs, tensors["answer_targets"], strict=True):
        for answer, own in zip(pair, members, strict=True):
            own = own[own < len(tensors["targets"])]
            learned = answer.ids[answer.flags > 0]
            assert tensors["targets"][own].tolist() == learned.tolist()
            before = tensors["input_ids"].flatten()[tensors["target_positions"][own]]
            assert before.tolist() == [answer.ids[3], *learned[:-1]]


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "orpo", "simpo"])
def test_loss_and_gradients_are_those_of_two_rows(tmp_path, loss):
    tokenizer = train_tokenizer(
        iter([" ".join(map(" ".join, PAIRS))] * 40), TokenizerTraining(vocab=320, special=CONTROL)
    )
    model = built(LlamaConfig(**{**MODEL, "vocab_size": tokenizer.vocabulary}))
    objective = preferring(tokenizer, tmp_path, loss, beta=0.5)
    part = stored(objective, tmp_path / "store")
    dataset = objective.dataset(part)
    objective.set_reference(np.full((len(dataset), 3), -20.0), validation=False)
    rows = evaluation_rows(dataset, np.arange(len(dataset)), 4)
    rows.epochs[:] = 0
    found = []
    for _ in range(2):
        batch = objective.batch(rows)
        if objective.needs_global_statistics:
            objective.set_global_statistics(objective.batch_statistics(model, batch).tolist())
        model.zero_grad()
        sums = objective.loss(model, batch)
        (sums[0] / sums[1]).backward()
        gradients = {name: each.grad for name, each in model.named_parameters()}
        found.append((batch.tensors["input_ids"].shape[0], sums.detach(), gradients))
        objective.check(model)
    (rows_of_one, expected, reference), (shared_rows, actual, gradients) = found
    assert (rows_of_one, shared_rows) == (8, 4)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in reference.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))
