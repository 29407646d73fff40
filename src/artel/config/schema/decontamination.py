"""The section `data.decontaminate`: benchmarks that must not be in the training text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from artel.config.schema.base import Name, OneOrMore, Section
from artel.config.schema.quantities import Count
from artel.config.schema.registered import FormatName


class BenchmarkConfig(Section):
    """A benchmark: files, or a task of lm-evaluation-harness."""

    path: Name = Field(
        default="",
        description="File, glob, folder or URL of the benchmark's rows, as in data.sources. A line of text is a row.",
    )
    task: str = Field(
        default="",
        description="Task of lm-evaluation-harness instead of a path (e.g. arc_easy), or a YAML file of your own; "
        "its data must be cached already. Needs artel-lm[tasks].",
    )
    format: FormatName = Field(default="auto", description="Format of the files, as in data.sources.")
    query: Annotated[list[str], OneOrMore] = Field(
        default=[],
        description="jsonl, parquet, csv: fields of the question, OUTER.NAME within an object; texts in a list are "
        "joined.",
    )
    label: Annotated[list[str], OneOrMore] = Field(
        default=[],
        description="jsonl, parquet, csv: fields of the answer; each text in a list is an answer. Without query and "
        "label, rows are read as in data.sources: the field text, or the fields of a pair, a question, a "
        "conversation, a preference or a prompt.",
    )

    @model_validator(mode="after")
    def _check_origin(self) -> BenchmarkConfig:
        if bool(self.path) == bool(self.task):
            raise ValueError("a benchmark needs either path or task; write e.g. path: bench.jsonl, or task: arc_easy")
        shaping = [name for name in ("query", "label") if getattr(self, name)]
        if self.task and shaping:
            raise ValueError(f"a task defines {' and '.join(shaping)} itself; remove {' and '.join(shaping)}")
        return self


def _parse_benchmark(value: Any) -> Any:
    """Convert a string to a section: a path if it looks like one, otherwise a task or the YAML file of one."""
    if isinstance(value, str):
        is_path = any(mark in value for mark in "./\\*?[") and not value.endswith((".yaml", ".yml"))
        return {"path" if is_path else "task": value}
    return value


Benchmark = Annotated[BenchmarkConfig, BeforeValidator(_parse_benchmark, json_schema_input_type=str | BenchmarkConfig)]


class DecontaminateConfig(Section):
    """Benchmarks to search for in the training text, and the length of a match."""

    benchmarks: Annotated[list[Benchmark], Field(min_length=1), OneOrMore] = Field(
        description="Files, or tasks of lm-evaluation-harness, to search for."
    )
    words: Count = Field(
        default=12,
        ge=2,
        le=100,
        description="Words per n-gram; benchmark rows with fewer words cannot be found and are counted.",
    )


def wrap_benchmarks(value: Any) -> Any:
    """Convert a list of benchmarks, or one benchmark, to a section with only these."""
    if isinstance(value, str | list):
        return {"benchmarks": value}
    if isinstance(value, dict) and {"path", "task"} & value.keys():
        return {"benchmarks": [value]}
    return value


Decontaminate = Annotated[
    DecontaminateConfig | None,
    BeforeValidator(
        wrap_benchmarks, json_schema_input_type=str | BenchmarkConfig | list[Benchmark] | DecontaminateConfig | None
    ),
]
