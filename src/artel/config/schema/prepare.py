"""The section of a run file about where its text is prepared; nothing in it changes what comes out."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from artel.config.sbatch import directive, one_line
from artel.config.schema.base import Section, free
from artel.config.schema.quantities import Bytes, ProcessCount


class SlurmConfig(Section):
    cpus: ProcessCount = free(
        1, "Processes of a job, each with a core: as many as a node has where the cluster allocates only whole nodes."
    )
    memory: Bytes = free(4_000_000_000, "Memory of a process, in bytes.", ge=1)
    setup: list[str] = free([], "Shell lines run before the work: module load python, source .venv/bin/activate.")
    options: dict[str, str] = free(
        {}, "Further options of sbatch: {partition: cpu, time: '48:00:00'}. A job has 24 hours by default."
    )

    @field_validator("setup")
    @classmethod
    def _lines(cls, value: list[str]) -> list[str]:
        return [one_line(line) for line in value]

    @field_validator("options")
    @classmethod
    def _options(cls, value: dict[str, str]) -> dict[str, str]:
        for name, option in value.items():
            directive(name, option)
        return value


class PrepareConfig(Section):
    engine: Literal["local", "slurm", "ray"] = free(
        "local",
        "Where the text is prepared: processes here, jobs of Slurm, or tasks of Ray (extra `cluster`). The "
        "store is the same, byte for byte.",
    )
    workers: Literal["auto"] | ProcessCount = free(
        "auto", "Processes that make parts at a time; auto: the cores here, as many as Ray has, 64 jobs of Slurm."
    )
    part: Bytes = free(
        64_000_000,
        "Bytes of input, about, in a part: what a worker takes at a time and a kill can lose. Packed files are not "
        "divided.",
        ge=1,
    )
    slurm: SlurmConfig = free(SlurmConfig(), "engine slurm: what its jobs request.")
