"""The loop: one loss however the batch is cut, resume bit for bit, signals, NaN, the saved model."""

import json
import random
import signal

import pytest
import torch

from support import WORKERS
from support.runs import (
    artel,
    assert_same_models,
    largest_difference,
    losses,
    metrics,
    refused,
    start,
    succeed,
    torchrun,
    train_with_kills,
    wait_for_step,
    write_run,
)
from support.sockets import free_ports
from support.waiting import LIMIT

CASES = WORKERS / "train_cases.py"


@pytest.mark.ci
@pytest.mark.processes
def test_same_losses_and_gradient_norms_however_the_batch_is_cut(tmp_path):
    """Global batch 64 on 1, 2 and 4 processes, accumulation 1 and 4, SGD and AdamW: 1e-5 relative."""
    results = {}
    for processes in (1, 2, 4):
        files = []
        for optimizer in ("sgd", "adamw"):
            for accumulation in (1, 4):
                train = {"optimizer": optimizer, "learning_rate": 0.1 if optimizer == "sgd" else 1e-3,
                         "micro_batch": 64 // processes // accumulation}  # fmt: skip
                files.append(write_run(tmp_path / f"{processes}-{optimizer}-{accumulation}.yaml", train=train))
        done = torchrun(processes, CASES, *files)
        assert done.returncode == 0, done.stderr[-3000:]
        for file in files:
            results[file.stem] = losses(file.with_suffix(""))
    for optimizer in ("sgd", "adamw"):
        reference = results[f"1-{optimizer}-1"]
        assert len(reference) == 6
        assert reference[6][0] < reference[1][0]  # it learns, so equal losses mean equal updates
        for name, other in results.items():
            if optimizer in name:
                assert largest_difference(reference, other) < 1e-5, name


@pytest.mark.ci
@pytest.mark.processes
def test_a_batch_that_no_number_of_processes_divides(tmp_path):
    """7 rows on 1 and on 3 processes, the last step shorter: padding rows change nothing, none is skipped."""
    train = {"steps": None, "epochs": 0.2, "batch": 7, "micro_batch": 2}
    one, three = (write_run(tmp_path / f"{name}.yaml", train=train) for name in ("one", "three"))
    succeed("train", one)
    done = torchrun(3, "-m", "artel", "train", three, "--json")  # as users of torchrun start it
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["steps"] == max(losses(one.with_suffix("")))
    assert largest_difference(losses(one.with_suffix("")), losses(three.with_suffix(""))) < 1e-5


@pytest.mark.ci
@pytest.mark.processes
def test_killed_at_five_random_steps_ends_bit_equal(tmp_path):
    changes = {"train": {"steps": 60, "batch": 16}, "checkpoint": {"every": 4},
               "model": {"config": {"resid_pdrop": 0.1}}}  # fmt: skip  # dropout too must come back the same
    whole = write_run(tmp_path / "whole.yaml", **changes)
    succeed("train", whole)
    broken = write_run(tmp_path / "broken.yaml", **changes)
    done = train_with_kills(broken, random.Random(5).sample(range(3, 56), 5))
    assert json.loads(done.stdout)["steps"] == 60
    assert_same_models(whole, broken)
    assert losses(whole.with_suffix("")) == losses(broken.with_suffix(""))


@pytest.mark.ci
@pytest.mark.processes
def test_stopped_and_resumed_on_another_number_of_processes(tmp_path):
    """SIGTERM saves and exits 130; two processes go on with the same blocks: losses within 1e-5."""
    changes = {"train": {"steps": 40, "batch": 16}}
    whole = write_run(tmp_path / "whole.yaml", **changes)
    succeed("train", whole)
    broken = write_run(tmp_path / "broken.yaml", **changes)
    folder = broken.with_suffix("")
    process = start("train", broken)
    wait_for_step(process, folder, 10)
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, output
    assert "stopped and saved after step" in output
    done = succeed("train", broken, "--nproc", "2", "--json")
    assert json.loads(done.stdout)["steps"] == 40
    assert largest_difference(losses(whole.with_suffix("")), losses(folder)) < 1e-5


@pytest.mark.processes
def test_two_hosts_meet_by_address_and_port(tmp_path):
    """One process on each of two "hosts" (here on loopback), the second by MASTER_ADDR and MASTER_PORT."""
    one, two = (write_run(tmp_path / f"{name}.yaml") for name in ("one", "two"))
    succeed("train", one)
    port = str(free_ports(1)[0])
    first = start("train", two, "--nnodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", port)
    environment = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    second = artel("train", two, env=environment)
    _, output = first.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0), output + second.stderr
    assert "2 processes" in output
    assert largest_difference(losses(one.with_suffix("")), losses(two.with_suffix(""))) < 1e-5


