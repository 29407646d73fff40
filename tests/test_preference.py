"""The better of two answers: losses beside TRL's and by hand, and what the model before training is good for."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from artel.config import RunConfig, TokenizerTraining
from artel.errors import InputError
from artel.models.output_head import output_head
from artel.objectives import DocumentSamples
from artel.text import Document, Message, Preference, Record, Rejected, read_documents
from artel.text.ledger import Ledger
from artel.tokens import TokenStore, UnpackedSamples, evaluation_rows, micro_batches, train_tokenizer
from support.preferences import CONTROL, MODEL, PAIRS, assert_same_as_trl, preferring, stored
from support.runs import metrics, succeed, write_run
from support.templates import LLAMA_3


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter([" ".join(map(" ".join, PAIRS))] * 40), TokenizerTraining(vocab=320, special=CONTROL))


def models(tokenizer):
    """(a policy, the model that it is compared with)."""
    torch.manual_seed(0)
    reference = LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.vocabulary, **MODEL)).eval()
    policy = LlamaForCausalLM(reference.config).eval()
    policy.load_state_dict(reference.state_dict())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return policy, reference


def batch_of(objective, part, reference):
    """All pairs as one batch, with what the reference says of them."""
    dataset = objective.dataset(part)
    rows = evaluation_rows(dataset, np.arange(len(dataset)), 4)  # one of them is padding
    with torch.no_grad():
        outputs = objective.evaluate_batch(reference, objective.batch(rows))[1][: part.samples]
    objective.set_reference(outputs.numpy(), validation=True)
    return objective.batch(rows)


def logps(model, objective):
    """Sum of log-probabilities and count of tokens of each answer, one sequence at a time: (pairs, 2) each."""
    found = [[logp(model, objective, question, answer) for answer in answers] for question, *answers in PAIRS]
    return torch.tensor(found).unbind(-1)


def logp(model, objective, question, answer):
    """Sum of the log-probabilities of an answer's tokens, and their count."""
    sample = objective._writer.sample([Message("user", question), Message("assistant", answer)], {1})
    ids, is_target = torch.from_numpy(sample.ids)[None], torch.from_numpy(sample.flags[1:] > 0)
    with torch.no_grad():
        scores = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    return float(scores[is_target].sum()), int(is_target.sum())


@pytest.mark.parametrize(("ours", "theirs"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_loss_and_gradient_equal_trl_on_the_same_batch(tokenizer, tmp_path, ours, theirs):
    trl = pytest.importorskip("trl", reason="the extra trl is not installed")
    from datasets import Dataset

    objective = preferring(tokenizer, tmp_path, ours, beta=0.3)
    policy, reference = models(tokenizer)
    tokenizer.hf.chat_template = LLAMA_3
    turns = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    rows = [
        {name: [{"role": role, "content": text}] for (name, role), text in zip(turns.items(), pair, strict=True)}
        for pair in PAIRS
    ]
    arguments = trl.DPOConfig(output_dir=str(tmp_path / "trl"), beta=0.3, loss_type=[theirs], report_to=[],
                              per_device_train_batch_size=len(PAIRS), use_cpu=True, bf16=False, max_length=None,
                              gradient_checkpointing=False, disable_dropout=True)  # fmt: skip
    trainer = trl.DPOTrainer(policy, reference, arguments, train_dataset=Dataset.from_list(rows),
                             processing_class=tokenizer.hf)  # fmt: skip
    batch = batch_of(objective, stored(objective, tmp_path / "store"), reference)
    assert_same_as_trl(trainer, list(trainer.train_dataset), policy, lambda: objective.loss(policy, batch))


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "orpo", "simpo"])
def test_losses_by_hand(tokenizer, tmp_path, loss):
    """Each formula of its paper, written out over sequences one at a time."""
    objective = preferring(tokenizer, tmp_path, loss, beta=0.5)
    policy, reference = models(tokenizer)
    batch = batch_of(objective, stored(objective, tmp_path / "store"), reference)
    with torch.no_grad():
        ours, count = logps(policy, objective)
        theirs, _ = logps(reference, objective)
        if objective.needs_global_statistics:
            objective.set_global_statistics(objective.batch_statistics(policy, batch).tolist())
        sums = objective.loss(policy, batch)
    ratio, mean = ours - theirs, ours / count
    log_sigmoid = torch.nn.functional.logsigmoid
    if loss == "dpo":
        expected = -log_sigmoid(0.5 * (ratio[:, 0] - ratio[:, 1])).mean()
    elif loss == "ipo":
        per_token = ratio / count
        expected = ((per_token[:, 0] - per_token[:, 1] - 1 / (2 * 0.5)) ** 2).mean()
    elif loss == "simpo":
        expected = -log_sigmoid(0.5 * (mean[:, 0] - mean[:, 1]) - 1.0).mean()
    elif loss == "orpo":
        odds = mean - torch.log(1 - mean.exp())
        expected = (-mean[:, 0] - 0.5 * log_sigmoid(odds[:, 0] - odds[:, 1])).mean()
    else:
        # Another's answer after this prompt, by the same two models.
        kl = 0.0
        for row, (question, *_) in enumerate(PAIRS):
            other = PAIRS[(row + 1) % len(PAIRS)][1]
            kl += (logp(policy, objective, question, other)[0] - logp(reference, objective, question, other)[0]) / len(
                PAIRS
            )
        kl = max(0.0, kl)
        chosen = 1 - torch.sigmoid(0.5 * (ratio[:, 0] - kl))
        rejected = 1 - torch.sigmoid(0.5 * (kl - ratio[:, 1]))
        expected = torch.cat([chosen, rejected]).mean()
        assert sums[1] == 2 * len(PAIRS)
    assert (sums[0] / sums[1]).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "orpo", "simpo"])
