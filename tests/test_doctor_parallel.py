"""`artel doctor --parallel`: a small copy of the user's model under the asked layout and alone."""

import json

import pytest
import yaml

from artel.config import load_run, parse_run
from artel.diagnostics.parallel_check import Agreement, small_copy
from artel.objectives import objective_type
from support.runs import refused, succeed, write_run


def described(model, **parallel):
    return parse_run({"data": {"sources": [{"format": "dummy"}]}, "model": model, "parallel": parallel}, {}, {})


def test_the_copy_keeps_what_decides_how_a_model_is_split():
    large = {"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 2048, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144, "attention_dropout": 0.1,
             "layer_types": ["full_attention"] * 28, "tie_word_embeddings": True}  # fmt: skip
    copy = small_copy(described({"config": large}, pipeline=2, schedule="interleaved"), 2)
    config = copy["model"]["config"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (16, 8, 8)
    assert (config["num_hidden_layers"], config["hidden_size"], len(config["layer_types"])) == (4, 128, 4)
    assert config["attention_dropout"] == 0
    assert config["tie_word_embeddings"] is True
    assert copy["train"]["batch"] == 16  # two rows for each of two that share the batch, four at a time in the stages


def test_of_a_pretrained_folder_and_of_the_default(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": 16, "n_embd": 1024}))
    for model, heads in (({"from": str(tmp_path)}, 16), ({}, 12)):
        config = small_copy(described(model), 1)["model"]["config"]
        assert config["model_type"] == "gpt2"
        assert config["n_embd"] == 8 * heads
        assert config["resid_pdrop"] == 0


@pytest.mark.parametrize(
    ("objective", "source"),
    [("causal", {"format": "dummy"}), ("masked", {"format": "dummy"}),
     ("span_qa", {"format": "dummy", "kind": "questions"}), ("chat", {"format": "chat", "path": "t.jsonl"}),
     ("preference", {"format": "preference", "path": "t.jsonl"})],
)  # fmt: skip
def test_of_each_objective_it_is_a_run_that_can_start(objective, source, tmp_path):
    (tmp_path / "t.jsonl").write_text("{}\n")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"objective": objective, "data": {"sources": [source]}}))
    file.write_text(yaml.safe_dump({"run": "small"} | small_copy(load_run(str(file), {}), 1)))
    copy = load_run(str(file), {})
    assert objective_type(copy).problems(copy) == []


def test_what_it_says():
    assert "numbers are those of one process" in str(Agreement(2, "cpu", {}, 1e-7, 1e-7))
    apart = Agreement(2, "cpu", {}, 1e-7, 1e-2)
    assert "NOT THOSE" in str(apart)
    assert apart.to_json()["agrees"] is False


@pytest.mark.processes
def test_a_layout_is_tried_and_a_wrong_one_refused(tmp_path):
    run = write_run(tmp_path / "run.yaml", parallel={"data": "fsdp"})
    report = json.loads(succeed("doctor", run, "--parallel", "--json").stdout)
    assert report["processes"] == 2
    assert report["agrees"] is True
    assert max(report["loss_difference"], report["gradient_norm_difference"]) < 1e-5
    assert "has no experts" in refused("doctor", run, "--parallel", "parallel.expert=2").stderr
