"""`artel doctor`: what is told of the machine, what is chosen and why, what is missing; and what is never told."""

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from artel.config import RunConfig, load_run
from artel.diagnostics.doctor import examine
from artel.diagnostics.machine_problems import machine_problems
from artel.diagnostics.software import environment
from artel.host import core_quota, memory
from artel.models.device import bf16_is_native
from artel.planning.machine import Disk, find_host_address
from support.runs import ENVIRONMENT, refused, write_run
from support.waiting import LIMIT

SOURCES = Path(__file__).parents[1] / "src"
CPU = torch.device("cpu")
MASKED = {"objective": "masked", "model": {"config": {"model_type": "roberta", "num_hidden_layers": 2,
          "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}}}  # fmt: skip

# Whoever opens a connection or asks for a name leaves a line in $NETWORK and fails.
NO_NETWORK = """
import os, socket
def refuse(*arguments, **more):
    with open(os.environ["NETWORK"], "a") as file:
        file.write(repr(arguments) + "\\n")
    raise OSError("no network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.gethostbyname = refuse
"""


@pytest.mark.processes
def test_it_tells_this_machine_and_no_secret_and_writes_and_asks_nothing(tmp_path):
    """Without HF_HUB_OFFLINE, for a model of the hub that is not here, and without a compiler on the PATH."""
    folders = {name: tmp_path / name for name in ("cache", "home", "temporary", "here", "network")}
    for folder in folders.values():
        folder.mkdir()
    (folders["network"] / "sitecustomize.py").write_text(NO_NETWORK)
    run = write_run(tmp_path / "run.yaml", model={"config": None, "from": "someone/model-that-is-not-here"},
                    tokenizer={"train": None})  # fmt: skip
    variables = {
        "ARTEL_CACHE": folders["cache"], "HOME": folders["home"], "TMPDIR": folders["temporary"],
        "HF_HOME": folders["cache"], "NETWORK": tmp_path / "asked", "PATH": folders["here"],
        "PYTHONPATH": f"{folders['network']}{os.pathsep}{SOURCES}", "CUDA_VISIBLE_DEVICES": "",
        "HF_TOKEN": "hf_sesame", "WANDB_API_KEY": "sesame", "AWS_SECRET_ACCESS_KEY": "sesame",
        "HTTPS_PROXY": "http://me:sesame@proxy:3128", "HF_ENDPOINT": "https://me:sesame@mirror",
        "OMP_NUM_THREADS": "3",
    }  # fmt: skip
    kept = {
        name: value
        for name, value in ENVIRONMENT.items()
        if name not in ("HF_HUB_OFFLINE", "TORCHINDUCTOR_CACHE_DIR", "CXX")
    }
    done = subprocess.run(
        [sys.executable, "-B", "-m", "artel", "doctor", run, "--json"],
        capture_output=True, text=True, timeout=LIMIT, cwd=folders["here"],
        env=kept | {name: str(value) for name, value in variables.items()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "sesame" not in done.stdout + done.stderr
    assert not (tmp_path / "asked").exists(), (tmp_path / "asked").read_text()
    assert [list(folders[name].iterdir()) for name in ("cache", "home", "temporary", "here")] == [[]] * 4
    assert not run.with_suffix("").exists()

    report = json.loads(done.stdout)
    assert report["environment"]["OMP_NUM_THREADS"] == "3"
    assert "HF_HUB_OFFLINE" not in report["environment"]  # artel sets it for itself: it is not the user's
    secret = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "HF_ENDPOINT")
    assert {report["environment"][name] for name in secret} == {"set"}
    assert report["machine"]["cores"]["usable"] == len(os.sched_getaffinity(0))
    assert report["machine"]["memory"]["total"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < report["machine"]["memory"]["free"] <= report["machine"]["memory"]["total"]
    assert report["machine"]["cache folder"]["folder"] == str(folders["cache"])
    assert report["machine"]["C++ compiler"] is None
    assert report["software"]["torch"]["version"] == version("torch")
    assert report["run"]["model"] is None
    assert "attention" not in report["choices"]
    assert report["choices"]["threads"]["value"] == "1"  # of the run file
    assert all(choice["value"] and choice["why"] for choice in report["choices"].values())
    assert all(problem["what"] and problem["fix"] for problem in report["warnings"])


@pytest.mark.processes
def test_an_extra_that_is_missing_is_told_with_the_command_that_installs_it(tmp_path):
    """Packages are seen through a folder of links in which one is left out."""
    links = tmp_path / "packages"
    links.mkdir()
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            if not entry.name.startswith(("peft", "fastokens")) and not (links / entry.name).is_symlink():
                (links / entry.name).symlink_to(entry)
    code = (
        f"import sys; sys.path[:0] = [{str(SOURCES)!r}, {str(links)!r}]; sys.argv = ['artel', 'doctor']\n"
        "from artel.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=LIMIT,
        env={name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = {line.strip().partition("  ")[0]: line for line in done.stdout.splitlines()}
    assert "peft is missing: pip install 'artel-lm[lora]'" in lines["extra lora"]
    assert "fastokens is missing" in lines["extra fast"]  # beside pysimdjson, where that has a wheel for this Python
    assert lines["extra fast"].endswith(": pip install 'artel-lm[fast]'")
    assert lines["text encoder"].split()[2] == "tokenizers"
    assert version("bitsandbytes") in lines["extra quantize"]  # the others of an extra are told too
    assert "peft is missing" in lines["extra quantize"]
    assert version("torch") in lines["torch"]


def test_a_wrong_run_is_a_mistake(tmp_path):
    run = write_run(tmp_path / "run.yaml", train={"optimiser": "adamw"})
    done = refused("doctor", run)
    assert "optimizer" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the choices of a machine without a GPU")
def test_choices_for_a_causal_and_for_a_masked_model(tmp_path):
    causal = examine(load_run(str(write_run(tmp_path / "causal.yaml", train={"compile": "auto"}))), {})
    masked = examine(load_run(str(write_run(tmp_path / "masked.yaml", **MASKED))), {})
    one, other = causal.to_json(), masked.to_json()
    assert one["run"]["model"]["class"] == "GPT2LMHeadModel"
    assert other["run"]["model"]["class"] == "RobertaForMaskedLM"
    assert "causal" in one["choices"]["attention"]["why"]
    assert "encoder" in other["choices"]["attention"]["why"]
    assert one["choices"]["compile"]["value"] == other["choices"]["compile"]["value"] == "off"
    assert "6 steps" in one["choices"]["compile"]["why"]
    assert other["choices"]["compile"]["why"] == "train.compile: off"
    assert one["choices"]["precision"] == {"value": "fp32", "why": "train.precision: fp32"}
    assert all(f"  {name}" in str(causal) for name in one["choices"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the choices of a machine without a GPU")
def test_without_a_run_the_defaults_are_told():
    report = examine(None, {"NCCL_DEBUG": "INFO"})
    values = report.to_json()
    assert "run" not in values
    assert values["choices"]["precision"]["value"] == ("bf16" if bf16_is_native(CPU) else "fp32")
    assert values["choices"]["optimizer"]["value"] == "adamw"
    assert values["environment"] == {"NCCL_DEBUG": "INFO"}
    assert "artel doctor RUN" in str(report)


def test_tokenizers_is_no_token_and_long_values_are_cut():
    variables = environment({"TOKENIZERS_PARALLELISM": "true", "HF_TOKEN": "", "TORCH_LOGS": "x" * 999, "EDITOR": "vi"})
    assert variables == {"HF_TOKEN": "empty", "TOKENIZERS_PARALLELISM": "true", "TORCH_LOGS": "x" * 200 + "…"}


def test_what_stands_in_the_way_is_told_with_a_remedy(tmp_path):
    run = RunConfig.model_validate({"train": {"precision": "bf16"}})
    disks = {
        "cache folder": Disk(tmp_path / "full", free=2**20, total=2**40, writable=True),
        "run folder": Disk(tmp_path / "closed", free=2**35, total=2**40, writable=False),
    }
    fixes = {(problem.where, problem.what): problem.fix for problem in machine_problems(run, CPU, [], disks, {})}
    problems = {where: what for where, what in fixes if where in ("cache folder", "run folder", "train.precision")}
    assert "only 0.0 GiB are free" in problems["cache folder"]
    assert "not writable" in problems["run folder"]
    assert ("train.precision" in problems) != bf16_is_native(CPU)
    assert all(fixes.values())


def group(folder, **files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_limits_of_the_control_group_count_also_of_those_around_it(tmp_path):
    """Version 2 as on a host of today, and version 1 as in older containers."""
    two, one = tmp_path / "two", tmp_path / "one"
    group(two / "pods" / "mine", cpu__max="max 100000\n", memory__max="max\n")
    (two / "pods" / "cpu.max").write_text("150000 100000\n")
    (two / "pods" / "memory.max").write_text(f"{2**30}\n")
    (two / "pods" / "memory.current").write_text(f"{2**29}\n")
    (two / "pods" / "memory.stat").write_text(f"anon 1\ninactive_file {2**28}\n")
    own = tmp_path / "own2"
    own.write_text("0::/pods/mine\n")
    assert core_quota(own, two) == 1.5
    assert (memory(own, two).limit, memory(own, two).free) == (2**30, 2**30 - 2**28)

    group(one / "cpu,cpuacct" / "docker", cpu__cfs_quota_us="400000\n", cpu__cfs_period_us="100000\n")
    group(one / "memory" / "docker", memory__limit_in_bytes=f"{2**31}\n", memory__usage_in_bytes="0\n")
    (one / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    own = tmp_path / "own1"
    own.write_text("4:memory:/docker\n3:cpu,cpuacct:/docker\n")
    assert core_quota(own, one) == 4
    assert memory(own, one).limit == 2**31

    own.write_text("0::/\n")
    assert core_quota(own, tmp_path / "nothing") is None
    assert memory(own, tmp_path / "nothing").limit is None


def test_where_the_hosts_file_leads(tmp_path):
    file = tmp_path / "hosts"
    name = os.uname().nodename
    file.write_text(f"127.0.0.1 localhost # {name}\n127.0.1.1 {name}.example.org {name}\n")
    assert find_host_address(file) == "127.0.1.1"
    file.write_text("127.0.0.1 localhost\n")
    assert find_host_address(file) is None
