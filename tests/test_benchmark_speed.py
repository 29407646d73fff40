"""Benchmarks of speed: what train_speed.py, gpu_table.py and prepare_speed.py compare is the same work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
# One thread and nothing compiled: cores are shared with other tests, and compiling takes longer than they do.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

PEERS = """
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

def plain(work, after_step):
    print("what a library says")
    model = AutoModelForCausalLM.from_pretrained(work.model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=work.learning_rate, betas=work.betas, eps=work.epsilon, weight_decay=work.weight_decay
    )
    step = 0
    while True:
        inputs, targets = work.batch_of(step)
        loss = cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad()
        after_step(loss)
        step += 1

def broken(work, after_step):
    after_step(1.0)
    raise RuntimeError("out of luck")
"""


def run(script, *words, cwd):
    env = {**os.environ, **ENVIRONMENT, "ARTEL_CACHE": str(cwd / "cache")}
    command = [sys.executable, str(BENCHMARKS / script), *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_all_trainers_do_the_same_work_and_a_broken_one_is_left_out(tmp_path):
    (tmp_path / "peers.py").write_text(PEERS)
    trainer = f"{BENCHMARKS}/peers/trainer.py:default"
    names = ["artel", trainer, "peers:plain", "peers:broken"]
    model = (
        "{model_type: gpt2, n_layer: 2, n_embd: 32, n_head: 2, vocab_size: 320, "
        "attn_pdrop: 0.0, embd_pdrop: 0.0, resid_pdrop: 0.0}"
    )
    options = ("--model", model, "--batch", 4, "--length", 16, "--steps", 2, "--rounds", 2, "--precision", "fp32")
    peers = [word for name in names[1:] for word in ("--peer", name)]
    rows = {row["name"]: row for row in json.loads(run("train_speed.py", *options, *peers, "--json", cwd=tmp_path))}
    assert list(rows) == names
    assert rows.pop("peers:broken")["failed"] == "RuntimeError: out of luck"
    for row in rows.values():
        assert row["steps"] == [2, 2]
        assert row["tokens/s"] > 0
        assert row["loss at 7"] == pytest.approx(rows["artel"]["loss at 7"], abs=2e-6)


@pytest.mark.processes
def test_preparing_is_measured_as_a_command_and_in_parts(tmp_path):
    only = "end_to_end,near,html,jsonl_zst,read_back"
    told = run("prepare_speed.py", "--size", "1M", "--rounds", 1, "--workers", 1, "--only", only, cwd=tmp_path)
    values = {line.split()[0]: float(line.split()[1].replace(",", "")) for line in told.splitlines()}
    assert {"end_to_end", "end_to_end_tokenizers", "near", "html", "jsonl_zst", "read_back"} == set(values)
    assert all(value > 0 for value in values.values())


@pytest.mark.processes
def test_the_table_of_a_gpu_is_resumed_and_a_row_that_fails_does_not_end_it(tmp_path):
    case = "Llama 1B, 32,000 ids, 8 × 2,048"
    artel, peer, bare = (f"{case}: {name}" for name in ("artel", "torchtitan", "bare loop"))
    out = tmp_path / "table.jsonl"
    table = ("gpu_table.py", "--tiny", "--out", out, "--minutes", 30, "--only")

    def records():
        return [json.loads(line) for line in out.read_text().splitlines()]

    run(*table, artel, cwd=tmp_path)
    shown = run(*table, artel, peer, bare, cwd=tmp_path)  # torchtitan needs a GPU, even if it is installed
    rows = {record["row"]: record for record in records()}
    assert [record["row"] for record in records()] == [artel, peer, bare]
    assert rows[peer]["not run"]
    assert f"| {peer} | not run: " in shown
    for name in (artel, bare):
        row = rows[name]
        assert row["steps"] == 2
        assert row["tokens/s"] > 0
        assert row["first loss"] == pytest.approx(rows[artel]["first loss"], abs=0.01)  # in bf16
        groups = dict(row["profile"])
        wall = groups.pop("wall")
        assert groups["head"] > 0
        assert sum(groups.values()) >= 0.99 * wall  # no kind of work is lost
