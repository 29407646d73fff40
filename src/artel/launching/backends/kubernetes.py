"""Run in Kubernetes: a JobSet, a Kubeflow TrainJob or a plain Job, submitted and followed with kubectl.

All three hold the same Job: one pod per node, numbered by its completion index. The first pod serves the rendezvous
under its name in the headless service, and the other pods find it there. Exit statuses decide what a failed pod means:

    2           wrong input: no retry would help, so the job fails at once
    130, 143    interrupted and saved, or told to end: the pod starts again and resumes; not counted as a retry
    77, others  a hang or a failure: the pod starts again, at most `launch.max_restarts` times per node

An evicted or preempted pod counts as interrupted, whatever its status.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from artel.config import Section
from artel.errors import InputError
from artel.integers import ceil_div
from artel.launching.job import NODE_VARIABLES, PORT, Job, Launcher, dump_yaml, run_tool
from artel.training.heartbeat import HEARTBEAT_VARIABLE, heartbeat_test

_CONTAINER = "node"  # the trainer of Kubeflow looks for this name, also as that of the replicated job
_SAVE_SECONDS = 600  # as long as artel gives its processes to save
_HEARTBEAT = "/tmp/artel-heartbeat"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_KINDS = {"jobset": "jobset.jobset.x-k8s.io", "trainjob": "trainjob.trainer.kubeflow.org", "job": "job.batch"}
_SELECTORS = {"jobset": "jobset.sigs.k8s.io/jobset-name", "trainjob": "jobset.sigs.k8s.io/jobset-name",
              "job": "batch.kubernetes.io/job-name"}  # fmt: skip


class KubernetesSettings(Section):
    """Form, namespace, devices and Secret of its jobs."""

    form: Literal["jobset", "trainjob", "job"] = Field(
        default="jobset",
        description="jobset (needs the JobSet operator), trainjob (needs Kubeflow Trainer 2) or job (one node, needs "
        "no operator).",
    )
    namespace: str | None = Field(default=None, description="Namespace (null: that of kubectl's context).")
    device: str = Field(default="nvidia.com/gpu", description="Name of a GPU as a resource, e.g. amd.com/gpu.")
    secret: str = Field(default="artel", description="Secret that has the keys named in launch.secrets.")


class Kubernetes(Launcher):
    """Submits a manifest with kubectl."""

    file = "kubernetes.yaml"

    @property
    def settings(self) -> KubernetesSettings:
        return self.launch.settings(KubernetesSettings)

    def describe(self, job: Job) -> str:
        """Return the manifest. Raise InputError without an image, and for a plain job of several nodes."""
        if self.launch.image is None:
            fix = "write the name of an image that has artel: make image builds one"
            raise InputError.at("launch.image", "is required by Kubernetes", fix)
        if self.settings.form == "job" and self.launch.nodes > 1:
            what = f"a plain job runs on one node, but launch.nodes is {self.launch.nodes}"
            raise InputError.at("launch.kubernetes.form", what, "write jobset or trainjob")
        forms = {"jobset": self._jobset, "trainjob": self._trainjob, "job": self._job}
        return dump_yaml(*forms[self.settings.form](job))

    def submit(self, text: str, job: Job) -> str:
        fix = "install kubectl, or write the manifest with --dry-run and submit it elsewhere"
        advice = f"if an earlier job of this run exists, remove it: artel launch cancel {job.folder}"
        run_tool("kubectl", "create", "--filename=-", *self._namespace, text=text, fix=fix, advice=advice)
        return job.name

    def status(self, job_id: str) -> str:
        """Return the condition of the job, or the phases of its pods while it has none."""
        kind = _KINDS[self.settings.form]
        found = json.loads(run_tool("kubectl", "get", kind, job_id, "--output=json", *self._namespace))
        conditions = found.get("status", {}).get("conditions", [])
        for condition in reversed([each for each in conditions if each["status"] == "True"]):
            if condition["type"] in ("Complete", "Completed", "Failed", "Suspended"):
                return ": ".join(filter(None, [condition["type"], condition.get("message", "")]))
        pods = json.loads(run_tool("kubectl", "get", "pods", *self._pods(job_id), "--output=json"))["items"]
        phases = [pod["status"].get("phase", "Unknown") for pod in pods]
        return ", ".join(f"{phases.count(phase)} {phase}" for phase in sorted(set(phases))) or "Pending"

    def show_logs(self, job_id: str, folder: Path, follow: bool) -> None:
        several = ["--prefix", f"--max-log-requests={max(5, self.launch.nodes)}"] if self.launch.nodes > 1 else []
        options = [f"--container={_CONTAINER}", "--tail=-1", *several, *(["--follow"] if follow else [])]
        run_tool("kubectl", "logs", *self._pods(job_id), *options, show=True)

    def cancel(self, job_id: str) -> None:
        """Delete the job. Its pods get SIGTERM, and `_SAVE_SECONDS` to save."""
        run_tool("kubectl", "delete", _KINDS[self.settings.form], job_id, "--wait=false", *self._namespace)
        if self.settings.form == "trainjob":
            run_tool("kubectl", "delete", "trainingruntime.trainer.kubeflow.org", job_id, *self._namespace)

    @property
    def _namespace(self) -> list[str]:
        return [f"--namespace={self.settings.namespace}"] if self.settings.namespace else []

    def _pods(self, job_id: str) -> list[str]:
        return [f"--selector={_SELECTORS[self.settings.form]}={job_id}", *self._namespace]

    def _jobset(self, job: Job) -> list[dict[str, Any]]:
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": _CONTAINER, "replicas": 1, "template": {"spec": self._job_spec(job)}}],
        }
        return [self._object("jobset.x-k8s.io/v1alpha2", "JobSet", job, spec)]

    def _trainjob(self, job: Job) -> list[dict[str, Any]]:
        """Return a runtime of its own and the TrainJob: a TrainJob alone has no room for exit statuses or storage."""
        template = {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": self._job_spec(job),
        }
        runtime = {
            "mlPolicy": {"numNodes": self.launch.nodes, "torch": {}},
            "template": {"spec": {"replicatedJobs": [{"name": _CONTAINER, "template": template}]}},
        }
        spec = {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {"numNodes": self.launch.nodes, "numProcPerNode": self.launch.processes},
        }
        version = "trainer.kubeflow.org/v1alpha1"
        metadata = {"name": job.name} | ({"namespace": self.settings.namespace} if self.settings.namespace else {})
        return [
            {"apiVersion": version, "kind": "TrainingRuntime", "metadata": metadata, "spec": runtime},
            self._object(version, "TrainJob", job, spec),
        ]

    def _job(self, job: Job) -> list[dict[str, Any]]:
        return [self._object("batch/v1", "Job", job, self._job_spec(job))]

    def _object(self, version: str, kind: str, job: Job, spec: dict[str, Any]) -> dict[str, Any]:
        labels = {"app.kubernetes.io/name": "artel"}
        if self.launch.queue is not None:
            labels["kueue.x-k8s.io/queue-name"] = self.launch.queue
        metadata: dict[str, Any] = {"name": job.name, "labels": labels}
        if self.settings.namespace:
            metadata["namespace"] = self.settings.namespace
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def _job_spec(self, job: Job) -> dict[str, Any]:
        nodes = self.launch.nodes
        spec: dict[str, Any] = {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            # If the first pod is lost, all pods end and start again.
            "backoffLimit": self.launch.max_restarts * nodes,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    _exit_rule("FailJob", 2),
                    _exit_rule("Ignore", 130, 143),
                    _exit_rule("Count", 77),
                ]
            },
            "template": {"spec": self._pod_spec(job)},
        }
        if self.launch.time is not None:
            spec["activeDeadlineSeconds"] = round(self.launch.time)
        return spec

    def _pod_spec(self, job: Job) -> dict[str, Any]:
        launch, settings = self.launch, self.settings
        requests: dict[str, Any] = {} if launch.cpus is None else {"cpu": str(launch.cpus)}
        if launch.memory is not None:
            requests["memory"] = str(launch.memory)
        limits = {name: requests[name] for name in ("memory",) if name in requests}
        if launch.gpus:
            limits[settings.device] = str(launch.gpus)
        container: dict[str, Any] = {
            "name": _CONTAINER,
            "image": launch.image,
            "command": ["sh", "-c", _literal(job.shell())],
            "env": self._variables(job),
            "resources": {"requests": requests, "limits": limits},
            # A container has 64 MB of shared memory by default: too little for NCCL and for workers.
            "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
        }
        if job.hang_timeout is not None:
            # A process that hangs ends itself. This is for one that cannot: its node or its disk hangs.
            test = heartbeat_test(_HEARTBEAT, ceil_div(2 * round(job.hang_timeout), 60))
            probe = {"exec": {"command": ["sh", "-c", test]}, "periodSeconds": 60, "timeoutSeconds": 30}
            container["livenessProbe"] = probe
            container["env"].append({"name": HEARTBEAT_VARIABLE, "value": _HEARTBEAT})
        volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
        for number, (claim, path) in enumerate(launch.mounts.items()):
            volumes.append({"name": f"mount-{number}", "persistentVolumeClaim": {"claimName": claim}})
            container["volumeMounts"].append({"name": f"mount-{number}", "mountPath": path})
        return {
            "restartPolicy": "Never",  # podFailurePolicy requires it; the Job starts a new pod instead
            "terminationGracePeriodSeconds": _SAVE_SECONDS,
            # The user of artel's image may write to the mounts. Their files are not visited at every start.
            "securityContext": {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"},
            "containers": [container],
            "volumes": volumes,
        }

    def _variables(self, job: Job) -> list[dict[str, Any]]:
        variables = self._node_variables(job)
        variables += [{"name": name, "value": _literal(value)} for name, value in job.environment.items()]
        for name in self.launch.secrets:
            key = {"name": self.settings.secret, "key": name}
            variables.append({"name": name, "valueFrom": {"secretKeyRef": key}})
        return variables

    def _node_variables(self, job: Job) -> list[dict[str, Any]]:
        """Return the variables that tell artel its nodes. Kubeflow's trainer sets them itself."""
        if self.launch.nodes == 1 or self.settings.form == "trainjob":
            return []
        count, rank, address = NODE_VARIABLES
        return [
            {"name": count, "value": str(self.launch.nodes)},
            {"name": rank, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            {"name": address, "value": f"{job.name}-{_CONTAINER}-0-0.{job.name}"},
            {"name": "PET_MASTER_PORT", "value": str(PORT)},
        ]


def _exit_rule(action: str, *statuses: int) -> dict[str, Any]:
    values = {"containerName": _CONTAINER, "operator": "In", "values": list(statuses)}
    return {"action": action, "onExitCodes": values}


def _literal(text: str) -> str:
    """Escape a text against Kubernetes, which replaces $(NAME) by a variable and $$ by $."""
    return text.replace("$", "$$")
