"""`artel launch hf-jobs` against a hub on this machine, and `artel launch skypilot` against SkyPilot's own parser.

Neither the real hub nor a cloud has run them. `sky` is a script that notes how it was called.
"""

import json
import os
import re
import subprocess
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from artel.config import LaunchConfig
from artel.errors import InputError
from artel.launching.job import Job
from artel.launching.submit import find_launcher
from support.runs import artel, refused, succeed, write_run
from support.waiting import LIMIT

RUN_FILE = "data: {sources: [{path: 'texts/*.txt'}]}\n"
TOKEN = "hf_" + "Aa1Bb2Cc3Dd4" * 3


def described(folder, to, command=("train", "run.yaml"), **launch):
    config = LaunchConfig.model_validate({"to": to, **launch})
    return find_launcher(config).describe(Job(folder, command, config, {"run.yaml": RUN_FILE}))


# Hugging Face Jobs ---------------------------------------------------------------------------------------------------


class JobsHub:
    """As much of the hub's jobs as huggingface_hub asks for, of one user."""

    def __init__(self):
        self.jobs, self.stage, self.refusal = {}, "RUNNING", None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    hub: JobsHub

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if self.hub.refusal:
            return self._send(self.hub.refusal, {"error": "Pre-paid credit balance is insufficient"})
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid username or password."})
        if self.path == "/api/whoami-v2":
            return self._send(200, {"name": "me", "type": "user"})
        if self.path.endswith("/logs"):
            self._send(
                200, "".join(f"data: {json.dumps({'data': line, 'timestamp': ''})}\n\n" for line in ("one", "two"))
            )
            return None
        return self._send(200, self._job(self.path.split("/")[4]))

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.endswith("/cancel"):
            self.hub.stage = "CANCELED"
            return self._send(200, {})
        if self.hub.refusal or self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.do_GET()
        number = f"job{len(self.hub.jobs)}"
        self.hub.jobs[number] = (self.path, json.loads(body))
        return self._send(200, self._job(number))

    def _job(self, number):
        return {"id": number, "owner": {"id": "1", "name": "me", "type": "user"}, "status": {"stage": self.hub.stage}}

    def _send(self, status, content):
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream" if isinstance(content, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub():
    hub = JobsHub()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def test_a_job_of_the_hub_is_submitted_and_followed(tmp_path, hub):
    environment = {
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "home"),
        "WANDB_API_KEY": "value-of-the-key",
    }
    section = {
        "image": "example.org/artel:gpu",
        "time": "2h",
        "mounts": {"hf://buckets/me/runs": "/data"},
        "environment": {"LEVEL": "1"},
        "secrets": ["WANDB_API_KEY"],
        "hf_jobs": {"flavor": "a10g-small"},
    }
    run = write_run(tmp_path / "war.yaml", launch=section)
    words = ("launch", "hf-jobs", run, "train.steps=3", "--nproc", "2")
    done = succeed(*words, "--json", env=environment)
    assert json.loads(done.stdout)["job"] == "job0"
    path, sent = hub.jobs["job0"]
    assert path == "/api/jobs/me"
    shown = json.loads((tmp_path / "war/launch/hf-jobs.json").read_text())
    assert sent["command"] == shown["command"]
    assert shown["secrets"] == ["WANDB_API_KEY"]
    assert sent["dockerImage"] == section["image"]
    assert sent["command"][2].endswith(
        "cd /data\nexec artel train /tmp/artel/war.yaml train.steps=3 --nproc 2 --max-restarts 3\n"
    )
    assert (sent["flavor"], sent["timeoutSeconds"], sent["attempts"], sent["labels"]) == (
        "a10g-small", 7200, 4, {"name": "war"}
    )  # fmt: skip
    assert sent["environment"] == {"LEVEL": "1", "ARTEL_LAUNCH_FILE": run.read_text()}
    assert sent["secrets"] == {"WANDB_API_KEY": "value-of-the-key"}
    assert sent["volumes"] == [{"type": "bucket", "source": "me/runs", "mountPath": "/data"}]
    written = "".join(file.read_text() for file in (tmp_path / "war/launch").iterdir())
    assert "value-of-the-key" not in written + done.stderr
    assert succeed("launch", "status", run, env=environment).stdout == "job0: RUNNING\n"
    hub.stage = "COMPLETED"
    assert succeed("launch", "logs", tmp_path / "war", env=environment).stdout == "one\ntwo\n"
    succeed("launch", "cancel", run, env=environment)
    assert hub.stage == "CANCELED"
    status = ("launch", "status", run)
    said = refused(*status, env=environment | {"HF_TOKEN": "hf_wrong"}).stderr
    assert "does not accept the token (401)" in said
    assert "HF_HUB_OFFLINE: is set" in refused(*status, env=environment | {"HF_HUB_OFFLINE": "1"}).stderr
    hub.refusal = 402
    done = artel(*status, env=environment)
    assert done.returncode == 1
    assert "refused (402): Pre-paid credit balance is insufficient" in done.stderr


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"image": "a", "nodes": 2}, "launch.nodes: is 2, but a job of the hub has one machine"),
        ({}, "launch.image: is required"),
        ({"image": "a", "mounts": {"claim": "/data"}}, "launch.mounts: claim: "),
    ],
)
def test_what_the_hub_cannot_run_is_refused(tmp_path, launch, message):
    with pytest.raises(InputError, match=re.escape(message)):
        described(tmp_path / "run", "hf_jobs", **launch)