def test_loss_and_gradients_are_those_of_whole_logits(tokenizer, tmp_path, monkeypatch, loss, frozen_head):
    objective = preferring(tokenizer, tmp_path, loss, beta=0.5)
    policy, reference = models(tokenizer)
    policy.lm_head.weight.requires_grad_(not frozen_head)
    part = stored(objective, tmp_path / "store")
    found = []
    for find_head in (lambda _: None, output_head):
        monkeypatch.setattr("artel.models.loss.output_head", find_head)
        batch = batch_of(objective, part, reference)
        if objective.needs_global_statistics:
            objective.set_global_statistics(objective.batch_statistics(policy, batch).tolist())
        policy.zero_grad()
        sums = objective.loss(policy, batch)
        (sums[0] / sums[1]).backward()
        found.append(
            (sums.detach(), {name: each.grad for name, each in policy.named_parameters() if each.requires_grad})
        )
    (whole, expected), (chunked, actual) = found
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


def test_kto_is_judged_by_the_part_itself(tokenizer, tmp_path):
    """Whatever batch was trained on before, the loss of a part is the same."""
    objective = preferring(tokenizer, tmp_path, "kto", beta=0.5)
    policy, reference = models(tokenizer)
    part = stored(objective, tmp_path / "store")
    batch = batch_of(objective, part, reference)
    results = []
    for kl in (0.0, 3.0):
        objective.set_global_statistics([kl, 1.0])
        with torch.no_grad():
            sums, outputs = objective.evaluate_batch(policy, batch)
        totals = dict(zip(objective.sums, sums.tolist(), strict=True))
        results.append(objective.metrics(totals, outputs[: part.samples].numpy(), part)["loss"])
    with torch.no_grad():
        objective.set_global_statistics(objective.batch_statistics(policy, batch).tolist())
        sums = objective.loss(policy, batch)
    assert results == pytest.approx([(sums[0] / sums[1]).item()] * 2, rel=1e-5)


