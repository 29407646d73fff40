"""The section `launch`: what `artel launch` asks of a cluster or a cloud. None of its keys changes the result."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator

from artel.config.schema.base import runtime_only
from artel.config.schema.quantities import Bytes, Count, ProcessCount, Seconds, read_seconds
from artel.config.schema.registered import LauncherName, NamingSection
from artel.registry import LAUNCHERS
from artel.secrets import hide_secrets

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")


def _read_time(value: object) -> object:
    """Read 12h or 12:00:00. Refuse `"90"`: Slurm would take it for minutes."""
    if isinstance(value, str) and (clock := _CLOCK.fullmatch(value)):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if isinstance(value, str) and value.isdecimal():
        raise ValueError(f"{value!r} has no unit; write, for example, {value}min or 12:00:00")
    return read_seconds(value)


class LaunchConfig(NamingSection):
    registries: ClassVar = {"to": LAUNCHERS}
    to: LauncherName | None = runtime_only(None, "Where to run; `artel launch NAME` sets it.")
    nodes: ProcessCount = runtime_only(1, "Number of nodes.")
    nproc: ProcessCount | None = runtime_only(None, "Processes per node (null: one per GPU, or 1).")
    gpus: Count = runtime_only(0, "GPUs per node.")
    cpus: ProcessCount | None = runtime_only(None, "CPU cores per node.")
    memory: Bytes | None = runtime_only(None, "Memory per node, in bytes.", ge=1)
    time: Annotated[Seconds, BeforeValidator(_read_time, json_schema_input_type=float | str)] | None = runtime_only(
        None, "Time limit of the job, e.g. 12h or 12:00:00."
    )
    image: str | None = runtime_only(None, "Container image with artel.", min_length=1)
    queue: str | None = runtime_only(None, "Queue: a partition of Slurm, a LocalQueue of Kueue.", min_length=1)
    mounts: dict[str, Annotated[str, Field(pattern="^/.+")]] = runtime_only(
        {},
        "Storage and the folder where the job sees it, e.g. {training-data: /data}. The command starts in the first: "
        "relative paths of the run file are paths in it.",
    )
    environment: dict[str, str] = runtime_only({}, "Environment variables of the job.")
    secrets: list[str] = runtime_only(
        [], "Names of environment variables whose values are secret, e.g. HF_TOKEN. Values are never written."
    )
    setup: list[str] = runtime_only([], "Shell lines before the command, e.g. module load cuda.")
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = runtime_only(
        3, "Restarts after failures: of the processes of a node, and of the nodes where the backend can."
    )

    @property
    def processes(self) -> int:
        """Processes per node."""
        return self.nproc or self.gpus or 1

    @field_validator("environment", "secrets")
    @classmethod
    def _check_variables(cls, value: Any) -> Any:
        for name in value:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a variable; write letters, digits and underscores")
        return value

    @field_validator("environment")
    @classmethod
    def _check_no_secret(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if hide_secrets(f"?{name}={text}") != f"?{name}={text}":
                raise ValueError(f"{name} has a secret; write launch.secrets: [{name}], and export {name}")
        return value
