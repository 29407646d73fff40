"""DeepSpeed: users' files as they are, what they leave open, and what in them cannot be."""

import json

import pytest

from artel.errors import InputError
from support.deepspeed_cases import GPU, OFFLOAD, gpt2_config, resolve

pytestmark = pytest.mark.usefixtures("deepspeed_beside")

# As in transformers' documentation of its integration.
ALL_AUTO = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto",
                                                      "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                          "stage3_param_persistence_threshold": "auto", "overlap_comm": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


def faults(tree, folder, **more) -> dict[str, str]:
    """What is said against a file, by key."""
    with pytest.raises(InputError) as caught:
        resolve(tree, folder, **more)
    return {problem.where.rpartition(": ")[2]: f"{problem.what}; {problem.fix}" for problem in caught.value.problems}


def test_a_file_for_eight_gpus_is_taken_as_it_is(tmp_path):
    resolved = resolve(OFFLOAD, tmp_path, world=8, device=GPU, batch=64, micro_batch=2)
    assert (resolved.stage, resolved.precision, resolved.micro_batch, resolved.notes) == (3, "fp16", 2, ())
    settings = resolved.complete(gpt2_config(), 100, 2)
    batch = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert [settings[key] for key in batch] == [2, 4, 64]
    assert settings["fp16"] == OFFLOAD["fp16"]
    assert settings["zero_optimization"] == OFFLOAD["zero_optimization"]
    for key in ("sub_group_size", "reduce_bucket_size", "stage3_prefetch_bucket_size"):
        assert type(settings["zero_optimization"][key]) is int


def test_on_a_cpu_it_runs_with_what_that_has_and_says_so(tmp_path):
    resolved = resolve(OFFLOAD, tmp_path, batch=64, micro_batch=2)
    assert resolved.precision == "fp32"
    message = "\n".join(resolved.notes)
    assert "fp16 is replaced by fp32" in message
    assert "offload_param.pin_memory is off" in message
    assert "offload_optimizer.pin_memory is off" in message
    settings = resolved.complete(gpt2_config(), 100, 2)
    assert not settings["fp16"]["enabled"]
    assert not settings["zero_optimization"]["offload_param"]["pin_memory"]


def test_auto_is_what_the_run_file_says(tmp_path):
    resolved = resolve(ALL_AUTO, tmp_path, batch=24, micro_batch=3, schedule="linear", clip=0.5, precision="bf16")
    assert (resolved.stage, resolved.precision, resolved.micro_batch) == (3, "bf16", 3)
    assert any("overlap_comm is DeepSpeed's own default" in note for note in resolved.notes)
    assert any("steps_per_print" in note and "log.every" in note for note in resolved.notes)
    settings = resolved.complete(gpt2_config(), 100, 3)
    zero = settings["zero_optimization"]
    assert zero["reduce_bucket_size"] == 33 * 33
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 33 * 33)
    assert zero["stage3_param_persistence_threshold"] == 330
    assert (settings["gradient_clipping"], settings["gradient_accumulation_steps"]) == (0.5, 4)
    assert "auto" not in json.dumps(settings)
    assert not settings.keys() & {"optimizer", "scheduler"}  # artel's own lead


def test_a_batch_that_only_one_of_both_files_cuts(tmp_path):
    file = {"train_micro_batch_size_per_gpu": 4}
    assert resolve(file, tmp_path, batch=64).micro_batch == 4
    assert resolve({"gradient_accumulation_steps": 8}, tmp_path, batch=64).micro_batch == 4
    assert resolve({}, tmp_path, batch=64).micro_batch is None
    assert resolve({}, tmp_path, batch=64, micro_batch=8).micro_batch == 8


def test_all_that_differs_from_the_run_file_is_told_at_once(tmp_path):
    tree = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "amsgrad": True}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bukket_size": 5e8, "overlap_comm": "maybe",
                              "offload_optimizer": {"device": "cpu", "pin_memry": True}},
        "gradient_cliping": 1.0,
        "tensor_parallel": {"autotp_size": 4},
    }  # fmt: skip
    problems = faults(tree, tmp_path, batch=64, micro_batch=8, precision="fp32")
    assert problems.keys() == {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "optimizer.params.lr", "optimizer.params.eps", "optimizer.params.amsgrad", "scheduler.type", "bf16.enabled",
        "zero_optimization.reduce_bukket_size", "zero_optimization.overlap_comm",
        "zero_optimization.offload_optimizer.pin_memry", "gradient_cliping", "tensor_parallel",
    }  # fmt: skip
    assert "train.batch: 32" in problems["train_batch_size"]
    assert "4 micro-batches of 8" in problems["gradient_accumulation_steps"]
    assert "0.0003, but train.learning_rate is 5e-05" in problems["optimizer.params.lr"]
    assert "did you mean reduce_bucket_size?" in problems["zero_optimization.reduce_bukket_size"]
    assert "did you mean pin_memory?" in problems["zero_optimization.offload_optimizer.pin_memry"]
    assert "did you mean gradient_clipping?" in problems["gradient_cliping"]


@pytest.mark.parametrize(
    ("tree", "key", "words", "train"),
    [
        ('{"fp16": {"enabled": true},}\n{', "json:1", "JSON", {}),
        ('{"fp16": {}, "fp16": {}}', "json", "fp16", {}),
        ("[1]", "json", "DeepSpeed configuration", {}),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "0, 1, 2 or 3", {}),
        ({"train_batch_size": 1.5}, "train_batch_size", "integer", {}),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled", "both true", {}),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", "train.optimizer is adamw", {}),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "optimizer.type", "is adam", {}),
        ({"amp": {"enabled": True}}, "amp", "no longer", {}),
        ({"compile": {"deepcompile": True}}, "compile", "train.compile", {}),
        ({}, "train.optimizer", "adamw or sgd", {"optimizer": "adafactor"}),
        ({}, "train.weights", "fp32", {"weights": "bf16"}),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}},
         "zero_optimization.offload_param.nvme_path", "/nowhere", {}),
        ({"zero_optimization": {"stage": 3, "zenflow": {}}}, "zero_optimization.zenflow", "optimizer", {}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(tree, key, words, train, tmp_path):
    with pytest.raises(InputError) as caught:
        resolve(tree, tmp_path, **train)
    assert any(problem.where.endswith(key) and words in str(problem) for problem in caught.value.problems), caught.value


def test_comments_and_old_forms_are_understood(tmp_path):
    text = '{\n  // two\n  "zero_optimization": true, "amp": {"enabled": false},\n  "bfloat16": {"enabled": true}\n}'
    resolved = resolve(text, tmp_path, device=GPU)
    assert (resolved.stage, resolved.precision) == (1, "bf16")
    resolved = resolve({"zero_optimization": {"stage": 2, "cpu_offload": True}}, tmp_path, precision="fp32")
    assert resolved.settings["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    resolved = resolve({"bf16": {"enabled": True}}, tmp_path, device=GPU)
    assert resolved.stage == 1
    assert "runs as 1" in resolved.notes[0]


def test_a_schedule_of_another_length_is_refused_when_the_run_s_is_known(tmp_path):
    block = {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 10}}
    resolved = resolve({"scheduler": block}, tmp_path, schedule="linear", warmup=10)
    assert "scheduler" not in resolved.complete(gpt2_config(), 1000, 2)
    with pytest.raises(InputError, match=r"total_num_steps: is 1,000, but with 500 steps"):
        resolved.complete(gpt2_config(), 500, 2)
