"""Command lines of transformers' scripts as run files."""

from artel.config.converters.tools import convert
from support import foreign_configs as configs
from support.converting import reported


def test_what_becomes_of_a_shell_script():
    result = convert(configs.RUN_CLM, "old")
    assert result.run == {
        "run": "out/gpt2", "objective": "causal",
        "data": {"sources": [{"path": "data/train.txt"}], "validation": "${HELD_OUT}", "block": 512,
                 "dedup": {"exact": False}},
        "model": {"from": "openai-community/gpt2"},
        "train": {
            "precision": "bf16", "batch": 128, "micro_batch": 2, "epochs": 2, "learning_rate": 5e-6,
            "weight_decay": 0, "betas": [0.9, 0.999], "optimizer": "adamw", "schedule": "cosine", "warmup": 0,
            "activation_checkpointing": "full",
        },
        "validate": {"every": 200}, "checkpoint": {"every": 100, "keep": 2}, "log": {"every": 10},
        "parallel": {"data": "fsdp"}, "track": ["console", "jsonl", "tensorboard", "wandb"],
    }  # fmt: skip
    assert (
        reported(result)["warmup_steps"]
        == "old:17: warmup_steps = $WARMUP: $WARMUP is not set in the script; write its value"
    )
    assert result.comments["data.validation"] == "the value of $HELD_OUT, which the script does not set"
    assert "hf_abcdefghij" not in str(result.not_carried + result.differs)
    assert any("starts 8 processes" in line for line in result.differs)
    assert {"CUDA_VISIBLE_DEVICES", "optim"} <= reported(result).keys()


def test_a_script_without_a_trainer_does_not_clip_validates_each_epoch_and_computes_as_it_is_launched():
    launcher = "accelerate launch --num_processes 2 --mixed_precision bf16"
    arguments = "--model_name_or_path gpt2 --train_file a.txt"
    result = convert(f"{launcher} run_clm_no_trainer.py {arguments}", "old")
    assert (result.run["train"]["precision"], result.run["train"]["clip"]) == ("bf16", None)
    assert result.run["validate"] == {"every": "1 epoch"}
    assert "launcher.mixed_precision" not in reported(result)
    result = convert(f"{launcher} run_clm_no_trainer.py {arguments} --bf16 --max_grad_norm 0.5", "old")
    assert (result.run["train"]["precision"], result.run["train"]["clip"]) == ("bf16", 0.5)
    assert "launcher.mixed_precision" not in reported(result)
    result = convert(f"accelerate launch --mixed_precision no run_clm.py {arguments}", "old")
    assert result.run["train"]["precision"] == "fp32"
    assert "launcher.mixed_precision" not in reported(result)
    result = convert(f"{launcher} run_clm.py {arguments} --fp16", "old")
    assert result.run["train"]["precision"] == "fp16"
    assert "clip" not in result.run["train"]
    assert "launcher.mixed_precision" in reported(result)
