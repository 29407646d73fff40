"""Who starts the processes: artel itself with restarts and a rendezvous, accelerate, the launcher of deepspeed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from artel.config import Overrides, load_run
from artel.errors import InputError
from artel.launching.launcher_environment import accelerate_settings
from support.runs import ENVIRONMENT, end, largest_difference, losses, start, succeed, wait_for_step, write_run
from support.sockets import free_ports
from support.waiting import LIMIT, wait_until_gone

PROGRAMS = Path(sys.executable).parent


# What accelerate hands on -------------------------------------------------------------------------------------------

ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "machine_rank": 0,
              "num_machines": 1, "num_processes": 2, "mixed_precision": "no", "use_cpu": False,
              "main_process_port": 0, "main_training_function": "main", "debug": False}  # fmt: skip


def configured(folder, **changes):
    """A file as `accelerate config` writes it."""
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(ACCELERATE | changes))
    return file


def taken(folder, *overrides, **changes):
    """What is taken over of the environment that accelerate itself makes of such a file."""
    launching = pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils import launch as environments

    parser = launching.launch_command_parser()
    arguments = parser.parse_args(["--config_file", str(configured(folder, **changes)), "-m", "artel", "train"])
    arguments, defaults, _ = launching._validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, environment = environments.prepare_deepspeed_cmd_env(arguments)
    elif arguments.multi_gpu or arguments.use_fsdp or arguments.use_megatron_lm:
        environment = environments.prepare_multi_gpu_env(arguments)
    else:
        _, environment = environments.prepare_simple_launcher_cmd_env(arguments)
    with patch.dict(os.environ, environment, clear=True):
        takeover = accelerate_settings(load_run(str(write_run(folder / "run.yaml")), Overrides.parse([*overrides])))
        return takeover, dict(os.environ)


FSDP2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
         "fsdp_offload_params": False, "fsdp_activation_checkpointing": False}  # fmt: skip
FSDP1 = {"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True,
         "fsdp_activation_checkpointing": True}  # fmt: skip
AUTO = ("train.precision=auto",)


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({}, []),
        ({"mixed_precision": "bf16"}, ["train.precision=bf16"]),
        ({"distributed_type": "FSDP", "fsdp_config": FSDP2}, ["parallel.data=fsdp"]),
        ({"distributed_type": "FSDP", "fsdp_config": FSDP2 | {"fsdp_reshard_after_forward": False}},
         ["parallel.data=zero2"]),
        ({"distributed_type": "FSDP", "fsdp_config": FSDP1},
         ["parallel.data=zero2", "parallel.offload=cpu", "train.activation_checkpointing=full"]),
        ({"distributed_type": "FSDP", "fsdp_config": FSDP2, "parallelism_config": {
            "parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4,
            "parallelism_config_tp_size": 2, "parallelism_config_cp_size": 1, "parallelism_config_sp_size": 1}},
         ["parallel.tensor=2", "parallel.data=hsdp", "parallel.shard=4"]),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
         ["parallel.deepspeed=ds.json"]),
        ({"distributed_type": "DEEPSPEED", "mixed_precision": "fp16", "deepspeed_config": {
            "zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none"}},
         ["train.precision=fp16", "parallel.data=fsdp", "parallel.offload=cpu"]),
    ],
)  # fmt: skip
def test_accelerates_configuration_is_taken_over(tmp_path, changes, overrides):
    result, _ = taken(tmp_path, *AUTO, **changes)
    assert result.overrides == overrides
    assert [line for line in result.notes if "as configured in accelerate" in line] == [
        f"{line}, as configured in accelerate" for line in overrides
    ]


def test_the_run_file_goes_before_accelerates_configuration(tmp_path):
    result, _ = taken(tmp_path, "train.precision=fp32", "parallel.data=ddp", mixed_precision="bf16",
                     distributed_type="FSDP", fsdp_config=FSDP2)  # fmt: skip
    assert result.overrides == []
    assert result.notes == [
        "accelerate sets train.precision=bf16, but the run file fp32, which takes precedence",
        "accelerate sets parallel.data=fsdp, but the run file ddp, which takes precedence",
    ]


def test_what_artel_has_not_is_refused(tmp_path):
    nvme = {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_param_device": "cpu"}
    with pytest.raises(InputError, match=r"NVMe needs DeepSpeed.*\n.*parallel\.deepspeed: ds_config\.json"):
        taken(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=nvme)
    with pytest.raises(InputError, match=r"Megatron-LM(.|\n)*parallel\.tensor and parallel\.pipeline"):
        taken(tmp_path, distributed_type="MEGATRON_LM", megatron_lm_config={"megatron_lm_tp_degree": 2})


def test_accelerate_on_a_cpu(tmp_path):
    result, environment = taken(tmp_path, distributed_type="MULTI_CPU", use_cpu=True)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "accelerate has started one process" in result.notes[0]


def test_the_ddp_section_of_accelerates_users_is_understood(tmp_path):
    """In a run file; those of impruver are in test_impruver.py."""
    run = write_run(tmp_path / "run.yaml")
    text = run.read_text()
    run.write_text(text + "ddp: {ddp_find_unused_parameters: false}\n")
    assert load_run(str(run)) == load_run(str(write_run(tmp_path / "run.yaml")))
    for section, message in (("{ddp_find_unused_parameters: true}", "write false, or remove it"),
                          ("{ddp_backend: gloo}", "ddp.ddp_backend: is not a key of a run file"),
                          ("7", "is not a section")):  # fmt: skip
        run.write_text(f"{text}ddp: {section}\n")
        with pytest.raises(InputError, match=message):
            load_run(str(run))


# Processes ----------------------------------------------------------------------------------------------------------


# Long enough to be killed in the middle. SGD: AdamW makes much of the last bit of a sum in so many steps.
STEADY = {"train": {"steps": 150, "optimizer": "sgd", "learning_rate": 1e-2}, "checkpoint": {"every": 2}}

UNSAVED = "checkpoint.every=never"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(loss, gradient norm) by step of one process."""
    run = write_run(tmp_path_factory.mktemp("one") / "run.yaml", **STEADY)
    succeed("train", run)
    return losses(run.with_suffix(""))


