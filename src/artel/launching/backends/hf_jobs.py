"""Run as a Hugging Face Job, by huggingface_hub. A job has one machine, and its disk is lost with it.

So the run's folder must be in a bucket of the hub that the job mounts: `launch.mounts: {hf://buckets/me/runs: /data}`.
A job that fails starts again, at most `launch.max_restarts` times, and the run resumes from what the bucket has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from artel.config import Section
from artel.errors import InputError, WorkError
from artel.launching.job import Job, Launcher, read_secrets

_WHERE = "Hugging Face Jobs"


class HfJobsSettings(Section):
    """Machine and namespace of its jobs."""

    flavor: str = Field(
        default="cpu-basic", description="Machine, e.g. a10g-small or h200x8: hf jobs hardware lists all."
    )
    namespace: str | None = Field(default=None, description="User or organization that pays (null: that of the token).")


class HfJobs(Launcher):
    """Submits a job by HfApi.run_job. Its description is the arguments of that call."""

    file = "hf-jobs.json"
    without: ClassVar = {
        "queue": "the hub starts jobs as it has machines",
        "cpus": "launch.hf_jobs.flavor names the machine",
        "memory": "launch.hf_jobs.flavor names the machine",
    }

    @property
    def settings(self) -> HfJobsSettings:
        return self.launch.settings(HfJobsSettings)

    def describe(self, job: Job) -> str:
        """Return the arguments of run_job as JSON, with the names of secrets. Raise InputError for several nodes."""
        launch = self.launch
        if launch.nodes > 1:
            raise InputError.at("launch.nodes", f"is {launch.nodes}, but a job of the hub has one machine", "write 1")
        if launch.image is None:
            fix = "write the name of an image that has artel, in a public registry or hf.co/spaces/OWNER/NAME"
            raise InputError.at("launch.image", f"is required by {_WHERE}", fix)
        for source, path in launch.mounts.items():
            _read_mount(source, path)
        arguments: dict[str, Any] = {
            "image": launch.image,
            "command": ["sh", "-c", job.shell()],
            "env": job.environment,
            "secrets": launch.secrets,
            "flavor": self.settings.flavor,
            "timeout": launch.time and round(launch.time),
            "attempts": launch.max_restarts + 1,
            "name": job.name,
            "volumes": launch.mounts,
            "namespace": self.settings.namespace,
        }
        return (
            json.dumps({key: value for key, value in arguments.items() if value}, indent=2, ensure_ascii=False) + "\n"
        )

    def submit(self, text: str, job: Job) -> str:
        from huggingface_hub import HfApi

        arguments = json.loads(text)
        arguments["secrets"] = read_secrets(self.launch.secrets)
        arguments["volumes"] = [_read_mount(source, path) for source, path in self.launch.mounts.items()]
        with _hub_errors():
            return HfApi().run_job(**arguments).id

    def status(self, job_id: str) -> str:
        from huggingface_hub import HfApi

        with _hub_errors():
            status = HfApi().inspect_job(job_id=job_id, namespace=self.settings.namespace).status
        return ": ".join(filter(None, [str(getattr(status.stage, "value", status.stage)), status.message]))

    def show_logs(self, job_id: str, folder: Path, follow: bool) -> None:
        from huggingface_hub import HfApi

        with _hub_errors():
            for line in HfApi().fetch_job_logs(job_id=job_id, namespace=self.settings.namespace, follow=follow):
                print(line, flush=True)

    def cancel(self, job_id: str) -> None:
        from huggingface_hub import HfApi

        with _hub_errors():
            HfApi().cancel_job(job_id=job_id, namespace=self.settings.namespace)


def _read_mount(source: str, path: str) -> Any:
    """Return the volume of hf://buckets/OWNER/NAME, hf://datasets/OWNER/NAME or hf://OWNER/NAME, a model."""
    try:
        from huggingface_hub import Volume
        from huggingface_hub.utils import parse_hf_mount  # type: ignore[attr-defined]
    except ImportError:
        fix = "pip install --upgrade huggingface_hub"
        raise InputError.at("launch.mounts", "needs a newer release of huggingface_hub", fix) from None

    try:
        mount = parse_hf_mount(f"{source}:{path}")
    except ValueError as error:
        fix = "write hf://buckets/OWNER/NAME for a bucket, hf://datasets/OWNER/NAME for a data set"
        raise InputError.at("launch.mounts", f"{source}: {error}", fix) from None
    inner = mount.source
    return Volume(
        type=inner.type,
        source=inner.id,
        mount_path=mount.mount_path,
        read_only=mount.read_only,
        path=inner.path_in_repo or None,
        revision=inner.revision or None,
    )


@contextmanager
def _hub_errors() -> Iterator[None]:
    """Raise errors of the hub inside the block as InputError or WorkError."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    log_in = "log in: hf auth login, or export HF_TOKEN"
    try:
        yield
    except LocalTokenNotFoundError:
        raise InputError.at(_WHERE, "there is no token for the hub", log_in) from None
    except OfflineModeIsEnabled:
        raise InputError.at("HF_HUB_OFFLINE", "is set, so the hub is not used", "unset it") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        message = " ".join(str(error.server_message or error.response.reason_phrase or error).split())[:300]
        if status == 401:
            raise InputError.at(_WHERE, f"the hub does not accept the token (401): {message}", log_in) from None
        fix = (
            "see hf.co/settings/billing: jobs need a paid account"
            if status in (402, 403)
            else "fix that, and try again"
        )
        raise WorkError.at(_WHERE, f"the hub refused ({status}): {message}", fix) from None
    except httpx.TransportError as error:
        raise WorkError.at(_WHERE, f"the hub cannot be reached: {error}", "check the network and HF_ENDPOINT") from None
