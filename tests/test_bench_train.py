"""`artel bench train`: all contestants do the same work and are reported alike; their speed is not tested."""

import io
import json
import os
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from artel.diagnostics.bench.training import Settings, Work, measure_train
from artel.diagnostics.bench.training.contestant import Turns
from artel.diagnostics.bench.training.inputs import make, read_model
from artel.errors import InputError
from support.runs import artel

ROOT = Path(__file__).parents[1]

TRAINER = f"{ROOT}/benchmarks/peers/trainer.py:"
TINY = "{model_type: gpt2, n_layer: 2, n_embd: 32, n_head: 2, vocab_size: 320}"
TINY_ENCODER = (
    "{model_type: roberta, num_hidden_layers: 2, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64, "
    "vocab_size: 320}"
)

PEERS = """
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

def plain(work, after_step):
    print("what a library says")
    model = AutoModelForCausalLM.from_pretrained(work.model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=work.learning_rate, betas=work.betas, eps=work.epsilon, weight_decay=work.weight_decay
    )
    step = 0
    while True:
        inputs, targets = work.batch_of(step)
        loss = cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad()
        after_step(loss)
        step += 1

def broken(work, after_step):
    after_step(1.0)
    raise RuntimeError("out of luck")

def dead(work, after_step):
    import os
    os._exit(7)
"""


