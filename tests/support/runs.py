"""Running artel as its users do: as a process, with a time limit."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
import zstandard

from support.forks import run_forked
from support.waiting import LIMIT, wait_until

# It lies beside the environment (see the Makefile): once it is installed, accelerate imports it to save any model.
DEEPSPEED = Path(sys.prefix) / "deepspeed"
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}

# A GPT-2 small enough for a step of a few milliseconds, without dropout, on synthetic documents of unequal length.
TINY = {
    "data": {"sources": [{"format": "dummy", "documents": 300}], "validation": 0.1, "block": 32},
    "tokenizer": {"train": {"vocab": 400}},
    "model": {
        "config": {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2,
                   "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    },
    # One thread: on cores that other tests share, two wait for one another longer than such small sums take.
    "train": {"steps": 6, "batch": 64, "learning_rate": 1e-3, "warmup": 2, "compile": "off", "precision": "fp32",
              "threads": 1},
    "log": {"every": 1},
    "track": ["jsonl"],
}  # fmt: skip


def merged(base: dict, changes: dict) -> dict:
    """`changes` laid over `base`, section by section; the keys of another model's type are not kept."""
    if base.get("model_type") != changes.get("model_type", base.get("model_type")):
        return changes
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return result


# Its text and its tokenizer alone: of a run that says more, `artel prepare` checks the model in a process beside.
TEXT_ALONE = {"data": {name: TINY["data"][name] for name in ("sources", "validation")}, "tokenizer": TINY["tokenizer"]}


def write_run(path: Path, base: dict = TINY, **changes) -> Path:
    """A run file TINY + changes; its run folder and stores lie beside it, by relative paths in the working folder."""
    folder = Path() if path.parent == Path.cwd() else path.parent
    run = merged(base, {"run": str(folder / path.stem), "data": {"store": str(folder / "stores")}})
    path.write_text(yaml.safe_dump(merged(run, changes), allow_unicode=True))
    return path


# What artel reads while it works. Other variables may be read while modules are imported.
READ_LATE = {"ARTEL_CACHE", "LLAMA_CPP", "RANK", "WORLD_SIZE"}


def artel(
    *arguments: str, timeout: float = LIMIT, env: dict | None = None, cwd: Path | None = None, input: str = ""
) -> subprocess.CompletedProcess:
    """Run the command and wait; its output is captured as text.

    It is forked off a process that has imported what it needs (forks.py). It gets a process of its own where variables
    are set that its imports may read, or where it measures itself.
    """
    environment = {**ENVIRONMENT, **(env or {})}
    if {*(env or {})} <= READ_LATE and arguments[0] not in ("hardware", "doctor"):
        return run_forked(list(map(str, arguments)), environment, timeout, cwd, input)
    return subprocess.run(
        [sys.executable, "-m", "artel", *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, env=environment, cwd=cwd, input=input,
    )  # fmt: skip


def succeed(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run the command, as `artel` does; the test fails with its standard error where its status is not 0."""
    done = artel(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


def refused(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run the command, as `artel` does; the test fails where its status is not 2."""
    done = artel(*arguments, **options)
    assert done.returncode == 2, done.stderr
    return done


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of `size` bytes (`4m`) at `folder`; the test is skipped where that needs rights that it has not."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def start(*arguments: str) -> subprocess.Popen:
    """Start the command in a session of its own, so that it can be ended with all it started."""
    command = [sys.executable, "-m", "artel", *map(str, arguments)]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def torchrun(processes: int, *arguments: str, timeout: float = LIMIT, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT | env
    )


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_rollouts(folder: Path) -> list[list[dict]]:
    """The answers of each round."""
    files = sorted((folder / "rollouts").iterdir())
    lines = [zstandard.ZstdDecompressor().decompress(file.read_bytes()).splitlines() for file in files]
    return [[json.loads(line) for line in round_lines] for round_lines in lines]


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by step."""
    return {line["step"]: (line["loss"], line["gradient_norm"]) for line in metrics(folder) if "loss" in line}


def largest_difference(one: dict, other: dict) -> float:
    """The largest relative difference of loss or gradient norm; the steps must be the same."""
    assert one.keys() == other.keys()
    return max(abs(a - b) / abs(a) for step in one for a, b in zip(one[step], other[step], strict=True))


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    """Until the run has logged `step`."""
    file = folder / "metrics.jsonl"

    def reached():
        return file.exists() and file.read_bytes().count(b'"loss"') >= step

    wait_until(lambda: reached() or process.poll() is not None, lambda: f"step {step}")
    assert reached(), f"step {step} was not reached: {process.communicate()[1]}"


def assert_same_models(*files: Path) -> None:
    """Fail unless runs ended with the same weights, bit for bit; by their run files."""
    from safetensors.torch import load_file

    one, *others = (load_file(file.with_suffix("") / "model" / "model.safetensors") for file in files)
    for other in others:
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)


def train_with_kills(file: Path, steps: list[int]) -> subprocess.CompletedProcess:
    """Start a run, kill it at each of these steps, and let it end."""
    for step in sorted(steps):
        process = start("train", file)
        wait_for_step(process, file.with_suffix(""), step)
        kill(process)
    done = succeed("train", file, "--json")
    assert "resuming from step" in done.stderr
    return done


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to the process and all it started in its session."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def roberta_of_2019(folder: Path, source: Path) -> dict:
    """A tiny RoBERTa as it came out: config.json without a model type, vocab.json, merges.txt, pytorch_model.bin.

    `source` holds the real vocabulary and configuration. The weights by name.
    """
    import torch
    from transformers import RobertaConfig, RobertaForMaskedLM

    folder.mkdir()
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes((source / name).read_bytes())
    config = json.loads((source / "config.json").read_text())
    assert "model_type" not in config
    config |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
               "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = RobertaForMaskedLM(RobertaConfig(**config)).state_dict()
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


def workers_of(launcher):
    """Process ids of what this launcher has started, by rank."""
    results = {}
    for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        rank = re.search(rb"\0RANK=(\d+)\0", b"\0" + Path(f"/proc/{child}/environ").read_bytes())
        if rank:
            results[int(rank[1])] = int(child)
    return results


def end(launcher, *workers):
    """Whatever a test that failed has left."""
    for number in (launcher.pid, *workers):
        with suppress(ProcessLookupError):
            os.killpg(number, signal.SIGKILL)
    launcher.wait()