def by(program, *arguments, **variables):
    command = [str(PROGRAMS / program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT | variables)


@pytest.mark.processes
def test_accelerate_launch(tmp_path, reference):
    pytest.importorskip("accelerate")
    run = write_run(tmp_path / "run.yaml", **STEADY)
    file = configured(tmp_path, distributed_type="FSDP", fsdp_config=FSDP2)
    done = by("accelerate", "launch", "--config_file", file, "-m", "artel", "train", run, UNSAVED)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("parallel.data=fsdp, as configured in accelerate") == 1
    assert "2 processes" in done.stderr
    assert largest_difference(reference, losses(tmp_path / "run")) < 1e-5


@pytest.mark.processes
def test_the_launcher_of_deepspeed(tmp_path, reference):
    beside = Path(sys.prefix) / "deepspeed"  # beside the environment: see the Makefile
    if not beside.is_dir():
        pytest.skip("deepspeed lies in no folder deepspeed of the environment")
    run = write_run(tmp_path / "run.yaml", **STEADY)
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                                "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 1}}))  # fmt: skip
    port = free_ports(1)[0]
    paths = os.pathsep.join([str(beside), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = by("python", "-m", "deepspeed.launcher.runner", "--num_gpus=2", f"--master_port={port}", "--module", "artel",
              "train", run, UNSAVED, "--deepspeed", file, PYTHONPATH=paths)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["parallel"]["deepspeed"] == str(file)
    assert "2 processes" in done.stderr
    assert largest_difference(reference, losses(tmp_path / "run")) < 1e-5


@pytest.mark.ci
@pytest.mark.processes
def test_two_launchers_meet_and_start_again_what_was_killed(tmp_path, reference):
    """As two hosts do, on one machine: whoever is there first holds the rendezvous and leads."""
    run = write_run(tmp_path / "run.yaml", **STEADY)
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    both = [start("train", run, "--nnodes", "2", "--rdzv-endpoint", endpoint, "--max-restarts", "1") for _ in range(2)]
    try:
        wait_for_step(both[0], tmp_path / "run", 4)
        os.kill(worker_of(both[1]), signal.SIGKILL)
        outputs = [process.communicate(timeout=LIMIT)[1] for process in both]
    finally:
        for process in both:
            end(process)
    assert [process.returncode for process in both] == [0, 0], outputs
    together = "".join(outputs)
    assert re.search(r"process \d on \S+: lost its peers: .*[Cc]onnection", together), together
    assert together.count("resuming from step") == 1
    assert largest_difference(reference, losses(tmp_path / "run")) < 1e-5


@pytest.mark.processes
def test_a_launcher_that_is_warned_or_killed_leaves_a_saved_run_and_no_process(tmp_path):
    run = write_run(tmp_path / "run.yaml", train={"steps": 100_000}, checkpoint={"every": "never"})
    for number, step in ((signal.SIGUSR1, 5), (signal.SIGKILL, 300)):
        launcher = start("train", run, "--max-restarts", "1")
        try:
            wait_for_step(launcher, tmp_path / "run", step)
            worker = worker_of(launcher)
            before = saved(tmp_path / "run")
            os.kill(launcher.pid, number)
            assert launcher.wait(LIMIT) == (130 if number == signal.SIGUSR1 else -signal.SIGKILL)
            wait_until_gone([worker])
            assert saved(tmp_path / "run") > before
        finally:
            end(launcher)


@pytest.mark.ci
@pytest.mark.processes
def test_a_process_that_failed_is_named(tmp_path):
    launcher = start("train", write_run(tmp_path / "run.yaml", **STEADY), "--nproc", "2")
    try:
        wait_for_step(launcher, tmp_path / "run", 4)
        os.kill(worker_of(launcher), signal.SIGKILL)
        _, output = launcher.communicate(timeout=LIMIT)
    finally:
        end(launcher)
    assert launcher.returncode == 1
    host = re.escape(socket.gethostname())
    assert re.search(rf"artel: process \d on {host}: was killed by SIGKILL\n.*uses too much memory", output), output


def worker_of(launcher):
    """The process id of a worker that this launcher has started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    workers = [int(child) for child in children if b"\0LOCAL_RANK=" in Path(f"/proc/{child}/environ").read_bytes()]
    return workers[0]


def saved(folder):
    """The newest step that is saved."""
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=0)


@pytest.mark.processes
def test_a_launcher_that_is_the_only_program_of_a_container(tmp_path):
    """It has process id 1 there, as the parent of who has lost its own has elsewhere."""
    contained = ["unshare", "--fork", "--pid", "--mount-proc"]
    if subprocess.run([*contained, "true"], capture_output=True).returncode:
        pytest.skip("a process namespace of one's own needs root")
    run = write_run(tmp_path / "run.yaml", parallel={"data": 2})
    command = [*contained, sys.executable, "-m", "artel", "train", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert len(losses(run.with_suffix(""))) == 6
