"""`artel evaluate`: figures on any source beside transformers' own, several models, the harness's tasks."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.runs import metrics, refused, succeed, write_run

TEXT = "The miller walks by the river. Count: one, two, three. Say abc again: abc.\n" * 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two short runs of the same kind, one of them longer."""
    folder = tmp_path_factory.mktemp("evaluate")
    runs = [write_run(folder / f"{name}.yaml", train={"steps": steps}) for name, steps in (("short", 2), ("long", 20))]
    for run in runs:
        succeed("train", run)
    return [run.with_suffix("") for run in runs]


@pytest.mark.long
def test_two_runs_side_by_side_on_their_validation_parts(trained):
    done = succeed("evaluate", *trained, "--json")
    short, long = json.loads(done.stdout)["models"]
    for judged, folder in ((short, trained[0]), (long, trained[1])):
        assert judged["model"] == str(folder)
        assert judged["metrics"] == pytest.approx(metrics(folder)[-1]["validation"], rel=1e-6)
    assert long["metrics"]["loss"] < short["metrics"]["loss"]
    table = done.stderr.splitlines()
    assert any("model" in line and "bits per byte" in line for line in table)
    assert any(str(trained[1]) in line and f"{long['figures']['loss']:.4f}" in line for line in table)


@pytest.mark.slow
def test_figures_on_a_file_are_those_computed_with_transformers_alone(trained, tmp_path):
    """All of the file is judged, repeated lines too: loss, perplexity, accuracy and bits per byte computed anew."""
    (tmp_path / "text.txt").write_text(TEXT)
    folder = trained[1] / "model"
    options = ["data.sources.0.document=line", "train.precision=fp32"]  # as transformers computes below
    done = succeed("evaluate", folder, "--data", tmp_path / "text.txt", *options, "--json")
    (judged,) = json.loads(done.stdout)["models"]
    assert judged["documents"] == 40
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = [token for line in TEXT.splitlines() for token in [*tokenizer(line)["input_ids"], tokenizer.eos_token_id]]
    blocks = [ids[start : start + 33] for start in range(0, len(ids) - 32, 32)]
    blocks = torch.tensor([block for block in blocks if len(block) == 33])
    with torch.no_grad():
        logits = model(blocks[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten()).item()
    accuracy = (logits.argmax(-1) == blocks[:, 1:]).float().mean().item()
    size = sum(len(line.encode()) for line in TEXT.splitlines())
    assert judged["samples"] == len(blocks)
    assert judged["metrics"] == pytest.approx(
        {"loss": loss, "perplexity": math.exp(loss), "accuracy": accuracy,
         "bits_per_byte": loss * len(ids) / size / math.log(2)}, rel=1e-5,
    )  # fmt: skip


@pytest.mark.long
def test_data_of_another_run_leaves_that_runs_folder_alone(trained):
    listed = trained[1] / "rejected.jsonl"
    listed.write_text("{}\n")  # of an earlier start
    before = {path: path.stat().st_mtime_ns for path in trained[1].rglob("*")}
    succeed("evaluate", trained[0] / "model", "--data", trained[1])
    assert {path: path.stat().st_mtime_ns for path in trained[1].rglob("*")} == before
    listed.unlink()


@pytest.mark.processes
def test_tasks_of_the_harness_run_on_files_of_your_own(trained, tmp_path):
    """A multiple-choice task made of two lines; the harness's own results come out as JSON."""
    lines = [{"question": f"Count: one, two, three, {word}", "choices": [" four.", " river."], "answer": 0}
             for word in ("", "and")]  # fmt: skip
    (tmp_path / "counting.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "counting.yaml").write_text(
        f"task: counting\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/counting.jsonl}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\n"
        "doc_to_target: answer\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    done = succeed("evaluate", trained[1], "--tasks", "counting", "--task-folder", tmp_path, "--json",
                 env={"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")})  # fmt: skip
    results = json.loads(done.stdout)["models"][str(trained[1])]
    assert results["n-samples"]["counting"]["effective"] == 2
    assert results["results"]["counting"]["acc,none"] in (0.0, 0.5, 1.0)
    assert "the harness has no task 'cuonting'" in refused("evaluate", trained[1], "--tasks", "cuonting").stderr


@pytest.mark.slow
def test_what_cannot_be_judged_is_said(trained, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    cases = [
        ([trained[0] / "model"], "has no validation split", "--data FILE"),
        ([trained[0], "--data", tmp_path / "nowhere.txt"], "there is no file", "nowhere.txt"),
        ([trained[0], trained[1], "--predictions", tmp_path / "a.json"], "--predictions", "one model"),
        ([trained[0], "--predictions", tmp_path / "a.json"], "--predictions", "is not a question-answering model"),
        ([tmp_path / "text.txt", "--data", tmp_path / "text.txt"], "is a file, not a run", ""),
        (["data.block=3"], "MODEL: missing", "artel evaluate"),
    ]
    for arguments, *says in cases:
        done = refused("evaluate", *arguments)
        assert all(text in done.stderr for text in says), done.stderr
        assert "Traceback" not in done.stderr
