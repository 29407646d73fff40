"""Checkpoints of artel's in DeepSpeed's own format: DeepSpeed's engine goes on from them under each stage."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from artel.training.checkpoint.sharded_files import read_shards, stored_shapes
from support.ranks import run_ranks
from support.runs import DEEPSPEED, refused, succeed, write_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("deepspeed_beside")]

# Groups smaller than some parameters, none spared from being shared out; stage 3 with one group for all.
STAGES = {
    1: {"stage": 1, "reduce_bucket_size": 3000},
    2: {"stage": 2, "reduce_bucket_size": 3000},
    3: {"stage": 3, "stage3_param_persistence_threshold": 0},
}
SETTINGS = {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}  # a rate that is not the run's


def inputs(rank, world):
    return (torch.arange(64).view(4, 16) * 7 + 3) % 200 if world == 1 else inputs(0, 1)[2 * rank : 2 * rank + 2]


def gone_on(rank, world):
    """What DeepSpeed has under each stage after it has read the folder, and after a step on it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
    folder, steps = Path(os.environ["FOLDER"]), {}
    for stage, zero in STAGES.items():
        config = {
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "checkpoint": {"load_universal": True},
        }
        model = AutoModelForCausalLM.from_pretrained(folder / "out")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # so that what is found is from DeepSpeed's part of the folder
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        groups = [{"params": decayed}, {"params": others}] if stage < 3 else decayed + others
        optimizer = torch.optim.AdamW(groups, **SETTINGS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
        engine.load_checkpoint(str(folder / "out"))
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        steps[stage] = [engine.global_steps, schedule.last_epoch, optimizer.param_groups[0]["lr"]]
        results = {}
        for name, parameter in engine.module.named_parameters():
            results[name] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                value = safe_get_full_optimizer_state(parameter, key)
                if value is not None:  # 0.19.8 finds those of the first group alone under stages 1 and 2
                    results[f"{name}|{key}"] = value.clone()
        ids = inputs(rank, world)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        stepped = {name: safe_get_full_fp32_param(each).clone() for name, each in engine.module.named_parameters()}
        if rank == 0:
            torch.save({"results": results, "stepped": stepped}, folder / f"{stage}.pt")
    return steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory, deepspeed_beside):
    place = tmp_path_factory.mktemp("universal")
    run = write_run(
        place / "run.yaml",
        train={"steps": 4, "optimizer": "adamw", "learning_rate": 0.01, "schedule": "linear", "warmup": 0},
        checkpoint={"every": 2, "keep": 2, "best": None},
    )
    succeed("train", run)
    newest = place / "run" / "checkpoints" / "latest"
    newest.unlink()
    newest.symlink_to("step-000000002")  # as if it had been stopped there
    done = succeed("export", place / "run", place / "out", "--deepspeed", "--json")
    assert json.loads(done.stdout)["kind"] == "deepspeed"
    return place


@pytest.fixture(scope="module")
def checkpoint(folder):
    newest = folder / "run" / "checkpoints" / "latest"
    return load_file(newest / "model.safetensors") | load_file(newest / "optimizer.safetensors")


@pytest.fixture(scope="module")
def engine(folder):
    """What `gone_on` returns, and what it has left for each stage."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(DEEPSPEED)]))
    steps = run_ranks(2, __file__, "gone_on", seconds=400, FOLDER=str(folder), PYTHONPATH=path)[0]
    return {stage: {"steps": steps[str(stage)], **torch.load(folder / f"{stage}.pt")} for stage in STAGES}


@pytest.fixture(scope="module")
def stepped(folder, checkpoint):
    """The checkpoint after one more step, by PyTorch's AdamW alone: the third of four, at half of the peak rate."""
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS | {"lr": 0.005})
    for name, parameter in model.named_parameters():
        state = {key: checkpoint[f"{name}|{key}"].clone() for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = state | {"step": torch.tensor(2.0)}
    ids = inputs(0, 1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", list(STAGES))
def test_deepspeed_goes_on_from_a_checkpoint(stage, engine, checkpoint, stepped):
    there = engine[stage]
    assert there["steps"] == [2, 2, 0.005]
    averages = [name for name in there["results"] if "|" in name]
    assert len(averages) >= 2
    for name, value in there["results"].items():
        assert torch.equal(value, checkpoint[name]), name
    assert there["stepped"].keys() == stepped.keys()
    for name, value in there["stepped"].items():
        assert not torch.equal(value, checkpoint[name])
        torch.testing.assert_close(value, stepped[name], rtol=1e-5, atol=1e-7)


def test_the_folder_is_a_model_too(folder, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, checkpoint[name]), name
    succeed("generate", folder / "out", "--prompt", "the", "--max-new-tokens", 3)


def test_pieces_make_the_same_files(folder, checkpoint, tmp_path):
    """A checkpoint of which processes have pieces: the same run under fsdp, its files against its own tensors."""
    run = write_run(
        tmp_path / "run.yaml",
        train={"steps": 2, "optimizer": "adamw"},
        parallel={"data": "fsdp"},
        checkpoint={"every": 2, "best": None},
    )
    for command in (("train", run, "--nproc", 2), ("export", tmp_path / "run", tmp_path / "out", "--deepspeed")):
        succeed(*command)
    newest = tmp_path / "run" / "checkpoints" / "latest"
    assert not (newest / "model.safetensors").exists()
    shapes = stored_shapes(newest)
    stored = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    read_shards(newest, stored)
    zero = tmp_path / "out" / "global_step2" / "zero"
    names = sorted(path.name for path in zero.iterdir() if path.is_dir())
    assert names == sorted(name for name in checkpoint if "|" not in name)
    for name in names:
        for key, tensor in (("fp32", name), ("exp_avg", f"{name}|exp_avg"), ("exp_avg_sq", f"{name}|exp_avg_sq")):
            assert torch.equal(torch.load(zero / name / f"{key}.pt")["param"], stored[tensor])
        assert torch.load(zero / name / "step.pt") == 2.0


def test_what_cannot_be_written_is_refused(folder, tmp_path):
    model = refused("export", folder / "out", tmp_path / "new", "--deepspeed")
    assert "is not a run and has no optimizer state" in model.stderr
    both = refused("export", folder / "run", tmp_path / "new", "--deepspeed", "--merge")
    assert "--deepspeed: cannot be combined" in both.stderr
    run = write_run(
        tmp_path / "run.yaml",
        data={"store": str(folder / "stores")},
        tokenizer={"replace": True},
        model={"config": None, "from": str(folder / "out"), "lora": {"rank": 2, "target": ["c_attn"]}},
        train={"steps": 1, "optimizer": "sgd"},
        checkpoint={"every": 1, "best": None},
    )
    succeed("train", run)
    done = refused("export", tmp_path / "run", tmp_path / "new", "--deepspeed")
    assert (
        "train.optimizer: sgd: only Adam's state can be converted between DeepSpeed's checkpoints and artel's"
        in done.stderr
    )
    assert "model.lora: only full models can be converted between DeepSpeed's checkpoints and artel's" in done.stderr
    assert not (tmp_path / "new").exists()
