"""Processes of one host as people start them: in an empty working folder, by relative paths and defaults."""

import json
import re

import pytest

from support.runs import TINY, losses, succeed

pytestmark = pytest.mark.processes


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The working folder; temporary files and stores go elsewhere, and what is left of them can be seen."""
    for name in ("work", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def in_folder(folder, *arguments):
    """The command, with its temporary files and its stores beside the working folder."""
    beside = folder.parent
    places = {"TMPDIR": str(beside / "temporary"), "ARTEL_CACHE": str(beside / "cache")}
    done = succeed(*arguments, env=places)
    return done


@pytest.mark.ci
def test_processes_train_in_a_relative_run_folder_and_leave_nothing_else(empty_folder):
    """`run` is left out: runs/NAME. Its slashes were once part of the name of a file of torch's."""
    (empty_folder / "own.yaml").write_text(json.dumps(TINY))
    done = in_folder(empty_folder, "train", "own.yaml", "--nproc", "2")
    assert "2 processes" in done.stderr
    assert len(losses(empty_folder / "runs" / "own")) == TINY["train"]["steps"]
    assert {path.name for path in empty_folder.iterdir()} == {"own.yaml", "runs"}
    assert [path.name for path in (empty_folder / "runs").iterdir()] == ["own"]
    left = [path.name for path in (empty_folder.parent / "temporary").iterdir() if "torchelastic" in path.name]
    assert left == []


def test_the_json_of_seven_keys_starts_its_two_processes(empty_folder):
    """`artel train masked_lm_cpu.json`, as the README prints it: `world_size` is 2, and paths are relative."""
    write_roberta(empty_folder / "model")
    sentences = [f"the fox number {number}, who was quick, saw {number % 7} dogs, and ran" for number in range(64)]
    rows = [f'"{sentence.replace(",", "")}","{sentence}"' for sentence in sentences]
    (empty_folder / "labeled_dataset.csv").write_text("\n".join(["input,output", *rows]))
    (empty_folder / "masked_lm_cpu.json").write_text(json.dumps(
        {"inputs_path": "labeled_dataset.csv", "outputs_path": "labeled_dataset.csv", "model_path": "model",
         "epochs": 1, "batch_size": 8, "learning_rate": 5e-5, "world_size": 2}
    ))  # fmt: skip
    done = in_folder(empty_folder, "train", "masked_lm_cpu.json", "train.threads=1", "train.compile=off")
    assert "2 processes" in done.stderr
    assert re.search(r"runs/masked_lm_cpu", done.stderr)
    assert (empty_folder / "runs" / "masked_lm_cpu" / "model").is_dir()


def write_roberta(folder):
    """A tiny RoBERTa as it came out, with a vocabulary of its own: vocab.json and merges.txt, pytorch_model.bin."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaConfig, RobertaForMaskedLM

    folder.mkdir()
    tokenizer = ByteLevelBPETokenizer()
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(["the fox number, who was quick, saw dogs"], 270, special_tokens=marks)
    tokenizer.save_model(str(folder))
    config = RobertaConfig(vocab_size=tokenizer.get_vocab_size(), hidden_size=16, num_hidden_layers=1,
                           num_attention_heads=2, intermediate_size=32, max_position_embeddings=514)  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    torch.manual_seed(0)
    torch.save(RobertaForMaskedLM(config).state_dict(), folder / "pytorch_model.bin")
