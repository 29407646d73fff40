"""Checkpoints of any layout are gone on with by any other; what is refused, and why."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from artel.config.schema.run import ParallelConfig
from artel.errors import InputError
from artel.parallel import read_parallel_dims
from support import WORKERS
from support.ranks import run_ranks
from support.runs import largest_difference, losses, write_run

CASES = WORKERS / "layout_cases.py"
LAYOUTS = {
    "alone": (1, {}),
    "ddp-2": (2, {}),
    "zero1-2": (2, {"data": "zero1"}),
    "fsdp-2": (2, {"data": "fsdp"}),
    "fsdp-4": (4, {"data": "fsdp"}),
    "tensor-2": (2, {"tensor": 2}),
    "pipeline-2": (2, {"pipeline": 2}),
    "fsdp-tensor-2x2": (4, {"data": "fsdp", "tensor": 2}),
}
EVERY = [(before, after) for before in LAYOUTS for after in LAYOUTS]
SOME = [pair for pair in EVERY if "alone" in pair or "fsdp-4" in pair]
RUN = {"train": {"steps": 6, "batch": 16, "micro_batch": 4}, "checkpoint": {"every": 3, "keep": 9}}
EXPERTS = {"model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
           "num_key_value_heads": 2, "num_local_experts": 4, "intermediate_size": 40}  # fmt: skip
MUON = {"train": {"steps": 4, "batch": 16, "micro_batch": 4, "optimizer": "muon"}}  # whole matrices, by all together


def run_all(files: dict[int, list[Path]]) -> None:
    for world, those in sorted(files.items()):
        results = run_ranks(world, CASES, "run_files", 400, CASES=os.pathsep.join(map(str, those)))
        assert results == [[None] * len(those)] * world


@pytest.mark.ci
@pytest.mark.processes
@pytest.mark.parametrize("pairs", [SOME, pytest.param(EVERY, marks=pytest.mark.long)], ids=["some", "every"])
def test_a_layout_goes_on_from_the_checkpoint_of_another(tmp_path, pairs):
    """Stopped after half of the run: the other half's losses and gradient norms within 1e-5, and the saved model."""
    begun = {
        name: write_run(tmp_path / f"{name}.yaml", **RUN, parallel=parallel) for name, (_, parallel) in LAYOUTS.items()
    }
    muon = {
        world: write_run(tmp_path / f"muon-{world}.yaml", **MUON, parallel=parallel)
        for world, parallel in ((1, {}), (2, {"data": "fsdp"}))
    }
    first = {world: [begun[name] for name in LAYOUTS if LAYOUTS[name][0] == world] for world in (1, 2, 4)}
    run_all({world: [*files, *([muon[world]] if world in muon else [])] for world, files in first.items()})
    assert largest_difference(*(losses(file.with_suffix("")) for file in muon.values())) < 1e-5
    expected = losses(begun["alone"].with_suffix(""))
    assert expected[6][0] < expected[1][0]
    gone_on: dict[int, list[Path]] = {}
    for name, file in begun.items():
        assert largest_difference(expected, losses(file.with_suffix(""))) < 1e-5, name
    for before, after in pairs:
        world, parallel = LAYOUTS[after]
        path = write_run(tmp_path / f"{before}-then-{after}.yaml", **RUN, parallel=parallel)
        halfway(begun[before].with_suffix(""), path.with_suffix(""))
        gone_on.setdefault(world, []).append(path)
    run_all(gone_on)
    weights = load_file(begun["alone"].with_suffix("") / "model" / "model.safetensors")
    for path in (path for those in gone_on.values() for path in those):
        by_step = losses(path.with_suffix(""))
        assert by_step.keys() == expected.keys()
        assert largest_difference(expected, by_step) < 1e-5, path.stem
        model = load_file(path.with_suffix("") / "model" / "model.safetensors")
        assert model.keys() == weights.keys()
        assert all(torch.allclose(model[name], weights[name], rtol=1e-4, atol=1e-6) for name in weights), path.stem
    opened = AutoModelForCausalLM.from_pretrained(path.with_suffix("") / "model")
    assert type(opened).__name__ == "GPT2LMHeadModel"
    assert json.loads((path.with_suffix("") / "model" / "config.json").read_text())["architectures"] == [
        "GPT2LMHeadModel"
    ]


