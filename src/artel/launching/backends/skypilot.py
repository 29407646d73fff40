"""Run as a managed job of SkyPilot, by its command `sky`: on spot machines of clouds, or on Kubernetes.

SkyPilot starts the job again when a cloud takes a machine back, and artel resumes. A hang (status 77) and a run that
was interrupted (130, 143) always start again, other failures at most `launch.max_restarts` times.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from artel.config import Section
from artel.errors import InputError
from artel.integers import ceil_div
from artel.launching.job import NODE_VARIABLES, PORT, Job, Launcher, dump_yaml, read_secrets, run_tool

_INSTALL = "pip install skypilot, in an environment of its own; then sky check"


class SkypilotSettings(Section):
    """GPU, place and price of its machines."""

    accelerator: str | None = Field(default=None, description="Name of the GPU, e.g. H100: sky show-gpus lists all.")
    infra: str | None = Field(default=None, description="Where, e.g. aws/us-east-1 or k8s (null: the cheapest).")
    spot: bool = Field(default=True, description="Use spot machines, which are cheaper and may be taken back.")


class Skypilot(Launcher):
    """Submits a task file with `sky jobs launch`."""

    file = "skypilot.yaml"
    without: ClassVar = {
        "queue": "SkyPilot has none",
        "time": "SkyPilot has no time limit: train.budget ends a run in time",
    }

    @property
    def settings(self) -> SkypilotSettings:
        return self.launch.settings(SkypilotSettings)

    def describe(self, job: Job) -> str:
        """Return the task file. Raise InputError for GPUs without a name."""
        launch, settings = self.launch, self.settings
        if launch.gpus and settings.accelerator is None:
            fix = "write the name of the GPU, e.g. launch.skypilot.accelerator: H100"
            raise InputError.at("launch.gpus", f"is {launch.gpus}, but SkyPilot must know which GPU", fix)
        resources: dict[str, Any] = {
            "infra": settings.infra,
            "accelerators": f"{settings.accelerator}:{launch.gpus}" if launch.gpus else None,
            "cpus": launch.cpus and f"{launch.cpus}+",
            "memory": launch.memory and f"{ceil_div(launch.memory, 2**30)}+",  # GiB
            "image_id": launch.image and f"docker:{launch.image}",
            "use_spot": settings.spot,
            "job_recovery": {
                "max_restarts_on_errors": launch.max_restarts,
                "recover_on_exit_codes": [77, 130, 143],
            },
        }
        buckets = {
            path: {"source": source, "mode": "MOUNT"} for source, path in launch.mounts.items() if "://" in source
        }
        task = {
            "name": job.name,
            "num_nodes": launch.nodes,
            "resources": {key: value for key, value in resources.items() if value is not None},
            "envs": job.environment,
            "secrets": dict.fromkeys(launch.secrets),
            "file_mounts": buckets,
            "volumes": {path: name for name, path in launch.mounts.items() if "://" not in name},
            "run": job.shell(*(_node_lines() if launch.nodes > 1 else [])),
        }
        return dump_yaml({key: value for key, value in task.items() if value})

    def submit(self, text: str, job: Job) -> str:
        read_secrets(self.launch.secrets)
        secrets = [word for name in self.launch.secrets for word in ("--secret", name)]
        file = job.folder / "launch" / self.file
        run_tool("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, str(file), fix=_INSTALL)
        return job.name

    def status(self, job_id: str) -> str:
        """Return the state of the newest job of this name."""
        jobs = json.loads(run_tool("sky", "jobs", "queue", "--all", "--output", "json", fix=_INSTALL))
        found = [each for each in jobs if each["job_name"] == job_id]
        return str(max(found, key=lambda each: each["job_id"])["status"]) if found else "unknown"

    def show_logs(self, job_id: str, folder: Path, follow: bool) -> None:
        follow_option = "--follow" if follow else "--no-follow"
        run_tool("sky", "jobs", "logs", "--name", job_id, follow_option, fix=_INSTALL, show=True)

    def cancel(self, job_id: str) -> None:
        run_tool("sky", "jobs", "cancel", "--name", job_id, "--yes", fix=_INSTALL)


def _node_lines() -> list[str]:
    """Return shell lines that tell artel its nodes, from the variables of SkyPilot."""
    count, rank, address = NODE_VARIABLES
    return [
        f'export {count}="$SKYPILOT_NUM_NODES" {rank}="$SKYPILOT_NODE_RANK" PET_MASTER_PORT={PORT}',
        f'export {address}="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
    ]
