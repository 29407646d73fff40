"""A run as a job of Slurm: the script, and with Slurm at hand (long) a real cluster of two nodes on this machine."""

import json
import os
import re
import subprocess
import sys

import pytest

from artel.config import LaunchConfig, Overrides, load_run
from artel.errors import InputError
from artel.launching.job import Job
from artel.launching.launcher_environment import first_host
from artel.launching.submit import find_launcher, make_job
from support import cluster_slurm
from support.runs import ENVIRONMENT, artel, largest_difference, losses, refused, succeed, write_run
from support.sockets import free_ports
from support.waiting import LIMIT, wait_until


def script_of(folder, *words, file="run.yaml", restarts=0, **launch):
    """The batch script of `artel train FILE WORDS…` with such a section `launch`."""
    config = LaunchConfig.model_validate({"to": "slurm", "max_restarts": restarts, **launch})
    return find_launcher(config).describe(Job(folder, ("train", file, *words), config))


def directives(script):
    return re.findall(r"^#SBATCH --(.*)$", script, re.MULTILINE)


def shell_reads(script):
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=LIMIT)
    return done.returncode == 0 and not done.stderr


@pytest.mark.parametrize("time", ["1:00:00", "1h", 3600, "0-01:00:00"])
def test_the_script_of_one_node(tmp_path, time):
    script = script_of(tmp_path / "runs" / "war", time=time)
    assert shell_reads(script)
    assert directives(script) == [
        "job-name=war", f"output={tmp_path}/runs/war/slurm-%j.log", "nodes=1", "ntasks-per-node=1", "time=1:00:00",
        "open-mode=append", "signal=B:USR1@120", "requeue",
    ]  # fmt: skip
    assert f"{sys.executable} -m artel train run.yaml --nproc 1 --max-restarts 0 --nnodes 1 &\n" in script
    assert "rdzv" not in script


def test_the_script_of_many_nodes(tmp_path):
    script = script_of(
        tmp_path, "data.sources.0.path=a b/$x.txt", nodes=4, gpus=8, cpus=64, queue="gpu", restarts=2,
        setup=["module load cuda"], slurm={"options": {"account": "nlp", "mem": "0", "signal": "B:USR1@300"}},
        environment={"NCCL_DEBUG": "WARN $x"}, memory="64GiB",
    )  # fmt: skip
    assert shell_reads(script)
    for line in ("nodes=4", "cpus-per-task=64", "gpus-per-node=8", "partition=gpu", "account=nlp", "mem=0",
                 "signal=B:USR1@300"):  # fmt: skip
        assert line in directives(script)
    lines = script.splitlines()
    assert lines.index("module load cuda") < next(i for i, line in enumerate(lines) if line.startswith("srun "))
    assert "export NCCL_DEBUG='WARN $x'" in lines
    step = next(line for line in lines if line.startswith("srun "))
    assert step.startswith("srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpus-per-task=64 ")
    assert " 'data.sources.0.path=a b/$x.txt' --nproc 8 --max-restarts 2 --nnodes 4 --rdzv-endpoint " in step
    assert step.endswith(' "$(hostname):$port" &')
    assert "mem=65536M" in directives(script_of(tmp_path, memory="64GiB"))


def test_a_secret_is_not_written_into_the_script(tmp_path):
    address = "data.sources.0.path=https://example.org/a.jsonl?token="
    with pytest.raises(InputError) as refused:
        make_job("run.yaml", Overrides.parse(["launch.to=slurm", f"{address}abc123"]), ())
    (problem,) = refused.value.problems
    assert "abc123" not in str(problem)
    assert "export NAME" in problem.fix
    assert f"'{address}${{TOKEN}}'" in script_of(tmp_path, f"{address}${{TOKEN}}")


BREAK = "x\n#SBATCH --uid=0\ntouch ran"


@pytest.mark.parametrize(
    ("launch", "folder", "key"),
    [
        ({"queue": BREAK}, "war", "launch.queue"),
        ({"slurm": {"options": {"account": "a\rb"}}}, "war", "launch.slurm.options"),
        ({"queue": 'gpu" --uid="0'}, "war", "launch.queue"),
        ({"slurm": {"options": {"account": "a\\"}}}, "war", "launch.slurm.options"),
        ({"slurm": {"options": {"qos": BREAK}}}, "war", "launch.slurm.options"),
        ({"slurm": {"options": {BREAK: "high"}}}, "war", "launch.slurm.options"),
        ({"slurm": {"options": {"qos --uid": "0"}}}, "war", "launch.slurm.options"),
        ({"setup": ["module load cuda", BREAK]}, "war", "launch.setup"),
        ({"environment": {"NAME": BREAK}}, "war", "launch.environment"),
        ({}, BREAK, "run"),
    ],
)
def test_nothing_adds_a_line_to_the_script(tmp_path, launch, folder, key):
    with pytest.raises(InputError) as refused:
        script_of(tmp_path / folder, **launch)
    assert {problem.where for problem in refused.value.problems} == {key}
    assert all("\n" not in problem.what and problem.fix for problem in refused.value.problems)


