"""Masked language models: what is hidden, the loss beside transformers' own, old folders, filling, restoring."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, RobertaConfig, RobertaForMaskedLM, pipeline

from artel.config import RunConfig, TokenizerTraining
from artel.generation.generate import Sampling
from artel.models import IGNORED
from artel.objectives import InsertionTagging, Masked
from artel.objectives.insertion_tagging import comma_positions, find_insertions
from artel.text import Document, DroppedRecord, Pair, Record, Rejected
from artel.text.pipeline import remove_commas
from artel.tokens import Rows, train_tokenizer
from support.runs import artel, losses, metrics, roberta_of_2019, succeed, write_run

TEXT = ["Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. " * 20]
ROBERTA = {"model_type": "roberta", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 64, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}  # fmt: skip

MODERNBERT = {"model_type": "modernbert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter(TEXT), TokenizerTraining(vocab=320), encoder=True)


def masked(tokenizer, **settings):
    run = {"objective": "masked", "masked": settings, "data": {"block": 66}}
    return Masked(RunConfig.model_validate(run), tokenizer)


def rows(ids, epoch=0):
    count = len(ids)
    return Rows(ids, np.full(count, ids.shape[1]), np.ones(count, bool), np.arange(count), np.full(count, epoch), None,
                np.zeros((count, 0), dtype=np.int64))  # fmt: skip


def test_a_trained_tokenizer_frames_texts_as_roberta_does(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert opened.convert_ids_to_tokens(range(5)) == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    ids = opened("семьи <mask> друг")["input_ids"]
    assert (ids[0], ids[-1]) == (0, 2)
    assert opened.decode(ids) == "<s>семьи<mask> друг</s>"  # the mask takes the space before it in
    assert list(next(tokenizer.encode(["<mask>"]))) != [4]  # in texts it is seven letters


def test_fifteen_percent_are_hidden_in_80_10_10_and_anew_in_each_epoch(tokenizer):
    objective = masked(tokenizer)
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 320, size=(64,))
    ids[10] = ids[40] = 2
    hidden, shown, kept, random = 0, [], 0, 0
    for epoch in range(300):
        seen, targets = objective.mask_tokens(ids, epoch, sample=3)
        chosen = np.flatnonzero(targets != IGNORED)
        assert len(chosen) == round(0.15 * 62)
        assert not {10, 40} & set(chosen)  # special tokens are never hidden
        assert (targets[chosen] == ids[chosen]).all()
        assert (seen[targets == IGNORED] == ids[targets == IGNORED]).all()
        hidden += int((seen[chosen] == 4).sum())
        kept += int((seen[chosen] == ids[chosen]).sum())
        random += int(((seen[chosen] != 4) & (seen[chosen] != ids[chosen])).sum())
        shown.append(tuple(chosen))
    total = hidden + kept + random
    assert hidden / total == pytest.approx(0.8, abs=0.03)
    assert kept / total == pytest.approx(0.1, abs=0.02)
    assert random / total == pytest.approx(0.1, abs=0.02)
    assert len(set(shown)) == 300
    again = objective.mask_tokens(ids, 7, sample=3)
    assert (again[0] == objective.mask_tokens(ids, 7, sample=3)[0]).all()
    assert (again[1] != objective.mask_tokens(ids, 7, sample=4)[1]).any()


@given(seed=st.integers(0, 1000))
@settings(max_examples=50)
def test_whole_words_are_hidden_whole(tokenizer, seed):
    objective = masked(tokenizer, whole_words=True)
    ids = np.concatenate(list(tokenizer.encode(TEXT)))[seed % 400 :][:80]
    starts = tokenizer.word_starts()[ids]
    _, targets = objective.mask_tokens(ids, seed, sample=0)
    chosen = targets != IGNORED
    words = np.cumsum(starts)
    for word in np.unique(words):
        assert len(set(chosen[words == word])) == 1
    assert 1 <= chosen.sum() <= max(round(0.15 * 80), np.bincount(words).max())


def roberta():
    sizes = {key: value for key, value in ROBERTA.items() if key != "model_type"}
    return RobertaForMaskedLM(RobertaConfig(**sizes, vocab_size=320, max_position_embeddings=68, pad_token_id=1)).eval()


def test_the_loss_is_that_of_transformers_own_roberta(tokenizer):
    torch.manual_seed(1)
    model = roberta()
    objective = masked(tokenizer)
    batch = objective.batch(rows(np.random.default_rng(2).integers(5, 320, size=(8, 64))))
    labels = batch.tensors["targets"]
    with torch.no_grad():
        expected = model(input_ids=batch.tensors["input_ids"], labels=labels).loss
        loss, targets, right = objective.loss(model, batch).tolist()
        guesses = model(input_ids=batch.tensors["input_ids"]).logits.argmax(-1)
    assert targets == batch.targets == (labels != IGNORED).sum() == 8 * round(0.15 * 64)
    assert loss / targets == pytest.approx(float(expected), rel=1e-5)
    assert right == (guesses == labels).sum()
    assert batch.tokens == 8 * 66


def test_candidates_of_white_space_are_quoted(tokenizer):
    model = roberta()
    with torch.no_grad():
        for place, text in enumerate(("\n", "a")):
            (token,) = tokenizer.exact_ids([text])[0]
            model.lm_head.bias[token] = 50 - place
    (note,) = masked(tokenizer).reply(model, "a<mask>", "", Sampling(1)).notes
    assert re.match(r"candidates: '\\n' 0\.7\d\d  a 0\.2", note), note


@pytest.mark.long
def test_from_scratch_it_learns_and_the_folder_fills_masks_in_transformers(tmp_path):
    run = write_run(tmp_path / "run.yaml", objective="masked", log={"every": 50},
                    data={"block": 64, "sources": [{"format": "dummy", "documents": 1500}]},
                    train={"steps": 260, "batch": 16, "optimizer": "muon", "learning_rate": 4e-3},
                    validate={"prompts": ["Count: one, two,<mask>, four."]})  # fmt: skip
    succeed("train", run, f"model.config={json.dumps(MODERNBERT)}")
    folder = run.with_suffix("")
    figures = metrics(folder)[-1]["validation"]
    assert figures["accuracy"] > 2 * figures["commonest_token"]
    model = folder / "model"
    fill = pipeline("fill-mask", model=str(model), tokenizer=str(model))
    theirs = fill("Count: one, two,<mask>, four.")[0]
    ours = json.loads(artel("generate", folder, "--prompt", "Count: one, two,<mask>, four.", "--json").stdout)
    assert theirs["sequence"] == ours["text"] == "Count: one, two, three, four."
    assert ours["masks"][0][0]["token"] == theirs["token_str"]
    assert ours["masks"][0][0]["probability"] == pytest.approx(theirs["score"], rel=1e-4)
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[-1])
    assert sample["text"] == "Count: one, two, three, four."


@pytest.mark.slow
def test_a_folder_of_2019_loads_trains_and_is_written_back(shared_data, tmp_path):
    """config.json without a model type, vocab.json, merges.txt and pytorch_model.bin, as RoBERTa came out."""
    folder = tmp_path / "pretrained"
    before = roberta_of_2019(folder, shared_data / "tokenizers" / "roberta-base")
    texts = tmp_path / "texts.txt"
    texts.write_text("the quick brown fox jumps over the lazy dog , and again\n" * 3 + "\n".join(
        f"line {number} of a text about foxes and dogs" for number in range(400)))  # fmt: skip
    run = write_run(tmp_path / "run.yaml", objective="masked", tokenizer={"train": None},
                    model={"config": None, "from": str(folder)}, train={"steps": 12, "batch": 8, "learning_rate": 3e-3},
                    data={"sources": [{"path": str(texts), "document": "line"}], "block": 64})  # fmt: skip
    succeed("train", run)
    by_step = losses(run.with_suffix(""))
    assert by_step[12][0] < by_step[1][0]
    written = run.with_suffix("") / "model"
    after = load_file(written / "model.safetensors")
    assert set(after) <= set(before)
    assert any(not torch.equal(after[name], before[name]) for name in after)
    opened, tokenizer = AutoModelForMaskedLM.from_pretrained(written), AutoTokenizer.from_pretrained(written)
    assert opened.config.vocab_size == 50265
    assert tokenizer("the<mask>")["input_ids"] == [0, 627, 50264, 2]


# pairs


def test_commas_are_taken_out_and_found_again():
    text = "Он сказал, что, если 3,5 градуса, то не придёт , увы."
    assert remove_commas(text) == "Он сказал что если 3,5 градуса то не придёт увы."
    missing = find_insertions(remove_commas(text), text)
    assert set(missing.values()) == {","}
    assert len(missing) == 4
    assert find_insertions("a b c", "a b") is None
    assert find_insertions("a b", "a b") == {}
    assert find_insertions("b", "a b") == {-1: "a"}


def test_the_rule_knows_where_schoolbooks_put_commas():
    text = "Он знал что дом в котором он жил сгорел потому что его подожгли но молчал"
    said = [text[: place + 1].split()[-1] for place in comma_positions(text)]
    assert said == ["знал", "дом", "сгорел", "подожгли"]


def restoring(tokenizer):
    return InsertionTagging(RunConfig.model_validate({"objective": "masked", "data": {"block": 40}}), tokenizer)


def documents(*pairs):
    return [
        Document(Record(output, f"a.csv:{line}", "a", Pair(text, output), text), "train")
        for line, (text, output) in enumerate(pairs, 2)
    ]


def test_labels_stand_at_the_tokens_of_the_input_and_padding_is_never_trained_on(tokenizer):
    objective = restoring(tokenizer)
    made = list(objective.samples(documents(
        ("семьи похожи друг на друга каждая семья", "семьи похожи, друг на друга, каждая семья"), ("семья", "семья"),
    )))  # fmt: skip
    samples = [result.samples[0] for result in made]
    longest = max(len(sample.ids) for sample in samples)
    ids, flags = np.zeros((3, longest), dtype=np.int64), np.zeros((3, longest), dtype=np.uint8)
    for row, sample in enumerate([*samples, samples[0]]):
        ids[row, : len(sample.ids)], flags[row, : len(sample.flags)] = sample.ids, sample.flags
    lengths = np.array([len(sample.ids) for sample in [*samples, samples[0]]])
    batch = objective.batch(Rows(ids, lengths, np.array([True, True, False]), np.arange(3), np.zeros(3), flags,
                                 np.zeros((3, 0), dtype=np.int64)))  # fmt: skip
    shown, targets, attended = (batch.tensors[name] for name in ("input_ids", "targets", "attention_mask"))
    comma = int(next(tokenizer.encode([","]))[0])
    inputs = list(tokenizer.encode(["семьи похожи друг на друга каждая семья", "семья"]))
    for row, text in enumerate(inputs):
        assert shown[row][attended[row] == 1].tolist() == [0, *text, 2]
        assert (targets[row][attended[row] == 0] == IGNORED).all()
        assert (shown[row][attended[row] == 0] == tokenizer.pad_id).all()
        assert targets[row, 0] == targets[row, len(text) + 1] == IGNORED
    changed = (targets != IGNORED) & (targets != shown)
    assert (targets[changed] == comma).all()
    assert changed[0].sum() == 2
    assert changed[1].sum() == 0
    words = tokenizer.decode(shown[0][: int(changed[0].nonzero()[0]) + 1].tolist())
    assert words == "<s>семьи похожи"
    assert (targets[2] == IGNORED).all()  # padding
    assert batch.targets == len(inputs[0]) + len(inputs[1])


@pytest.mark.parametrize(
    "pair",
    [
        ("семья друг", "семья"),  # the output lacks a word
        ("семья несчастливая", "семья несчаст,ливая"),  # a comma within what is one token to the model
        ("друг", ", друг"),  # nothing to put it after
        ("друг", "друг друг"),  # like the one before it: "nothing is missing"
    ],
)
def test_pairs_that_cannot_be_aligned_are_rejected_with_their_line(tokenizer, pair):
    (made,) = restoring(tokenizer).samples(documents(pair))
    assert isinstance(made, Rejected)
    assert (made.reason, made.origin) == ("not_aligned", "a.csv:2")


def test_a_pair_longer_than_a_block_is_counted_and_not_bad(tokenizer):
    (made,) = restoring(tokenizer).samples(documents(("семья " * 40, "семья " * 40)))
    assert made == DroppedRecord("longer_than_block")


@pytest.mark.long
def test_commas_are_learned_from_plain_sentences(tmp_path):
    """`pairs: commas` makes the pairs; the parts share no input; a trained model puts the commas back."""
    run = write_run(tmp_path / "run.yaml", objective="masked", checkpoint={"best": "f1"}, log={"every": 50},
                    data={"block": 200, "validation": 0.2, "sources": [
                        {"format": "dummy", "documents": 400, "pairs": "commas"}]},
                    train={"steps": 150, "batch": 16, "learning_rate": 3e-3})  # fmt: skip
    succeed("train", run, f"model.config={json.dumps(MODERNBERT)}")
    figures = metrics(run.with_suffix(""))[-1]["validation"]
    assert figures["f1"] > 0.8
    restored = artel("generate", run.with_suffix(""), "--prompt", "Count: two three four.").stdout
    assert restored.strip() == "Count: two, three, four."