def bench(folder, *arguments, status=0):
    (folder / "peers.py").write_text(PEERS)
    # One thread and nothing compiled: cores are shared with other tests, and compiling takes longer than they do.
    env = {"ARTEL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = artel("bench", "train", "--json", *arguments, env=env, cwd=folder)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    if status:
        return done.stderr
    assert not list((folder / "cache" / "bench").iterdir())  # it leaves nothing
    told = json.loads(done.stdout)
    for name in told["contestants"]:
        assert f"\n{name} " in done.stderr
    return told


@pytest.mark.processes
def test_all_do_the_same_work_in_turns(tmp_path):
    options = ("--model", TINY, "--batch", 4, "--length", 16, "--steps", 2, "--rounds", 2, "--precision", "fp32")
    names = ["artel", TRAINER + "default", TRAINER + "tuned", "peers:plain"]
    told = bench(tmp_path, *options, *(word for name in names[1:] for word in ("--peer", name)))
    assert list(told["contestants"]) == names
    for name, found in told["contestants"].items():
        assert found["steps_of_rounds"] == [2, 2], name
        assert found["tokens_per_second"] == statistics.median(found["tokens_per_second_of_rounds"]) > 0
        assert found["peak_memory_gib"] > 0.05
        assert found["first_step_seconds"] > found["compile_seconds"] == 0
        assert (found["mfu"], found["peak_flops"]) == (None, None)  # of a CPU
    assert told["contestants"][TRAINER + "tuned"]["precision"] == "bf16"
    assert set(told["ratio_to_peers"]) == set(names[1:])
    for name, ratio in told["ratio_to_peers"].items():
        rates = [told["contestants"][each]["tokens_per_second"] for each in ("artel", name)]
        assert ratio == pytest.approx(rates[0] / rates[1])
    losses = told["loss_after"]
    assert losses["step"] == 1 + 2 + 2 * 2
    for name in (TRAINER + "default", "peers:plain"):
        assert losses[name] == pytest.approx(losses["artel"], abs=2e-6), name
    assert losses[TRAINER + "tuned"] == pytest.approx(losses["artel"], abs=2e-3)
    assert told["model"] == {"model_type": "gpt2", "parameters": 320 * 32 + 16 * 32 + 2 * (12 * 32**2 + 13 * 32) + 64}
    assert told["flops_a_token"] > 6 * 320 * 32
    assert told["device"] == "cpu"
    assert set(told["definitions"]) >= {"tokens_per_second", "mfu", "ratio_to_peers", "loss_after"}


@pytest.mark.processes
def test_masked_with_too_little_time_and_peers_that_fail(tmp_path):
    """A batch that Trainer cuts in two; who takes longer than the limit for a step is measured on one."""
    options = ("--objective", "masked", "--precision", "fp32", "--model", TINY_ENCODER, "--batch", 12, "--length", 16)
    names = [TRAINER + "default", "peers:broken", "peers:dead"]
    peers = [word for name in (*names, "peers:plain") for word in ("--peer", name)]
    only = ("--steps", 5, "--only", ", ".join(["artel", *names]))
    told = bench(tmp_path, *options, *peers, *only, "--rounds", 3, "--time-limit", 0)
    for name in ("artel", TRAINER + "default"):
        assert told["contestants"][name]["steps_of_rounds"] == [1], name
    assert told["contestants"]["peers:broken"] == {"tokens_per_second": None, "why": "RuntimeError: out of luck"}
    assert "7" in told["contestants"]["peers:dead"]["why"]
    assert set(told["ratio_to_peers"]) == set(names)
    assert told["ratio_to_peers"]["peers:dead"] is None
    losses = told["loss_after"]
    assert losses["step"] == 2
    assert losses[TRAINER + "default"] == pytest.approx(losses["artel"], abs=2e-6)


@pytest.mark.processes
def test_wrong_options_are_told_together(tmp_path, monkeypatch):
    told = bench(tmp_path, "--objective", "both", "--only", "artel,others", "--optimizer", "muon", status=2)
    assert all(text in told for text in ("--objective: there is no 'both'", "--only: there is no contestant others",
                                         "--optimizer: there is no 'muon'"))  # fmt: skip
    assert "write one of: causal, masked" in told
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    device = "cpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(InputError) as raised:
        measure_train(
            Settings(
                model="{model_type: gpt2, layers: 2}", precision="half", device=device,
                peers=("peers", "peers:none", "nowhere:train", "peers:torch"),
            ),
            lambda _: None,
        )  # fmt: skip
    found = str(raised.value)
    assert "--model.layers: gpt2 has no such key" in found
    assert "--precision: there is no 'half'" in found
    assert "--peer: 'peers' names no function" in found
    assert "--peer: peers:none cannot be imported: AttributeError" in found
    assert "--peer: nowhere:train cannot be imported: ModuleNotFoundError" in found
    assert "--peer: peers:torch is no function" in found
    if device == "cuda":
        assert "--device: PyTorch finds no GPU here" in found
    long = Settings(model="{model_type: gpt2, n_positions: 64}", length=128, device="cpu")
    with pytest.raises(InputError, match=r"--length: 128 tokens .*\n.*write --length 64 or less"):
        measure_train(long, lambda _: None)
    if device == "cuda":
        with pytest.raises(InputError, match="--precision: fp8 needs a GPU"):
            measure_train(Settings(precision="fp8"), lambda _: None)


def test_models_are_read_from_files_and_words(tmp_path):
    given = {"model_type": "gpt2", "n_layer": 1, "attn_pdrop": 0.2, "n_ctx": 512, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps({**given, "architectures": ["GPT2LMHeadModel"]}))
    for name in (tmp_path, tmp_path / "config.json"):  # a key of an earlier transformers is passed over
        found = read_model(str(name), "causal")
        assert {key: found[key] for key in ("n_layer", "attn_pdrop", "resid_pdrop", "embd_pdrop")} == {
            "n_layer": 1, "attn_pdrop": 0.2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        }  # fmt: skip
        assert not {"n_ctx", "torch_dtype", "architectures"} & set(found)
    (tmp_path / "model.yaml").write_text("model_type: bert\nnum_hidden_layers: 1\n")
    assert read_model(str(tmp_path / "model.yaml"), "masked")["hidden_dropout_prob"] == 0.0
    wrong = {
        "{model_type: gpt2": "cannot be read",
        str(tmp_path / "none.yaml"): "cannot be read",
        "[1]": "cannot be read",
        "{n_layer: 2}": "has no model_type",
        "{model_type: gtp2}": "did you mean gpt2",
        "{model_type: gpt2, n_ctx: 512}": "gpt2 has no such key",
        "{model_type: roberta-x}": "transformers knows no",
    }
    for name, message in wrong.items():
        with pytest.raises(InputError, match=message) as raised:
            read_model(name, "causal")
        assert "--model" in str(raised.value)
    with pytest.raises(InputError, match="gpt2 has no head for masked tokens"):
        read_model("{model_type: gpt2}", "masked")


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_rows_are_those_of_artels_order(tmp_path, objective):
    """What peers are given: as many rows as steps take, each of another part of the store, no special token learned."""
    work = Work(str(tmp_path), objective, 3, 16, "cpu", "fp32", "adamw", 1)
    given = TINY_ENCODER[:-1] + ", pad_token_id: 0}" if objective == "masked" else TINY
    made = make(work, read_model(given, objective), steps=4)
    assert made.config.vocab_size == 320
    assert work.inputs.shape == work.targets.shape == (12, 16)
    assert len({row.tobytes() for row in work.inputs}) == 12
    inputs, targets = work.batch_of(2)
    assert torch.equal(inputs, torch.from_numpy(np.array(work.inputs[6:9], dtype=np.int64)))
    assert made.targets == int((work.batch_of(0)[1] != -100).sum())
    if objective == "causal":
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    else:
        assert (targets != -100).sum(dim=1).tolist() == [round(0.15 * 14)] * 3
        assert not (inputs == 0).any()  # no padding


def test_turns():
    """The first step is a turn; then as many as asked for, or up to the limit, one at least."""
    commands = io.StringIO("".join(json.dumps({"steps": 3, "seconds": limit}) + "\n" for limit in (60.0, 0.0, 60.0)))
    answers = io.StringIO()
    turns = Turns(commands, answers, "cpu")
    for step in range(5):
        turns(torch.tensor(float(step), requires_grad=True) if step % 2 else step)
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [turn["losses"] for turn in found] == [[0], [1, 2, 3], [4]]
    assert all(turn["seconds"] >= 0 and turn["peak_memory"] > 10**7 for turn in found)


def test_a_process_whose_parent_is_gone_ends():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        Turns(io.StringIO(""), os.fdopen(write, "w"), "cpu")(0.0)
        os._exit(1)
    os.close(write)
    with os.fdopen(read) as answers:
        assert json.loads(answers.readline())["losses"] == [0.0]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
