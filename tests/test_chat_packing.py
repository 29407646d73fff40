"""Conversations packed into blocks: each is learned as if it stood alone, and what is packed is said."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig

from artel.config import RunConfig, TokenizerTraining, load_run
from artel.models import IGNORED
from artel.models.attention_switch import use_artel_attention
from artel.objectives import Chat
from artel.planning.plan import plan_text, with_planned_packing
from artel.storage import new_folder
from artel.text import Conversation, Document, Message, Record
from artel.tokens import PackedSamples, StoreWriter, TokenStore, evaluation_rows, train_tokenizer
from artel.tokens.packing import sample_flags, sample_numbers
from artel.training.packing import choose_by_lengths
from support.objectives import objective_run
from support.runs import artel, metrics, refused, succeed

BLOCK = 128
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 64, "vocab_size": 400, "max_position_embeddings": BLOCK, "pad_token_id": 1}  # fmt: skip
MODELS = [
    LlamaConfig(**SMALL),
    GPT2Config(n_layer=2, n_embd=36, n_head=4, vocab_size=400, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    Gemma3TextConfig(**SMALL, head_dim=12, sliding_window=9, layer_types=["sliding_attention", "full_attention"]),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter(["one two three, four five: six seven eight nine ten."] * 20),
                           TokenizerTraining(vocab=290, special=["<|im_start|>", "<|im_end|>"]))  # fmt: skip


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(RunConfig.model_validate(packed_run()), tokenizer)


def packed_run(packing="best_fit", **changes):
    run = {"objective": "chat", "chat": {"template": "chatml"}, "data": {"block": BLOCK, "packing": packing}}
    return {**run, **changes}


@pytest.fixture(scope="module")
def part(chat, tmp_path_factory):
    """Conversations of unequal length."""
    words, rows = "one two three four five six seven".split(), []
    for number in range(12):
        exchange = [Message("user", " ".join(words[: 1 + number % 7])), Message("assistant", words[number % 7])]
        rows.append(Conversation(tuple(exchange * (1 + number % 2))))
    with new_folder(tmp_path_factory.mktemp("chat") / "store") as folder:
        writer = StoreWriter(folder, vocabulary=400)
        documents = [Document(Record("", f"a:{at}", "a", fields=row), "train") for at, row in enumerate(rows)]
        for at, made in enumerate(chat.samples(documents)):
            writer.add("train", made.samples, 1, f"a:{at}")
        writer.close({})
    return TokenStore(folder.with_name("store")).train


def test_every_sample_is_in_one_block_whole(part):
    blocks = PackedSamples(part, BLOCK, lookahead=1)
    seen = []
    for index in range(len(blocks)):
        block, members = blocks.read(index), blocks.members(index)
        assert sum(len(part.sample(member).ids) - 1 for member in members) <= BLOCK
        for number, member in enumerate(members, 1):
            own = sample_numbers(block.flags) == number
            assert block.ids[own].tolist() == part.sample(member).ids.tolist()
            assert sample_flags(block.flags)[own].tolist() == part.sample(member).flags.tolist()
        assert blocks.origins(index) == [part.origin(member) for member in members]
        seen += members.tolist()
    assert sorted(seen) == list(range(part.samples))
    assert blocks.samples_in(len(blocks)) == part.samples > 2 * len(blocks)
    assert blocks.padding == pytest.approx(1 - (part.tokens - part.samples) / (len(blocks) * BLOCK))
    with pytest.raises(ValueError, match="does not fit"):
        PackedSamples(part, 8, lookahead=1)


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_loss_and_gradients_are_those_of_each_conversation_alone(chat, part, config, micro_batch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)

    # Each alone through transformers' own attention.
    expected, targets = torch.zeros(()), 0
    for number in range(part.samples):
        sample = part.sample(number)
        labels = torch.from_numpy(np.where(sample.flags[1:] > 0, sample.ids[1:], IGNORED))
        logits = model(input_ids=torch.from_numpy(sample.ids[None, :-1]), use_cache=False).logits[0]
        expected = expected + F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        targets += int((labels != IGNORED).sum())
    expected.backward()
    reference = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    use_artel_attention(model)
    chat.check(model)
    blocks, total, counted, tokens = chat.dataset(part), 0.0, 0, 0
    for start in range(0, len(blocks), micro_batch):
        indices = np.arange(start, min(start + micro_batch, len(blocks)))
        batch = chat.batch(evaluation_rows(blocks, indices, micro_batch))
        assert batch.tensors["input_ids"].shape == (micro_batch, BLOCK)  # all alike
        sums = chat.loss(model, batch)
        sums[0].backward()
        total, counted, tokens = total + float(sums[0].detach()), counted + batch.targets, tokens + batch.tokens
    assert (counted, tokens) == (targets, part.tokens - part.samples)
    assert total == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        bound = 1e-5 * float(reference[name].abs().max())
        torch.testing.assert_close(parameter.grad, reference[name], atol=bound, rtol=1e-5)


def test_no_target_is_of_another_conversation(chat, part):
    blocks = chat.dataset(part)
    batch = chat.batch(evaluation_rows(blocks, np.arange(len(blocks)), len(blocks))).tensors
    for row, index in enumerate(range(len(blocks))):
        pairs = {pair for member in blocks.members(index) for pair in pairwise(part.sample(member).ids.tolist())}
        for token, target in zip(batch["input_ids"][row].tolist(), batch["targets"][row].tolist(), strict=True):
            assert target == IGNORED or (token, target) in pairs
    assert (batch["positions"][batch["documents"] > 0] < max(len(part.sample(at).ids) for at in range(12))).all()


@pytest.mark.parametrize(
    ("mean", "count", "more", "packing", "why"),
    [
        (20, 10_000, {}, "best_fit", "share blocks"),
        (100, 10_000, {}, "concatenate", "little of a block"),
        (20, 1_000, {}, "concatenate", "steps of 32 blocks"),
        (20, 1_000, {"train": {"batch": 32, "epochs": 12}}, "best_fit", "share blocks"),
        (20, 10_000, {"train": {"batch": 32, "steps": 49}}, "concatenate", "49 steps"),
        (20, 10_000, {"model": {"config": {"model_type": "rwkv"}}}, "concatenate", "no mask"),
        (20, 10_000, {"objective": "preference"}, "concatenate", ""),
    ],
)
def test_auto_packs_where_it_pays(mean, count, more, packing, why):
    run = RunConfig.model_validate(packed_run("auto", **{"train": {"batch": 32}, **more}))
    choice = choose_by_lengths(run, np.full(count, mean))
    assert choice.value == packing
    assert why in choice.why
    if packing == "best_fit":  # of a fifth of the samples the same is known
        assert choose_by_lengths(run, np.full(count // 5, mean), 0.2) == choice


def test_what_does_not_go_with_packed_conversations():
    def places(data, **more):
        return [
            problem.where for problem in Chat.problems(RunConfig.model_validate(packed_run(**more) | {"data": data}))
        ]

    assert (
        places({"packing": "best_fit"}) == places({"packing": "concatenate"}) == places({"document_mask": True}) == []
    )
    assert places({"packing": "best_fit", "document_mask": False}) == ["data.document_mask"]
    assert places({"packing": "best_fit"}, model={"config": {"model_type": "rwkv"}}) == ["data.packing"]


def chosen_run(folder, **changes):
    """A run file that leaves it to artel whether its 200 conversations, of about 60 tokens, are packed."""
    file = objective_run(folder / "run.yaml", "chat", train={"batch": 4, "steps": 60})
    tree = yaml.safe_load(file.read_text())
    tree["data"]["block"] = 192
    file.write_text(yaml.safe_dump(tree | changes))
    return file


@pytest.mark.slow
def test_what_auto_chooses_is_said_kept_and_resumed(tmp_path):
    file = chosen_run(tmp_path)
    planned = with_planned_packing(load_run(str(file)))
    assert planned.data.packing == "best_fit"
    assert plan_text(planned)[0].batch(2).tensors["input_ids"].shape == (2, 192)
    done = succeed("train", file, "--json")
    assert "data.packing=best_fit: samples of" in done.stderr
    said = r"\d+ samples packed into \d+ blocks of 192 tokens, .*% padding; a step of 4 blocks holds \d+ samples"
    assert re.search(said, done.stderr)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]["packing"] == "best_fit"
    filler = [line.get("filler", 0.0) for line in metrics(tmp_path / "run") if "loss" in line]
    printed = float(re.search(r"([\d.]+)% padding", done.stderr)[1]) / 100
    assert np.mean(filler) == pytest.approx(printed, abs=0.03)
    assert printed < 0.3
    assert plan_text(planned)[1].tokens == pytest.approx(json.loads(done.stdout)["tokens"], rel=0.02)

    shorter = artel("evaluate", tmp_path / "run", "--json")
    apart = artel("evaluate", tmp_path / "run", "data.packing=concatenate", "--json")
    one, other = (json.loads(each.stdout)["models"][0] for each in (shorter, apart))
    assert one["samples"] == other["samples"]
    assert one["metrics"]["loss"] == pytest.approx(other["metrics"]["loss"], rel=1e-5)
    longer = artel("train", file, "train.steps=64")
    assert (
        "the length cannot change to 64 steps: the learning rate has already followed" in longer.stderr
    )  # by its schedule alone


@pytest.mark.slow
def test_where_the_model_turns_out_not_to_obey_nothing_is_packed(tmp_path):
    model = {"config": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4}}
    file = chosen_run(tmp_path, model=model)
    assert "data.packing=concatenate: bloom" in succeed("train", file, "--json").stderr
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]["packing"] == "concatenate"
    assert "is complete" in artel("train", file).stderr
    assert "data.packing: bloom" in refused("train", file, f"run={tmp_path}/other", "data.packing=best_fit").stderr
