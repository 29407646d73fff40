"""The section `data.decontaminate`: benchmarks that must not be in the training text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from artel.config.schema.base import Name, OneOrMore, Section
from artel.config.schema.quantities import Count
from artel.config.schema.registered import FormatName

Place = Literal["query", "label", "overlap"]


class BenchmarkConfig(Section):
    path: Name = Field(default="", description="File, glob, folder or URL of the benchmark's rows, as in data.sources.")
    task: str = Field(
        default="",
        description="Task of lm-evaluation-harness (e.g. arc_easy) instead of a path; its data must be cached already. "
        "Needs artel-lm[tasks].",
    )
    task_folder: Name = Field(default="", description="Folder with custom task files, one of them `task`.")
    format: FormatName = Field(default="auto", description="Format of the files, as in data.sources.")
    document: Literal["file", "line", "paragraph"] = Field(
        default="line", description="text: unit of a row: a line, a paragraph (separated by blank lines) or the file."
    )
    query: Annotated[list[str], OneOrMore] = Field(
        default=[],
        description="jsonl, parquet, csv: fields of the question, OUTER.NAME within an object; texts in a list are "
        "joined.",
    )
    label: Annotated[list[str], OneOrMore] = Field(
        default=[],
        description="jsonl, parquet, csv: fields of the answer; each text in a list is an answer. Without query and "
        "label, rows are read as in data.sources: the field text, or the fields of a pair, a question, a "
        "conversation or a preference.",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> BenchmarkConfig:
        if bool(self.path) == bool(self.task):
            raise ValueError("a benchmark needs either path or task; write e.g. path: bench.jsonl, or task: arc_easy")
        shaping = [name for name in ("query", "label") if getattr(self, name)]
        if self.task and shaping:
            raise ValueError(f"a task defines {' and '.join(shaping)} itself; remove {' and '.join(shaping)}")
        if self.task_folder and not self.task:
            raise ValueError("task_folder is only used with task; remove it")
        return self


def _benchmark(value: Any) -> Any:
    """Convert a string to a section: a path if it looks like one, otherwise a task."""
    if isinstance(value, str):
        return {"path" if any(mark in value for mark in "./\\*?[") else "task": value}
    return value


Benchmark = Annotated[BenchmarkConfig, BeforeValidator(_benchmark, json_schema_input_type=str | BenchmarkConfig)]


class DecontaminateConfig(Section):
    benchmarks: Annotated[list[Benchmark], Field(min_length=1), OneOrMore] = Field(
        description="Files, or tasks of lm-evaluation-harness, to search for."
    )
    words: Count = Field(
        default=12,
        ge=2,
        le=100,
        description="Words per n-gram; benchmark rows with fewer words cannot be found and are counted.",
    )
    look_at: Annotated[list[Place], Field(min_length=1), OneOrMore] = Field(
        default=["query", "label", "overlap"],
        description="Origin of a row's n-grams: its question, its answer, and across the two. datatrove uses [label, "
        "overlap], which keeps texts that contain only the question or its passage.",
    )


def benchmarks_alone(value: Any) -> Any:
    """Convert a list of benchmarks, or one benchmark, to a section with only these."""
    is_one = isinstance(value, dict) and bool({"path", "task"} & value.keys())
    return {"benchmarks": [value] if is_one else value} if is_one or isinstance(value, str | list) else value


Decontaminate = Annotated[
    DecontaminateConfig | None,
    BeforeValidator(
        benchmarks_alone, json_schema_input_type=str | BenchmarkConfig | list[Benchmark] | DecontaminateConfig | None
    ),
]