def test_values_stay_one_word_each(tmp_path):
    """In sbatch's lines, which end at # and are split at blanks, and in the shell's, which this test runs."""
    options = {"account": "nlp & co #1", "constraint": "[a|b]", "comment": "it's $HOME"}
    words = ["data.sources.0.path=a b/$x.txt", "run=a\nb", "x=$(touch ran)", "y=`touch ran`", "z=';touch ran;'"]
    script = script_of(
        tmp_path / "50% of #1", *words, file="my run.yaml", queue="a b", slurm={"options": options}
    )  # fmt: skip
    assert directives(script)[:2] == ['job-name="50% of #1"', f'output="{tmp_path}/50%% of #1/slurm-%j.log"']
    assert {'partition="a b"', 'account="nlp & co #1"', 'constraint="[a|b]"', 'comment="it\'s $HOME"'} <= set(
        directives(script)
    )
    srun = tmp_path / "srun"
    srun.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv))\n")
    srun.chmod(0o755)
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path,
                          env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    at = said.index("train")
    assert said[at + 1 : at + 2 + len(words)] == ["my run.yaml", *words]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["setup", "options"])
def test_a_run_file_adds_no_line_to_the_scripts_of_preparing(tmp_path, key):
    values = {"setup": [BREAK], "options": {"qos": BREAK}}
    run = write_run(tmp_path / "run.yaml", prepare={"engine": "slurm", "slurm": {key: values[key]}})
    with pytest.raises(InputError, match=rf"prepare\.slurm\.{key}.*line break"):
        load_run(str(run))


def test_dry_run(tmp_path):
    run = write_run(tmp_path / "war.yaml", launch={"nodes": 2, "slurm": {"options": {"qos": "low", "account": "nlp"}}})
    words = ("launch", "slurm", run, "train.steps=3", "--option", "qos=high", "--max-restarts", "0")
    done = succeed(*words, "--dry-run")
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=war\n")
    assert f" {run} train.steps=3 --nproc 1 " in done.stdout
    assert directives(done.stdout)[2] == "nodes=2"
    assert "qos=high" in directives(done.stdout)
    assert not (tmp_path / "war").exists()
    assert json.loads(artel(*words, "--dry-run", "--json").stdout) == {"job": None, "text": done.stdout}


def test_other_commands_are_launched_in_place_of_training(tmp_path):
    run = write_run(tmp_path / "war.yaml")
    done = succeed("launch", "slurm", run, "launch.cpus=4", "--dry-run", "--", "evaluate", run, "--data", "a b.txt")
    step = next(line for line in done.stdout.splitlines() if line.startswith("srun "))
    assert step.endswith(f" --cpus-per-task=4 {sys.executable} -m artel evaluate {run} --data 'a b.txt' &")
    for words, message in (
        (["--", "chat", run], "chat: cannot be launched"),
        (["--nodes", "2", "--", "prepare", run], "launch.nodes: is 2, but artel prepare runs on one node"),
        (["--", "generate", run], "add --prompts FILE"),
    ):
        assert message in refused("launch", "slurm", run, *words).stderr


def test_mistakes_are_told_before_the_job_is_queued(tmp_path):
    run = write_run(tmp_path / "run.yaml")
    for words, message in (
        (["data.blok=3"], "did you mean data.block"),
        (["--option", "qos"], "'qos' has no ="),
        (["--time", "90"], "'90' has no unit\n    write, for example, 90min"),
        (["--env", "WANDB_API_KEY=0123456789"], "WANDB_API_KEY has a secret"),
        (["--env", "A B=1"], "is not the name of a variable"),
        (["--nodes", "two"], "launch.nodes"),
    ):
        assert message in refused("launch", "slurm", run, *words).stderr
    assert "launch.to" in refused("launch", "slurmm", run).stderr
    assert "no job that was submitted from here" in refused("launch", "status", run).stderr


def test_keys_without_effect_are_named(tmp_path):
    run = write_run(tmp_path / "run.yaml", launch={"image": "artel:cpu", "mounts": {"claim": "/data"}})
    said = succeed("launch", "slurm", run, "--dry-run").stderr
    assert "launch.image has no effect with slurm: " in said
    assert "launch.mounts has no effect with slurm: " in said


