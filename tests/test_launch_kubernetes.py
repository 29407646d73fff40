"""`artel launch kubernetes`: manifests against the schemas of Kubernetes, JobSet and Kubeflow, and kubectl's words.

No cluster has run them. kubectl is a script that notes how it was called and answers what a test tells it to.
"""

import json
import os
import re
import subprocess
import time

import pytest
import yaml

from artel.config import LaunchConfig
from artel.errors import InputError
from artel.launching.job import Job
from artel.launching.submit import find_launcher
from support.runs import artel, refused, succeed, write_run
from support.waiting import LIMIT

MANY = {
    "nodes": 2, "gpus": 8, "cpus": 96, "memory": "512GiB", "time": "12h", "image": "example.org/artel:gpu",
    "queue": "team",
    "mounts": {"training-data": "/data", "models": "/models"}, "environment": {"NCCL_DEBUG": "WARN $(HOME) $$"},
    "secrets": ["HF_TOKEN"], "setup": ["ulimit -l unlimited"],
}  # fmt: skip
ONE = {"image": "example.org/artel:cpu"}
RUN_FILE = "data: {sources: [{path: 'texts/*.txt'}]}\nmodel: {from: $(X) $$ ${HOME} 'ё'}\n"
FORMS = ("jobset", "trainjob", "job")
CASES = [(form, {**MANY, "nodes": 1 if form == "job" else 2}) for form in FORMS] + [(form, ONE) for form in FORMS]


def manifest(folder, form="jobset", files=None, command=("train", "run.yaml", "train.steps=3"), **launch):
    """The documents for such a section `launch`."""
    config = LaunchConfig.model_validate({"to": "kubernetes", **launch, "kubernetes": {"form": form}})
    job = Job(folder, command, config, {"run.yaml": RUN_FILE} if files is None else files, hang_timeout=1800)
    return list(yaml.safe_load_all(find_launcher(config).describe(job)))


def job_specs(document):
    """Every Job within a document."""
    spec = document["spec"]
    if document["kind"] == "Job":
        return [spec]
    jobs = spec.get("replicatedJobs") or spec.get("template", {}).get("spec", {}).get("replicatedJobs", [])
    return [job["template"]["spec"] for job in jobs]


def pod_of(documents):
    (spec,) = (spec for document in documents for spec in job_specs(document))
    return spec["template"]["spec"]


def without_absent(value):
    """Without keys that are None, which models add."""
    if isinstance(value, dict):
        return {key: without_absent(item) for key, item in value.items() if item is not None}
    return [without_absent(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("form", "launch"), CASES)
def test_the_operators_know_every_field(tmp_path, form, launch):
    """A field that a model of the operator's API does not have is not in what the model gives back."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "Job": models.IoK8sApiBatchV1Job,
    }
    documents = manifest(tmp_path / "Война и мир 1", form, **launch)
    assert [document["kind"] for document in documents] == {
        "jobset": ["JobSet"], "trainjob": ["TrainingRuntime", "TrainJob"], "job": ["Job"]
    }[form]  # fmt: skip
    for document in documents:
        assert without_absent(kinds[document["kind"]].from_dict(document).to_dict()) == document
        wrong = json.loads(json.dumps(document).replace('"terminationGracePeriodSeconds"', '"terminationGrace"'))
        if wrong != document:  # the test sees a field that does not exist
            assert without_absent(kinds[document["kind"]].from_dict(wrong).to_dict()) != wrong


@pytest.mark.parametrize(("form", "launch"), CASES)
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_accepts_the_jobs_within(tmp_path, form, launch, version):
    """podFailurePolicy is stable since Kubernetes 1.31."""
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in manifest(tmp_path / "run", form, **launch):
        for spec in job_specs(document):
            validate(
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}, version, strict=True
            )


def action(rules, status, disrupted=False):
    """What the first rule that fits a pod says, as Kubernetes reads them: Count without any."""
    for rule in rules:
        if "onPodConditions" in rule and disrupted:
            return rule["action"]
        if status in rule.get("onExitCodes", {}).get("values", []):
            return rule["action"]
    return "Count"


@pytest.mark.parametrize("form", FORMS)
def test_exit_statuses_decide_about_retries(tmp_path, form):
    (spec,) = (spec for each in manifest(tmp_path / "run", form, **ONE, max_restarts=4) for spec in job_specs(each))
    rules = spec["podFailurePolicy"]["rules"]
    assert {status: action(rules, status) for status in (1, 2, 70, 77, 130, 137, 143)} == {
        1: "Count", 2: "FailJob", 70: "Count", 77: "Count", 130: "Ignore", 137: "Count", 143: "Ignore"
    }  # fmt: skip
    assert action(rules, 137, disrupted=True) == "Ignore"
    assert spec["backoffLimit"] == 4
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # required by podFailurePolicy
    names = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    assert names == {container["name"] for container in spec["template"]["spec"]["containers"]}


def expanded(text, variables):
    """As Kubernetes expands $(NAME) and $$ (third_party/forked/golang/expansion)."""

    def replace(match):
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def test_a_pod_runs_the_command_on_the_run_file(tmp_path):
    """Its shell runs here, with an artel that prints what it got; Kubernetes' own expansion comes before."""
    launch = MANY | {"mounts": {"claim": str(tmp_path / "data")}, "setup": ["export SEEN=yes"]}
    words = ("train", "run.yaml", "run=a b", "x=$HOME $(id)")
    (container,) = pod_of(manifest(tmp_path / "run", command=words, **launch))["containers"]
    (tmp_path / "data").mkdir()
    (tmp_path / "artel").write_text('#!/bin/sh\npwd; echo "$SEEN"; cat "$2"; printf "[%s]" "$@"\n')
    (tmp_path / "artel").chmod(0o755)
    known = {"HOME": "wrong", "id": "wrong", "X": "wrong"}
    environment = {each["name"]: expanded(each["value"], known) for each in container["env"] if "value" in each}
    assert environment["NCCL_DEBUG"] == "WARN $(HOME) $$"
    program, *arguments = (expanded(word, known) for word in container["command"])
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=LIMIT,
                          env=environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    options = "[--nproc][8][--max-restarts][3]"
    expected = f"[train][/tmp/artel/run.yaml][run=a b][x=$HOME $(id)]{options}"
    assert done.stdout == f"{tmp_path}/data\nyes\n{RUN_FILE}{expected}"


def test_a_probe_reads_the_heartbeat(tmp_path):
    """Its command runs here on a file that is absent, fresh and old."""
    (container,) = pod_of(manifest(tmp_path / "run", **ONE))["containers"]
    (path,) = (each["value"] for each in container["env"] if each["name"] == "ARTEL_HEARTBEAT")
    program, option, test = container["livenessProbe"]["exec"]["command"]
    file = tmp_path / "heartbeat"

    def healthy():
        return subprocess.run([program, option, test.replace(path, str(file))], timeout=LIMIT).returncode == 0

    assert healthy()
    file.touch()
    assert healthy()
    for minutes, expected in ((59, True), (61, False)):  # twice train.hang_timeout
        then = time.time() - 60 * minutes
        os.utime(file, (then, then))
        assert healthy() == expected


def test_pods_find_one_another_by_the_name_of_the_first(tmp_path):
    def variables(form, **launch):
        (container,) = pod_of(manifest(tmp_path / "My Run", form, **launch))["containers"]
        return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}

    found = variables("jobset", **MANY)
    # JobSet: <jobset>-<replicated job>-<its index>-<pod's index>.<jobset>
    assert (found["PET_NNODES"], found["PET_MASTER_ADDR"]) == ("2", "my-run-node-0-0.my-run")
    assert found["PET_NODE_RANK"] == {
        "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    }
    assert found["HF_TOKEN"] == {"secretKeyRef": {"name": "artel", "key": "HF_TOKEN"}}
    # Kubeflow's trainer sets PET_… itself, and refuses a TrainJob that does.
    assert not [name for name in variables("trainjob", **MANY) if name.startswith("PET_")]
    assert not [name for name in variables("jobset", **ONE) if name.startswith("PET_")]


def test_what_kubernetes_cannot_run_is_refused(tmp_path):
    for launch, form, message in (
        ({}, "jobset", "launch.image: is required"),
        (ONE | {"nodes": 2}, "job", "a plain job runs on one node"),
    ):
        with pytest.raises(InputError, match=message):
            manifest(tmp_path / "run", form, **launch)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Война", r"artel-[0-9a-f]{8}"),
        ("2024_run.v1", "run-2024-run-v1"),
        ("x" * 60, "x" * 40),
        ("a-" * 30, "a-" * 19 + "a"),
    ],
)
def test_names_are_those_that_kubernetes_allows(tmp_path, folder, name):
    (document,) = manifest(tmp_path / folder, **ONE)
    assert re.fullmatch(name, document["metadata"]["name"])
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", document["metadata"]["name"])


