"""On-policy distillation: the student's own answers, learned from the teacher, in rounds that survive kills."""

import json

import numpy as np
import pytest
import torch
import zstandard

from artel.config import load_run
from artel.objectives import objective_type
from artel.objectives.distill.on_policy import WRITTEN
from artel.objectives.rollouts import Rollout, Round
from artel.tokens import training_rows
from support.objectives import objective_run, student_of, taught
from support.runs import artel, assert_same_models, kill, losses, metrics, start, succeed, torchrun
from support.waiting import wait_until

CHANGES = {"distill": {"on_policy": 1.0, "new_tokens": 12, "hidden": None, "alpha": 0.4}}


def rollout(index, prompt, ids):
    return Rollout(
        number=index, index=index, epoch=0, answer=0, attempt=0, seed=0, prompt_ids=prompt, ids=ids,
        log_probs=[0.0] * len(ids), text="", cut_off=False, rewards={}, reward=None, failures={},
    )  # fmt: skip


def read_rollouts(folder):
    files = sorted((folder / "rollouts").iterdir())
    lines = [zstandard.ZstdDecompressor().decompress(file.read_bytes()).splitlines() for file in files]
    return [[json.loads(line) for line in round_lines] for round_lines in lines]


def test_the_loss_of_own_answers_is_that_of_trl(tmp_path):
    changes = {f"distill.{key}": value for key, value in CHANGES["distill"].items()}
    _, objective, store = taught(tmp_path, "distill_beside", **changes)
    samples = objective.dataset(store.train)
    rows = training_rows(samples, np.arange(6), 6)
    longest = objective.batch(rows)  # before the first round
    assert longest.tensors[WRITTEN].all()
    random = np.random.default_rng(0)
    prompts = {index: objective.round_prompt_ids(samples.read(index)) for index in range(6)}
    answers = {index: random.integers(5, 250, 3 + index).tolist() for index in (0, 2, 3, 5)}
    written = tuple(rollout(index, prompts[index], ids) for index, ids in answers.items())
    objective.set_round(Round(0, written), is_fresh=True, seconds={})
    batch = objective.batch(rows)
    assert batch.targets <= longest.targets
    for index in (1, 4):  # as they are stored
        stored = samples.read(index)
        length = len(stored.ids) - 1
        assert batch.tensors["input_ids"][index][:length].tolist() == stored.ids[:-1].tolist()
        assert not batch.tensors[WRITTEN][index].any()

    trl = pytest.importorskip("trl.experimental.gkd", reason="trl is not installed")
    student = student_of(objective).eval()
    own = training_rows(samples, np.array([0, 2, 3, 5]), 4)
    batch = objective.batch(own)
    assert batch.targets == sum(map(len, answers.values()))
    sums = dict(zip(objective.sums, objective.loss(student, batch).tolist(), strict=True))
    total = 0.0
    for index, answer in answers.items():
        ids = torch.tensor([prompts[index] + answer])
        labels = torch.tensor([[-100] * len(prompts[index]) + answer])
        with torch.no_grad():
            of_student = student(ids).logits
            of_teacher = objective._call_teacher(lambda teacher, ids=ids: teacher(ids).logits)
        total += trl.GKDTrainer.generalized_jsd_loss(
            of_student[:, :-1], of_teacher[:, :-1], labels[:, 1:], beta=0.3, reduction="sum"
        ).item()
    assert total > 0.1
    assert sums["loss"] / batch.targets == pytest.approx(total / batch.targets, abs=1e-5)


def own_run(folder, name, on_policy, steps, rate=3e-3):
    changes = CHANGES | {"distill": CHANGES["distill"] | {"on_policy": on_policy}}
    train = {"batch": 8, "steps": steps, "learning_rate": rate}
    return objective_run(folder / f"{name}.yaml", "distill_beside", train=train, checkpoint={"every": 2}, **changes)


@pytest.mark.slow
def test_a_killed_run_ends_like_an_undisturbed_one(tmp_path):
    undisturbed, killed = (own_run(tmp_path, name, 0.5, 6) for name in ("undisturbed", "killed"))
    succeed("train", undisturbed)
    process = start("train", killed)
    file = tmp_path / "killed" / "rollouts" / "000003.jsonl.zst"
    wait_until(lambda: file.exists() or process.poll() is not None, lambda: "a round")
    kill(process)
    succeed("train", killed)
    assert_same_models(undisturbed, killed)
    rounds = read_rollouts(tmp_path / "undisturbed")
    assert rounds == read_rollouts(tmp_path / "killed")
    numbers = [line["number"] for lines in rounds for line in lines]
    assert 10 < len(numbers) < 38
    assert len({*numbers}) == len(numbers)
    assert all(line["reward"] is None and len(line["ids"]) <= 12 for lines in rounds for line in lines)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_two_processes_learn_as_one(tmp_path, data):
    """The same answers, and losses and gradient norms within 1e-4."""
    one, two = (own_run(tmp_path, name, 0.5, 3) for name in ("one", "two"))
    succeed("train", one)
    done = torchrun(2, "-m", "artel", "train", two, f"parallel.data={data}")
    assert done.returncode == 0, done.stderr
    texts = [[line["text"] for lines in read_rollouts(tmp_path / name) for line in lines] for name in ("one", "two")]
    assert texts[0] == texts[1]
    for step, (loss, norm) in losses(tmp_path / "one").items():
        assert (loss, norm) == pytest.approx(losses(tmp_path / "two")[step], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_the_divergence_on_own_answers_falls(tmp_path):
    succeed("train", own_run(tmp_path, "run", 1.0, 30, rate=1e-2))
    lines = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert all(line["answers"] == 8 for line in lines)
    assert sum(line["loss"] for line in lines[-5:]) < 0.9 * sum(line["loss"] for line in lines[:5])


def test_settings_that_do_not_go_together_are_reported_together(tmp_path):
    run = own_run(tmp_path, "run", 0.5, 2)
    done = artel("config", "check", run, "distill.top_k=8", "chat.train_on=all", "chat.too_long=truncate_left")
    assert done.returncode == 2
    for key in ("distill.top_k", "chat.train_on", "chat.too_long"):
        assert key in done.stderr
    without = load_run(str(run), {"distill.on_policy": 0.0})
    assert not objective_type(without).writes_answers