def test_without_slurm(tmp_path):
    run = write_run(tmp_path / "run.yaml")
    done = artel("launch", "slurm", run, env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert re.search(r"sbatch: is not installed here\n.*--dry-run", done.stderr)


PROGRAM = """#!/bin/sh
echo "$(basename $0) $*" >> "$CALLS"
case $(basename $0) in
    sbatch) cat > script; echo '77;cluster';;
    scontrol) [ -e gone ] && exit 1; echo 'JobId=77 JobName=run JobState=RUNNING Reason=None';;
    sacct) echo ' TIMEOUT ';;
esac
"""


def test_a_job_is_recorded_and_followed(tmp_path, monkeypatch):
    """Slurm's programs are scripts that note how they were called; test_a_job_of_two_nodes… has the real ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "scontrol", "sacct", "scancel"):
        (tmp_path / "bin" / name).write_text(PROGRAM)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "KEY": "secret1"}
    run = write_run(tmp_path / "run.yaml", launch={"secrets": ["KEY"]})
    assert "submitted job 77" in succeed("launch", "slurm", run, env=environment).stderr
    folder = tmp_path / "run"
    assert (folder / "launch" / "job.sbatch").read_text() == (tmp_path / "script").read_text()
    assert "secret1" not in "".join(file.read_text() for file in (folder / "launch").iterdir())
    assert succeed("launch", "status", folder, env=environment).stdout == "77: RUNNING\n"
    (tmp_path / "gone").touch()
    assert json.loads(succeed("launch", "status", run, "--json", env=environment).stdout)["state"] == "TIMEOUT"
    assert "the job has not started" in refused("launch", "logs", folder, env=environment).stderr
    (folder / "slurm-77.log").write_text("one\ntwo\n")
    assert succeed("launch", "logs", folder, env=environment).stdout == "one\ntwo\n"
    succeed("launch", "cancel", folder, env=environment)
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "scancel 77"
    assert (
        "launch.secrets: KEY is not set here"
        in refused(
            "launch", "slurm", run, env={name: value for name, value in environment.items() if name != "KEY"}
        ).stderr
    )


# A real cluster -----------------------------------------------------------------------------------------------------

needs_slurm = pytest.mark.skipif(bool(cluster_slurm.MISSING), reason=f"Slurm: {cluster_slurm.MISSING}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with cluster_slurm.two_nodes(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


# SGD: AdamW makes much of the last bit of a sum in so many steps.
STEADY = {"train": {"steps": 300, "optimizer": "sgd", "learning_rate": 1e-2}, "checkpoint": {"every": "never"}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(loss, gradient norm) by step of one process."""
    run = write_run(tmp_path_factory.mktemp("one") / "run.yaml", **STEADY)
    succeed("train", run, timeout=LIMIT)
    return losses(run.with_suffix(""))


def job(cluster, number):
    """What Slurm knows of a job, by name."""
    done = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True, timeout=LIMIT,
                          env={**os.environ, **cluster})  # fmt: skip
    return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)


@needs_slurm
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_of_two_nodes_is_warned_saves_is_queued_again_and_completes(tmp_path, cluster, reference):
    run, folder = write_run(tmp_path / "two.yaml", **STEADY), tmp_path / "two"
    done = succeed("launch", "slurm", run, "--nodes", "2", "--cpus", "1", "--time", "0:30:00", "--json", env=cluster)
    number = json.loads(done.stdout)["job"]
    log = folder / f"slurm-{number}.log"

    def logged():
        return log.read_text()[-4000:] if log.exists() else f"no {log}"

    try:
        wait_until(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 20, logged)
        # What Slurm itself does before the time is over, but it may do so up to a minute early.
        subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True, timeout=LIMIT,
                       env={**os.environ, **cluster})  # fmt: skip
        wait_until(lambda: job(cluster, number).get("Restarts") == "1", logged)
        text = log.read_text()
        assert "stopped and saved after step" in text
        assert "2 processes" in text
        wait_until(lambda: job(cluster, number).get("JobState") == "COMPLETED", logged)
    finally:
        subprocess.run(["scancel", number], timeout=LIMIT, env={**os.environ, **cluster})
    assert "resuming from step" in log.read_text()
    assert largest_difference(reference, losses(folder)) < 1e-5


@needs_slurm
@pytest.mark.long
@pytest.mark.timeout(600)
def test_tasks_of_srun_train_as_one_process_does(tmp_path, cluster, reference):
    run = write_run(tmp_path / "tasks.yaml", **STEADY)
    # The names n1 and n2 are Slurm's alone on this machine.
    environment = {**ENVIRONMENT, **cluster, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    done = subprocess.run(["srun", "--nodes=2", "--ntasks=2", sys.executable, "-m", "artel", "train", str(run)],
                          capture_output=True, text=True, timeout=LIMIT, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stderr
    assert largest_difference(reference, losses(tmp_path / "tasks")) < 1e-5


@needs_slurm
@pytest.mark.long
@pytest.mark.parametrize("nodes", ["n1", "n[1,3-5],m7", "gpu[007-012,20]", "r[1-2]n[3-4]", "a-b[08-11]"])
def test_the_first_host_is_the_one_that_slurm_tells(cluster, nodes):
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=LIMIT,
                          env={**os.environ, **cluster})  # fmt: skip
    assert first_host(nodes) == done.stdout.split()[0]
