"""Benchmarks of speed: what train_speed.py, gpu_table.py and prepare_speed.py compare is the same work."""

import importlib
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


def test_each_row_of_the_table_of_a_gpu_has_its_function_and_the_first_ones_fit_into_its_time(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu_table = importlib.import_module("gpu_table")
    rows = gpu_table.read_rows(tiny=False)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        file, _, function = row.contestant["function"].partition(":")
        assert f"def {function}(work: Work" in (BENCHMARKS / "peers" / file).read_text(), row.name
    assert {row.slug for row in gpu_table.read_rows(tiny=True)} == {row.slug for row in rows}
    first = [row for row in rows if row.name.rpartition(": ")[2] in row.case["contestants"]]
    inputs = {row.slug: row.case["inputs"] for row in rows}
    assert gpu_table.SMOKE_SECONDS + sum(row.seconds for row in first) + sum(inputs.values()) < 26 * 60


@pytest.mark.processes
def test_the_table_of_a_gpu_is_resumed_and_a_row_that_fails_does_not_end_it(tmp_path):
    peer, bare = (f"Llama 1B, 32,000 ids, 8 × 2,048: {name}" for name in ("torchtitan", "bare loop"))
    out = tmp_path / "table.jsonl"
    table = ("gpu_table.py", "--tiny", "--out", out, "--minutes", 30, "--only")

    def records():
        return [json.loads(line) for line in out.read_text().splitlines()]

    run(*table, peer, cwd=tmp_path)
    [failed] = records()
    assert failed["not run"]  # torchtitan needs a GPU, even if it is installed
    shown = run(*table, peer, bare, cwd=tmp_path)
    first, row = records()
    assert (first, row["row"]) == (failed, bare)
    assert f"| {peer} | not run: " in shown
    assert row["steps"] == 2
    assert row["tokens/s"] > 0
    wall = row["profile"].pop("wall")
    assert row["profile"]["head"] > 0
    assert sum(row["profile"].values()) >= 0.99 * wall  # no kind of work is lost
