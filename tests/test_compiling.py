"""Compiled layers: the same numbers, and a run that goes on where they cannot be compiled."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from artel.models.compile import OFF, compile_choice, compile_layers, try_compiled
from artel.models.loss import model_losses
from support.runs import artel, succeed, write_run
from support.waiting import LIMIT, wait_until

CPU = torch.device("cpu")


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_compiled_run_ends_as_one_that_is_not(tmp_path):
    ended = {}
    for name in ("on", "off"):
        run = write_run(tmp_path / f"{name}.yaml", train={"steps": 4, "batch": 4, "compile": name})
        done = succeed("train", run, "--json")
        assert ("compiled: layers" in done.stderr) == (name == "on")
        assert "cannot be compiled" not in done.stderr
        ended[name] = json.loads(done.stdout)["train_loss"]
    assert ended["on"] == pytest.approx(ended["off"], rel=1e-5)


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_signal_while_layers_compile_ends_the_run_before_its_first_step(tmp_path):
    """It once took effect after the compilation and a step: two minutes on a busy machine."""
    run = write_run(tmp_path / "run.yaml", train={"compile": "on"})
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    command = [sys.executable, "-m", "artel", "train", str(run)]
    log = tmp_path / "log"
    with log.open("w") as stream, subprocess.Popen(command, stderr=stream, env=environment) as process:
        wait_until(lambda: process.poll() is not None or "compiling the layers" in log.read_text())
        process.send_signal(signal.SIGTERM)
    output = log.read_text()
    assert process.returncode == 130
    assert "compiling the layers\nartel: stopped while compiling the layers\n    no checkpoint is written" in output
    assert not list(run.with_suffix("").glob("checkpoints/step-*"))
    done = artel("report", run.with_suffix(""))
    assert "stopped at step 0" in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_layers_that_cannot_be_compiled_run_uncompiled_with_the_reason():
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64))
    ids = torch.randint(64, (2, 8))
    compile_layers(model, fixed=True)

    steps = []

    def step():
        model_losses(model, {"input_ids": ids}, ids)[0].backward()
        steps.append(model.transformer.h[0]._compiled_call_impl is not None)

    def fails_when_compiled():
        if model.transformer.h[0]._compiled_call_impl is not None:
            raise RuntimeError("no")
        step()

    assert try_compiled(model, step, model.zero_grad) is None
    assert try_compiled(model, fails_when_compiled, model.zero_grad) == "no"
    assert steps == [True, False]


@pytest.mark.processes
def test_without_a_working_compiler_the_run_goes_on_and_says_why(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no compiler here >&2; exit 1\n")
    broken.chmod(0o755)
    run = write_run(tmp_path / "run.yaml", train={"steps": 2, "batch": 4, "compile": "on"})
    done = succeed("train", run, env={"CXX": str(broken), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert "the layers cannot be compiled and run uncompiled" in done.stderr
    assert (run.with_suffix("") / "model").is_dir()


def test_the_choice_has_its_reason(monkeypatch):
    assert compile_choice("off", CPU, 10_000).value == OFF
    assert compile_choice("on", CPU, 1).value == "layers"
    assert "half a minute" in compile_choice("auto", CPU, 10).why
    assert compile_choice("auto", torch.device("cuda"), 10).value == "layers"
    assert compile_choice("auto", torch.device("cuda"), 10, None, "int8").value == OFF
    monkeypatch.setenv("PATH", "")
    assert "no C++ compiler" in compile_choice("auto", CPU, 10_000).why


@pytest.mark.long
def test_ctrl_c_ends_no_compiler(tmp_path):
    """A terminal sends it to all processes; a library that was cut off stayed in PyTorch's cache for ever."""
    file = write_run(tmp_path / "run.yaml", train={"compile": "on", "precision": "auto"})
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"), "ARTEL_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "artel", "train", str(file)]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    lines = []
    for line in run.stderr:
        lines.append(line)
        if "compiling the layers" in line:
            wait_until(lambda: subprocess.run(["pgrep", "-g", str(run.pid), "cc1plus"]).returncode == 0)
            os.killpg(run.pid, signal.SIGINT)
    assert run.wait(LIMIT) == 130, lines
    again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert again.returncode == 0
    assert not [
        line for line in [*lines, *again.stderr.splitlines()] if "cannot be compiled" in line or "built" in line
    ]
