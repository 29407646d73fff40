"""Every objective through the one loop: one loss however a batch is cut, and a killed run that ends bit for bit."""

import json
import os
import random
import sys
from pathlib import Path

import pytest

from artel.config import TokenizerTraining, load_run
from artel.objectives import build_objective, objective_type
from artel.tokens import train_tokenizer
from support import WORKERS
from support.objectives import KINDS, OBJECTIVES, objective_run
from support.runs import (
    DEEPSPEED,
    assert_same_models,
    largest_difference,
    losses,
    succeed,
    torchrun,
    train_with_kills,
)

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from parity import run_file, sections_of

CASES = WORKERS / "train_cases.py"


@pytest.mark.processes
@pytest.mark.parametrize(
    "names", [pytest.param(OBJECTIVES, id="objectives"), pytest.param(KINDS, id="kinds", marks=pytest.mark.long)]
)
def test_same_losses_and_gradient_norms_however_the_batch_is_cut(tmp_path, names):
    """Global batch 16 on 1 and 2 processes, accumulation 1 and 4, samples of unequal length: 1e-5 relative.

    With accumulation on two processes these share the weights too.
    """
    results = {}
    for processes in (1, 2):
        files = [
            objective_run(tmp_path / f"{processes}-{name}-{accumulation}.yaml", name, train={
                "optimizer": "sgd", "learning_rate": 0.05, "batch": 16, "steps": 5,
                "micro_batch": 16 // processes // accumulation},
                parallel={"data": "fsdp" if (processes, accumulation) == (2, 4) else "auto"})
            for name in names for accumulation in (1, 4)
        ]  # fmt: skip
        done = torchrun(processes, CASES, *files)
        assert done.returncode == 0, done.stderr[-3000:]
        for file in files:
            results[file.stem] = losses(file.with_suffix(""))
    for name in names:
        reference = results[f"1-{name}-1"]
        assert len(reference) == 5
        for other, figures in results.items():
            if f"-{name}-" in other:
                assert largest_difference(reference, figures) < 1e-5, other


TOKENS = {"masked", "restoring", "chat", "seq2seq", "translation"}  # the cross-entropy of tokens
STAGE_3 = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}
LAYOUTS = {"embedding": {"tensor": 2}, "reward": {"pipeline": 2}, "rerank": {"pipeline": 2},
           "distill": {"deepspeed": "stage3.json"}, "distill_beside": {"deepspeed": "stage3.json"}}  # fmt: skip


@pytest.mark.processes
def test_vectors_scores_and_teachers_under_other_strategies(tmp_path):
    """Those that the table of layouts does not have; the global batch in four micro-batches."""
    if any("deepspeed" in layout for layout in LAYOUTS.values()) and not DEEPSPEED.is_dir():
        pytest.skip("deepspeed is not beside the environment: see the Makefile")
    (tmp_path / "stage3.json").write_text(json.dumps(STAGE_3))
    train = {"optimizer": "sgd", "learning_rate": 0.05, "batch": 16, "steps": 4, "micro_batch": 4}
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(DEEPSPEED)]))
    results = {}
    for processes in (1, 2):
        files = []
        for name, layout in LAYOUTS.items():
            parallel = {key: str(tmp_path / value) if key == "deepspeed" else value for key, value in layout.items()}
            more = {"parallel": parallel} if processes == 2 else {}
            files.append(objective_run(tmp_path / f"{processes}-{name}.yaml", name, train=train, **more))
        done = torchrun(processes, CASES, *files, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr[-3000:]
        results[processes] = [losses(file.with_suffix("")) for file in files]
    for name, one, two in zip(LAYOUTS, *results.values(), strict=True):
        assert len(one) == 4
        assert largest_difference(one, two) < 1e-5, name


def test_each_says_its_own_loss(tmp_path):
    """In words, on the line with which a run starts; none for the cross-entropy of tokens."""
    tokenizer = train_tokenizer(iter(["one two"] * 50), TokenizerTraining(vocab=262), encoder=True)
    words = {}
    for name in (*OBJECTIVES, *KINDS):
        decided = {"classification.labels": ["one", "two"]} if "label" in name else {}
        run = load_run(str(objective_run(tmp_path / f"{name}.yaml", name)), decided)
        words[name] = build_objective(run, tokenizer).loss_description
    assert {name for name, loss in words.items() if not loss} == TOKENS
    said = {"several_labels": "focal, gamma 2", "labels_of_pairs": "smoothing 0.1, weighted by class",
            "embedding": "at 32, 16 numbers",
            "distill": "8 likeliest ids at temperature 2, 0.5 cross-entropy",
            "kto": "kto, beta 0.1", "number": "squared error", "listwise": "among those of its query"}  # fmt: skip
    assert {name: part for name, part in said.items() if part not in words[name]} == {}


def test_the_table_of_layouts_has_every_objective_as_it_is_here(tmp_path):
    """The run files of benchmarks/parity.py --tables objectives."""
    for name in OBJECTIVES:
        here = load_run(str(objective_run(tmp_path / f"{name}.yaml", name)))
        there = load_run(str(run_file(tmp_path, f"{name}-2", 2, sections_of(tmp_path, name), {"data": "fsdp"})))
        assert there.parallel.data == "fsdp"
        assert objective_type(there).settings(there) == objective_type(here).settings(here), name
        assert (there.objective, there.data.sources) == (here.objective, here.data.sources)


# Two of them in every run; the others differ in nothing that a kill could meet, and take half a minute each.
@pytest.mark.ci
@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [name if name in ("masked", "kto") else pytest.param(name, marks=pytest.mark.long) for name in OBJECTIVES]
)
def test_killed_and_resumed_ends_bit_equal(tmp_path, name):
    changes = {"train": {"steps": 30, "batch": 8}, "checkpoint": {"every": 4}, "dropout": True}
    whole = objective_run(tmp_path / "whole.yaml", name, **changes)
    succeed("train", whole)
    broken = objective_run(tmp_path / "broken.yaml", name, **changes)
    train_with_kills(broken, random.Random(name).sample(range(5, 26), 2))
    assert_same_models(whole, broken)
    assert losses(whole.with_suffix("")) == losses(broken.with_suffix(""))
