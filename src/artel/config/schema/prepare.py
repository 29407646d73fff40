"""The section `prepare`: where the text of a run is prepared. None of its keys changes the result."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from artel.config.sbatch import check_one_line, format_directive
from artel.config.schema.base import Section, runtime_only
from artel.config.schema.quantities import Bytes, ProcessCount


class SlurmConfig(Section):
    cpus: ProcessCount = runtime_only(
        1, "Processes per job, each with a core: all cores of a node if the cluster allocates only whole nodes."
    )
    memory: Bytes = runtime_only(4_000_000_000, "Memory per process, in bytes.", ge=1)
    setup: list[str] = runtime_only(
        [], "Shell lines before the work, e.g. module load python, source .venv/bin/activate."
    )
    options: dict[str, str] = runtime_only(
        {}, "Additional options of sbatch, e.g. {partition: cpu, time: '48:00:00'}. By default a job has 24 hours."
    )

    @field_validator("setup")
    @classmethod
    def _check_setup(cls, value: list[str]) -> list[str]:
        return [check_one_line(line) for line in value]

    @field_validator("options")
    @classmethod
    def _check_options(cls, value: dict[str, str]) -> dict[str, str]:
        for name, option in value.items():
            format_directive(name, option)
        return value


class PrepareConfig(Section):
    engine: Literal["local", "slurm", "ray"] = runtime_only(
        "local",
        "Where to prepare the text: processes on this host, Slurm jobs or Ray tasks (extra `cluster`). The store "
        "is the same, byte for byte.",
    )
    workers: Literal["auto"] | ProcessCount = runtime_only(
        "auto", "Concurrent workers; auto: the cores of this host or of the Ray cluster, or 64 Slurm jobs."
    )
    part: Bytes = runtime_only(
        64_000_000,
        "Approximate bytes of input per shard: what a worker processes at a time and what a kill can lose. Packed "
        "files are not divided.",
        ge=1,
    )
    slurm: SlurmConfig = runtime_only(SlurmConfig(), "engine: slurm. Resources of the jobs.")
