"""Checkpoints that transformers' Trainer wrote with DeepSpeed: exported as models, and gone on from."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from artel.config import TokenizerTraining
from artel.errors import InputError
from artel.inference import export, open_model
from artel.tokens import load_tokenizer, train_tokenizer
from support.deepspeed_cases import gpt2_config
from support.ranks import run_ranks
from support.runs import DEEPSPEED, merged, refused, succeed, write_run
from support.waiting import LIMIT

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("deepspeed_beside")]

# Pieces smaller than some parameters, none spared from being shared out; weights are not gathered, as is the default.
STAGES = {
    1: {"stage": 1, "reduce_bucket_size": 3000},
    2: {"stage": 2, "reduce_bucket_size": 3000},
    3: {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 5000},
}


def trained(rank, world):
    """Two steps of Trainer's under each stage, with a checkpoint of each, and the weights that it then had."""
    import deepspeed
    from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
    folder = Path(os.environ["FOLDER"])
    tokenizer = load_tokenizer(str(folder / "tokenizer")).hf
    rows = [
        {"input_ids": (torch.arange(16) * 7 + row) % 101, "labels": (torch.arange(16) * 7 + row) % 101}
        for row in range(16)
    ]
    for stage, zero in STAGES.items():
        config = {
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
        }
        arguments = TrainingArguments(
            str(folder / str(stage)), deepspeed=config, use_cpu=True, max_steps=2, save_steps=2, learning_rate=0.01,
            per_device_train_batch_size=4, report_to=[], disable_tqdm=True, ddp_backend="gloo", seed=stage
        )  # fmt: skip
        torch.manual_seed(stage)
        config_of_model = gpt2_config()
        config_of_model.vocab_size = 270
        model = GPT2LMHeadModel(config_of_model)
        model.generation_config.update(do_sample=True, temperature=0.7)
        trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        names = dict(trainer.model.named_parameters())
        with deepspeed.zero.GatheredParameters(list(names.values())):
            if rank == 0:
                torch.save({name: value.detach().clone() for name, value in names.items()}, folder / f"{stage}.pt")
    return sorted(path.name for path in (folder / "3/checkpoint-2").iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, deepspeed_beside):
    place = tmp_path_factory.mktemp("trainer")
    (place / "tokenizer").mkdir()
    lines = iter(["words and words, again and again. " * 50])
    train_tokenizer(lines, TokenizerTraining(vocab=270)).save(place / "tokenizer")
    # There before accelerate is imported, which asks once.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(DEEPSPEED)]))
    files = run_ranks(2, __file__, "trained", seconds=400, FOLDER=str(place), PYTHONPATH=path)[0]
    assert not [name for name in files if name.startswith(("model", "pytorch_model"))]  # no other way to a model
    return place


def written(checkpoint, tmp_path):
    export(str(checkpoint), tmp_path / "none")


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_checkpoint_of_trainers_becomes_the_model_it_was(folder, tmp_path, stage):
    checkpoint = folder / str(stage) / "checkpoint-2"
    for file in checkpoint.glob("*.safetensors"):  # what stages 1 and 2 write beside
        file.unlink()
    succeed("export", checkpoint, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    expected = torch.load(folder / f"{stage}.pt")
    actual = dict(model.named_parameters())
    assert actual.keys() == expected.keys()
    assert model.generation_config.temperature == 0.7
    assert model.lm_head.weight is model.transformer.wte.weight
    for name, value in expected.items():
        assert actual[name].dtype == torch.float32
        assert torch.equal(actual[name], value), name
    assert open_model(str(tmp_path / "model")).tokenizer.vocabulary == 270


def run_from(folder, path, **changes):
    config = {"vocab_size": 270, "n_positions": 32, "n_embd": 33, "n_head": 3}
    tokenizer = {"train": None, "from": str(folder / "tokenizer")}
    run = {"tokenizer": tokenizer, "model": {"config": config}, "train": {"steps": 3, "optimizer": "adamw"},
           "checkpoint": {"every": 1, "keep": 9, "best": None}}  # fmt: skip
    return write_run(path, **merged(run, changes))


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_run_goes_on_where_trainer_stood(folder, tmp_path, stage):
    """Its first checkpoint holds what DeepSpeed's own converter finds."""
    checkpoint = folder / str(stage) / "checkpoint-2"
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    convert += ["--input_folder", checkpoint / "global_step2", "--output_folder", tmp_path / "universal"]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(DEEPSPEED)]))
    subprocess.run(convert, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT)
    run = run_from(folder, tmp_path / "run.yaml")
    assert "resuming from step 2" in succeed("train", run, "--from-deepspeed", checkpoint).stderr
    checkpoints = tmp_path / "run" / "checkpoints"
    began, ended = (
        load_file(checkpoints / name / "model.safetensors") | load_file(checkpoints / name / "optimizer.safetensors")
        for name in ("step-000000002", "step-000000003")
    )
    names = [name for name in began if "|" not in name]
    assert sorted(began) == sorted(ended)
    assert len(began) == 4 * len(names)
    for name in names:
        converted = tmp_path / "universal" / "zero" / name
        for key, stored in (("fp32", name), ("exp_avg", f"{name}|exp_avg"), ("exp_avg_sq", f"{name}|exp_avg_sq")):
            saved = torch.load(converted / f"{key}.pt", weights_only=False)
            saved = (saved if stage == 3 else saved["param"]).view(began[stored].shape)
            assert torch.equal(began[stored], saved), stored
            assert not torch.equal(ended[stored], saved)
        assert (began[f"{name}|step"], ended[f"{name}|step"]) == (2, 3)
    again = succeed("train", run, "--from-deepspeed", checkpoint)
    assert "has its own checkpoint and resumes from it" in again.stderr