def test_what_another_model_said_is_not_taken_for_what_this_one_says(tokenizer, tmp_path):
    """A run that ends before its first checkpoint and begins again with another model: losses begin at -log(1/2)."""
    rows = [{"prompt": question, "chosen": chosen, "rejected": rejected} for question, chosen, rejected in PAIRS * 5]
    rows = [{**row, "prompt": f"{row['prompt']} {number}"} for number, row in enumerate(rows)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = write_run(
        tmp_path / "run.yaml", objective="preference", tokenizer={"train": {"vocab": 300}},
        data={"sources": [{"path": str(tmp_path / "a.jsonl"), "format": "preference"}], "block": 64, "validation": 0.0},
        model={"config": {"model_type": "llama", **MODEL}}, train={"steps": 2, "batch": 8},
    )  # fmt: skip
    succeed("train", run)
    folder = tmp_path / "run"
    for name in ("checkpoints", "model"):
        shutil.rmtree(folder / name)
    for name in ("metrics.jsonl", "result.json"):
        (folder / name).unlink()
    succeed("train", run, "model.config.intermediate_size=48")
    assert next(line["loss"] for line in metrics(folder)) == pytest.approx(math.log(2), abs=1e-4)


def test_unpaired_answers_are_for_kto_alone(tokenizer, tmp_path):
    unpaired = [("a", "Good.", ""), ("b", "", "Bad, bad."), ("c", "Fine.", "Worse.")]
    objective = preferring(tokenizer, tmp_path, "kto")
    policy, reference = models(tokenizer)
    part = stored(objective, tmp_path / "store", unpaired)
    batch = batch_of(objective, part, reference)
    assert batch.targets == 4
    with torch.no_grad():
        numbers, outputs = objective.evaluate_batch(policy, batch)
    sums = dict(zip(objective.sums, numbers.tolist(), strict=True))
    assert (sums["chosen"], sums["rejected"], sums["pairs"]) == (2, 2, 1)
    figures = objective.metrics(sums, outputs[: part.samples].numpy(), part)
    assert figures["entropy"] == pytest.approx(math.log(tokenizer.vocabulary), rel=0.02)  # it guesses
    fields = Preference((Message("user", "a"),), Message("assistant", "Good."), None)
    (made,) = preferring(tokenizer, tmp_path, "dpo").samples([Document(Record("a", "b.jsonl:3", "b", fields), "train")])
    assert isinstance(made, Rejected)
    assert (made.origin, "kto" in made.detail) == ("b.jsonl:3", True)


@pytest.mark.parametrize(("answer", "missing"), [(("Good.", None), "bad"), ((None, "Bad."), "good")])
def test_kto_needs_answers_of_both_kinds(tokenizer, tmp_path, answer, missing):
    objective = preferring(tokenizer, tmp_path, "kto")
    stored(objective, tmp_path / "store", [(question, *answer) for question in "abc"])
    with pytest.raises(InputError, match=f"no answer is labeled as {missing}"):
        objective.check_store(TokenStore(tmp_path / "store"))
    stored(objective, tmp_path / "both", [("a", "Good.", None), ("b", None, "Bad.")])
    objective.check_store(TokenStore(tmp_path / "both"))


@pytest.mark.long
def test_dpo_on_real_preferences_raises_the_margin(shared_data, tmp_path):
    """From 0, by definition, before training; judged on the rows it learned from."""
    source = {"path": str(shared_data / "chat" / "preferences_demo.json"), "format": "preference", "rows": "[:60]"}
    run = write_run(
        tmp_path / "dpo.yaml", objective="preference", tokenizer={"train": {"vocab": 2000}},
        data={"sources": [source], "block": 768, "validation": 0.0}, model={"config": {"model_type": "llama", **MODEL}},
        train={"steps": 10, "batch": 8, "learning_rate": 2e-3, "warmup": 2},
    )  # fmt: skip
    succeed("train", run)
    trained = [line["loss"] for line in metrics(tmp_path / "dpo") if "loss" in line]
    assert trained[0] == pytest.approx(math.log(2), abs=1e-4)
    assert trained[-1] < 0.6
    judged = succeed("evaluate", tmp_path / "dpo", "--data", source["path"], "--json")
    figures = json.loads(judged.stdout)["models"][0]["metrics"]
    assert figures["margin"] > 0.1
    assert figures["accuracy"] > 0.6


@pytest.mark.slow
def test_real_preferences_are_read_and_none_is_lost(shared_data, tokenizer, tmp_path):
    data = RunConfig.model_validate({"data": {"validation": 0.0, "sources": [
        {"path": str(shared_data / "chat" / "preferences_demo.json"), "format": "preference"}]}}).data  # fmt: skip
    objective = preferring(tokenizer, tmp_path, "dpo")
    ledger = Ledger()
    for document in read_documents(data, ledger):
        (made,) = objective.samples([document])
        fields = document.record.fields
        if isinstance(made, DocumentSamples):
            (sample,) = made.samples
            first, second = sample.numbers
            assert len(sample.ids) == first + second
            for answer, start, stop in ((fields.chosen, 0, first), (fields.rejected, first, first + second)):
                learned = sample.ids[start:stop][sample.flags[start:stop] > 0]
                assert tokenizer.decode(learned) == f"{answer.content.strip()}<|eot_id|>"
        else:
            assert made.reason == "longer_than_block"
    assert ledger.total.kept > 100


def test_kto_goes_by_an_answer_to_another_prompt(tokenizer, tmp_path):
    """Several answers to one prompt, each good or bad, usually stand side by side."""
    objective = preferring(tokenizer, tmp_path, "kto")
    unpaired = [("Count.", "One", None), ("Count.", None, "Two"), ("Who?", "Three", None), ("Who?", None, "Four")]
    data = objective.dataset(stored(objective, tmp_path / "store", unpaired))
    own = UnpackedSamples(data.split)
    for number, foreign in enumerate(("Three", "Three", "One", "One")):
        alone, extended = own.read(number).ids, data.read(number).ids
        assert extended[: len(alone)].tolist() == alone.tolist()
        assert foreign in tokenizer.decode(extended[len(alone) :])


def test_an_answer_counts_as_many_tokens_after_another_prompt(tokenizer, tmp_path):
    """Not the line feed that ChatML writes after the end of a turn."""
    objective = preferring(tokenizer, tmp_path, "kto")
    data = objective.dataset(stored(objective, tmp_path / "store", [("Who?", "One", None), ("Count.", None, "Two")]))
    own = UnpackedSamples(data.split).read(1)
    sample = data.read(0)
    other = slice(len(sample.ids) - sample.numbers[-1], None)
    assert sample.ids[other][sample.flags[other] > 0].tolist() == own.ids[own.flags > 0].tolist()


def test_positions_that_kto_computes_include_the_rows_of_other_answers(tokenizer, tmp_path):
    objective = preferring(tokenizer, tmp_path, "kto")
    data = objective.dataset(stored(objective, tmp_path / "store"))
    (rows,) = micro_batches(
        data, np.arange(2), np.zeros(2, dtype=np.int64), rank=0, world_size=1, batch_size=2, max_rows=2
    )
    batch = objective.batch(rows)
    sizes = [batch.tensors[name].numel() for name in ("input_ids", "other_input_ids")]
    assert min(sizes) > 0
    assert batch.computed_positions == sum(sizes)