KUBECTL = """#!/bin/sh
echo "$*" >> "$CALLS"
case $1 in
    create) cat > created.yaml; if [ -e exists ]; then echo 'Error from server (AlreadyExists): jobs' >&2; exit 1; fi;;
    get) cat "$2.json";;
    logs) echo "step 1";;
esac
exit 0
"""


def test_a_job_is_submitted_and_followed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    calls = tmp_path / "calls"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)}
    run = write_run(tmp_path / "run.yaml", launch={"image": "artel", "kubernetes": {"namespace": "ml"}})
    words = ("launch", "kubernetes", run, "--form", "job")
    shown = succeed(*words, "--dry-run", env=environment).stdout
    assert not (tmp_path / "run").exists()
    succeed(*words, env=environment)
    assert (tmp_path / "created.yaml").read_text() == shown == (tmp_path / "run/launch/kubernetes.yaml").read_text()
    assert yaml.safe_load(shown)["metadata"]["namespace"] == "ml"

    def state(conditions, *phases):
        (tmp_path / "job.batch.json").write_text(json.dumps({"status": {"conditions": conditions}}))
        (tmp_path / "pods.json").write_text(json.dumps({"items": [{"status": {"phase": each}} for each in phases]}))
        return succeed("launch", "status", tmp_path / "run", env=environment).stdout

    assert state([]) == "run: Pending\n"
    assert state([{"type": "Suspended", "status": "False"}], "Running", "Pending") == "run: 1 Pending, 1 Running\n"
    failed = [{"type": "FailureTarget", "status": "True"},
              {"type": "Failed", "status": "True", "message": "exit code 2 matched FailJob"}]  # fmt: skip
    assert state(failed) == "run: Failed: exit code 2 matched FailJob\n"
    assert succeed("launch", "logs", tmp_path / "run", "--follow", env=environment).stdout == "step 1\n"
    assert calls.read_text().splitlines()[-1] == (
        "logs --selector=batch.kubernetes.io/job-name=run --namespace=ml --container=node --tail=-1 --follow"
    )
    succeed("launch", "cancel", run, env=environment)
    assert calls.read_text().splitlines()[-1] == "delete job.batch run --wait=false --namespace=ml"
    (tmp_path / "exists").touch()
    again = artel(*words, env=environment)
    assert again.returncode == 1
    assert "AlreadyExists" in again.stderr
    assert "artel launch cancel run\n" in again.stderr
    assert "has no job" in refused("launch", "logs", write_run(tmp_path / "other.yaml"), env=environment).stderr