@pytest.mark.ci
@pytest.mark.processes
def test_ctrl_c_on_two_processes_saves_and_exits_130(tmp_path):
    run = write_run(tmp_path / "run.yaml", train={"steps": 5000, "batch": 16})
    process = start("train", run, "--nproc", "2")
    wait_for_step(process, run.with_suffix(""), 5)
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, output
    assert output.count("; press Ctrl-C again to stop at once and ") == 1, output  # by the first process alone
    step = max(losses(run.with_suffix("")))
    assert (run.with_suffix("") / "checkpoints" / "latest").resolve().name == f"step-{step:09d}"


@pytest.mark.processes
@pytest.mark.ci
@pytest.mark.parametrize(("number", "words"), [(signal.SIGINT, ()), (signal.SIGTERM, ("--nproc", 2))])
def test_a_signal_before_the_first_step_says_what_is_kept(tmp_path, number, words):
    run = write_run(tmp_path / "run.yaml")
    process = start("train", run, *words)
    read = []
    while not (read and read[-1].startswith("starting to train")):
        read.append(process.stderr.readline())
        assert read[-1], read
    process.send_signal(number)
    _, rest = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, rest
    kept = "no checkpoint is written yet: the same command starts again, with the text prepared so far"
    assert rest.endswith(f"artel: {'stopped' if words else 'interrupted'}\n    {kept}\n")
    assert rest.count("artel: ") == 1
    done = succeed("train", run)
    assert "(made before)" in done.stderr


@pytest.mark.slow
def test_the_saved_model_is_the_trained_one(tmp_path):
    """RUN/model opens with transformers and gives artel's own logits; validation figures hang together."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from artel.inference import open_model

    run = write_run(tmp_path / "run.yaml", validate={"prompts": ["The"], "new_tokens": 5})
    done = succeed("train", run, "--json")
    result = json.loads(done.stdout)
    assert result.keys() == {
        "run", "steps", "model_step", "tokens", "train_loss", "validation", "tokens_per_second", "wall_seconds",
        "peak_memory_gib",
    }  # fmt: skip
    assert result["tokens"] == 6 * 64 * 32
    assert result["validation"]["perplexity"] == pytest.approx(2.718281828 ** result["validation"]["loss"], rel=1e-6)
    folder = run.with_suffix("")
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder / "model")("The quick brown")["input_ids"]])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder / "model").eval()(ids).logits
        ours = open_model(str(folder)).model.eval()(ids).logits
    assert torch.equal(theirs, ours)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in samples] == [(0, "The"), (6, "The")]
    again = succeed("train", run, "--json")
    assert "is complete" in again.stderr
    assert json.loads(again.stdout) == result


@pytest.mark.slow
def test_a_changed_run_file_is_refused_with_the_difference(tmp_path):
    run = write_run(tmp_path / "run.yaml")
    succeed("train", run)
    done = refused("train", run, "train.learning_rate=0.5", "data.block=16")
    assert "train.learning_rate: 0.001 -> 0.5" in done.stderr
    assert "data.block: 32 -> 16" in done.stderr
    assert "--restart" in done.stderr
    succeed("train", run, "train.learning_rate=0.5", "--restart")
    assert metrics(run.with_suffix(""))[0]["step"] == 1


def test_nan_stops_the_run_and_names_step_and_documents(tmp_path):
    wild = {"optimizer": "sgd", "learning_rate": 1000, "clip": None, "warmup": 0, "batch": 2}
    run = write_run(tmp_path / "run.yaml", train=wild)
    done = artel("train", run)
    assert done.returncode == 1
    assert "step 2" in done.stderr or "step 3" in done.stderr
    assert "NaN or infinite" in done.stderr
    assert "dummy" in done.stderr  # the origin of its documents
    assert not (run.with_suffix("") / "model").exists()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "roberta", "mistral"])
def test_other_architectures_train_from_scratch(tmp_path, model_type):
    from artel.config import Overrides, load_run
    from artel.parallel import World
    from artel.preparing import prepare
    from artel.training.loop import train

    config = {"model_type": model_type, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 64}  # fmt: skip
    config |= {"is_decoder": True} if model_type == "roberta" else {"num_key_value_heads": 2, "head_dim": 8}
    file = write_run(tmp_path / "run.yaml", model=None, train={"learning_rate": 1e-2})
    run = load_run(str(file), Overrides.parse([f"model.config={json.dumps(config)}"]))
    result = train(run, prepare(run), World(0, 1, 0, torch.device("cpu")))
    by_step = losses(file.with_suffix(""))
    assert by_step[6][0] < by_step[1][0]
    assert result["validation"]["loss"] < by_step[1][0]


def test_muon_learns(tmp_path):
    run = write_run(tmp_path / "run.yaml", train={"optimizer": "muon", "steps": 12}, checkpoint={"every": 6})
    succeed("train", run)
    by_step = losses(run.with_suffix(""))
    assert by_step[12][0] < by_step[1][0] - 0.3