@pytest.mark.processes
def test_four_processes_hold_a_quarter_each(tmp_path):
    """Weights, gradients, both of AdamW's averages: 16 bytes a parameter. What else is alive is less than a layer."""
    model = {"config": {"n_layer": 4, "n_embd": 128, "n_head": 4}}
    run = write_run(
        tmp_path / "run.yaml",
        model=model,
        parallel={"data": "fsdp"},
        train={"steps": 3, "micro_batch": 4},
        checkpoint={"asynchronous": False},
    )  # its copies would lie in the same memory
    for result in run_ranks(4, CASES, "held_at_the_step", 400, CASES=str(run)):
        quarter = 16 * result["parameters"] / 4
        assert result["parameters"] > 800_000
        assert 0.99 * quarter <= result["own"] <= 1.01 * quarter, result
        assert result["other"] <= 4 * result["layer"], result


@pytest.mark.ci
@pytest.mark.processes
def test_the_norm_of_the_weights_is_that_of_one_process_under_every_layout(tmp_path):
    layouts = {
        "ddp": {},
        "zero2": {"data": "zero2"},
        "fsdp": {"data": "fsdp"},
        "hsdp": {"data": "hsdp", "shard": 1},
        "tensor": {"tensor": 2},
        "pipeline": {"pipeline": 2},
        "expert": {"data": "fsdp", "expert": 2},
    }
    files = {}
    for name, parallel in layouts.items():
        model = {"model": {"config": EXPERTS}} if name == "expert" else {}
        files[name] = write_run(tmp_path / f"{name}.yaml", parallel=parallel, **model)
        files[f"{name}, alone"] = write_run(tmp_path / f"{name}-alone.yaml", **model)
    norms = {}
    for world, names in ((1, [f"{name}, alone" for name in layouts]), (2, [*layouts])):
        cases = os.pathsep.join(str(files[name]) for name in names)
        for rank in run_ranks(world, CASES, "weight_norms", 400, CASES=cases):
            for name, norm in zip(names, rank, strict=True):
                assert norms.setdefault(name, norm) == norm  # the same on all ranks
    for name in layouts:
        assert norms[name] == pytest.approx(norms[f"{name}, alone"], rel=1e-5), name


def halfway(run: Path, copy: Path) -> None:
    """The folder of a run as it was when its first checkpoint was written."""
    shutil.copytree(run, copy, symlinks=True)
    for path in ("model", "checkpoints/step-000000006"):
        shutil.rmtree(copy / path)
    (copy / "result.json").unlink()
    (copy / "checkpoints" / "latest").unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 3))


@pytest.mark.parametrize(
    ("parallel", "world", "where", "said"),
    [
        (
            {"tensor": 4},
            6,
            "parallel",
            "6 processes are not a multiple of pipeline 1 x context 1 x tensor 4 = 4; start 8",
        ),
        ({"data": "hsdp", "shard": 4}, 6, "parallel.shard", "not a multiple of 4"),
        ({"data": "fsdp", "shard": 2}, 4, "parallel.shard", "fsdp does not replicate"),
        ({"data": "ddp", "offload": "cpu"}, 2, "parallel.offload", "write data: fsdp"),
        ({"data": "ddp", "expert": 2}, 2, "parallel.expert", "write data: fsdp"),
        ({"data": "fsdp", "expert": 4}, 6, "parallel.expert", "write one of: 1, 2, 3, 6"),
    ],
)
def test_numbers_of_processes_that_do_not_divide_are_refused(parallel, world, where, said):
    with pytest.raises(InputError) as refused:
        read_parallel_dims(ParallelConfig.model_validate(parallel), world, world)
    (problem,) = refused.value.problems
    assert problem.where == where
    assert said in f"{problem.what}; {problem.fix}"


def test_data_parallel_by_threads_is_run_as_ddp_with_a_word(caplog):
    assert ParallelConfig.model_validate({"data": "DataParallel"}).data == "ddp"
    assert "parallel.data: DataParallel is run as ddp" in caplog.text


def test_neighbours_share_what_is_spoken_of_most():
    grid = read_parallel_dims(ParallelConfig(data="hsdp", tensor=2, pipeline=2), world_size=16, on_host=4)
    assert grid.sizes == (2, 2, 2, 1, 2)  # pipeline, dp_replicate, dp_shard, context, tensor
    assert [grid.dp_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [rank for rank in range(16) if grid.is_reporting_rank(rank)] == [0, 2, 4, 6]