# SkyPilot ------------------------------------------------------------------------------------------------------------

SKY = {"nodes": 2, "gpus": 8, "cpus": 96, "memory": "512GiB", "image": "example.org/artel:gpu", "secrets": ["HF_TOKEN"],
       "mounts": {"shared": "/data", "s3://bucket/texts": "/texts"}, "environment": {"LEVEL": "${HOME} $(id)"},
       "skypilot": {"accelerator": "H100", "infra": "aws/us-east-1"}}  # fmt: skip


def test_a_task_says_all_that_skypilot_needs(tmp_path):
    task = yaml.safe_load(described(tmp_path / "War", "skypilot", **SKY))
    assert task["resources"] == {
        "infra": "aws/us-east-1", "accelerators": "H100:8", "cpus": "96+", "memory": "512+", "use_spot": True,
        "image_id": "docker:example.org/artel:gpu",
        "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [77, 130, 143]},
    }  # fmt: skip
    assert task["volumes"] == {"/data": "shared"}
    assert task["file_mounts"] == {"/texts": {"source": "s3://bucket/texts", "mode": "MOUNT"}}
    assert task["secrets"] == {"HF_TOKEN": None}
    with pytest.raises(InputError, match="SkyPilot must know which GPU"):
        described(tmp_path / "run", "skypilot", gpus=1)


@pytest.mark.parametrize("launch", [SKY, {}])
def test_skypilot_itself_reads_the_task(tmp_path, launch):
    """Its parser, with its JSON schema. SkyPilot needs 450 MB, so it is not among the tools of developers."""
    task = pytest.importorskip("sky.task", reason="SkyPilot is not installed").Task
    config = yaml.safe_load(described(tmp_path / "war", "skypilot", **launch))
    values = [("HF_TOKEN", "x")] if launch else None
    read = task.from_yaml_config(deepcopy(config), secrets_overrides=values)  # it empties what it reads
    written = read.to_yaml_config()
    assert (read.num_nodes, read.run) == (launch.get("nodes", 1), config["run"])
    assert written["envs"] == config["envs"]
    assert written["resources"]["job_recovery"]["recover_on_exit_codes"] == [77, 130, 143]
    config["number_of_nodes"] = 2
    with pytest.raises(ValueError, match="number_of_nodes"):
        task.from_yaml_config(config)


def test_nodes_of_skypilot_are_hosts(tmp_path):
    """The script of the task, run here as SkyPilot would on the second node."""
    task = yaml.safe_load(described(tmp_path / "war", "skypilot", **SKY | {"mounts": {"v": str(tmp_path)}}))
    (tmp_path / "artel").write_text('#!/bin/sh\nenv | grep PET_ | sort; echo "$@"; cat "$2"\n')
    (tmp_path / "artel").chmod(0o755)
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}
    done = subprocess.run(["bash", "-c", task["run"]], capture_output=True, text=True, timeout=LIMIT,
                          env={**task["envs"], **nodes, "PATH": f"{tmp_path}:{os.environ['PATH']}"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "PET_MASTER_ADDR=10.0.0.7\nPET_MASTER_PORT=29500\nPET_NNODES=2\nPET_NODE_RANK=1\n"
        f"train /tmp/artel/run.yaml --nproc 8 --max-restarts 3\n{RUN_FILE}"
    )


SKY_PROGRAM = """#!/bin/sh
echo "$*" >> "$CALLS"
case $2 in
    queue) echo '[{"job_id": 1, "job_name": "war", "status": "FAILED"},
                  {"job_id": 2, "job_name": "war", "status": "RUNNING"}]';;
    logs) echo "step 1";;
esac
"""


def test_a_managed_job_is_submitted_and_followed(tmp_path):
    (tmp_path / "sky").write_text(SKY_PROGRAM)
    (tmp_path / "sky").chmod(0o755)
    calls = tmp_path / "calls"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), "KEY": "value-of-the-key"}
    run = write_run(tmp_path / "war.yaml", launch={"time": "1h"})
    done = succeed("launch", "skypilot", run, "--secret", "KEY", "--spot", "false", env=environment)
    assert "launch.time has no effect with skypilot" in done.stderr
    file = tmp_path / "war/launch/skypilot.yaml"
    assert yaml.safe_load(file.read_text())["resources"]["use_spot"] is False
    assert succeed("launch", "status", run, env=environment).stdout == "war: RUNNING\n"
    assert succeed("launch", "logs", run, env=environment).stdout == "step 1\n"
    succeed("launch", "cancel", run, env=environment)
    assert calls.read_text().splitlines() == [
        "jobs launch --yes --detach-run --secret KEY war/launch/skypilot.yaml",
        "jobs queue --all --output json",
        "jobs logs --name war --no-follow",
        "jobs cancel --name war --yes",
    ]
    assert "value-of-the-key" not in file.read_text() + calls.read_text()