def test_a_run_that_cannot_begin_from_it_says_why(folder, tmp_path):
    checkpoint = folder / "3" / "checkpoint-2"
    run = run_from(folder, tmp_path / "run.yaml", train={"optimizer": "sgd"})
    done = refused("train", run, "--from-deepspeed", folder)
    assert (
        "train.optimizer: sgd: only Adam's state can be converted between DeepSpeed's checkpoints and artel's"
        in done.stderr
    )
    assert f"{folder}: is not a DeepSpeed checkpoint" in done.stderr
    assert not (tmp_path / "stores").exists()  # before any text is prepared
    run = run_from(folder, tmp_path / "run.yaml", train={"steps": 2})
    assert "is of step 2, but this run ends after 2" in refused("train", run, "--from-deepspeed", checkpoint).stderr
    run = run_from(folder, tmp_path / "run.yaml", model={"freeze": ["transformer.wpe.weight"]})
    done = refused("train", run, "--from-deepspeed", checkpoint)
    assert "trained other parameters than this run does (transformer.wpe.weight …, 1 in all)" in done.stderr
    copy = tmp_path / "copy"  # as if saved without ZeRO
    shutil.copytree(folder / "1" / "checkpoint-2", copy, ignore=shutil.ignore_patterns("*_optim_states.pt"))
    done = refused("train", run_from(folder, tmp_path / "run.yaml"), "--from-deepspeed", copy)
    assert f"{copy}: has no Adam moments in ZeRO's shards" in done.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_training_from_it_names_the_way(folder, tmp_path):
    checkpoint = folder / "3" / "checkpoint-2"
    run = write_run(tmp_path / "run.yaml", model={"config": None, "from": str(checkpoint)}, tokenizer={"train": None})
    done = refused("train", run)
    assert "has weights only as DeepSpeed shards" in done.stderr
    assert f"artel export {checkpoint} FOLDER" in done.stderr.replace("\n", " ")


def test_without_deepspeed_it_is_named(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(DEEPSPEED)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InputError, match=r"holds a deepspeed\.\S+\n.*pip install 'artel-lm\[deepspeed\]'"):
        written(folder / "3" / "checkpoint-2", tmp_path)


def test_what_is_missing_is_named(folder, tmp_path):
    checkpoint = folder / "3" / "checkpoint-2"
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"n_layer": 3, "n_positions": 64}))
    with pytest.raises(InputError) as error:
        written(copy, tmp_path)
    assert [problem.what for problem in error.value.problems] == [
        "has no weights for 12 tensors (transformer.h.2.attn.c_attn.bias …) of this GPT2LMHeadModel",
        "has 1 tensors (transformer.wpe.weight …) in other shapes than this GPT2LMHeadModel",
    ]
    (copy / "config.json").write_text(json.dumps(config | {"n_layer": 1}))
    with pytest.raises(
        InputError, match=r"has \d+ tensors \(transformer\.h\.1\..* that are not of this GPT2LMHeadModel"
    ):
        written(copy, tmp_path)
    (copy / "config.json").unlink()
    with pytest.raises(InputError, match=r"\n.*copy config\.json and the tokenizer's files"):
        written(copy, tmp_path)
    next((copy / "global_step2").glob("*_optim_states.pt")).unlink()
    shutil.copy2(checkpoint / "config.json", copy)
    with pytest.raises(InputError, match="has files of 1 processes and was written by 2"):
        written(copy / "global_step2", tmp_path)
