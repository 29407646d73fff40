"""The section of a run file about benchmarks that must not be learned."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from artel.config.schema.base import Name, OneOrMore, Section
from artel.config.schema.quantities import Count
from artel.config.schema.registered import FormatName


class BenchmarkConfig(Section):
    path: Name = Field(
        default="",
        description="File, glob, folder or address with the benchmark's rows, as a source; each line of a text is one.",
    )
    task: str = Field(
        default="",
        description="In place of a path: a task of lm-evaluation-harness (arc_easy), whose data must be here already, "
        "or the YAML file of a task of your own. Needs artel-lm[tasks].",
    )
    format: FormatName = Field(default="auto", description="What the files hold, as in data.sources.")
    query: Annotated[list[str], OneOrMore] = Field(
        default=[],
        description="jsonl, parquet, csv: the fields that hold the question, OUTER.NAME inside of an object; texts in "
        "a list are joined.",
    )
    label: Annotated[list[str], OneOrMore] = Field(
        default=[],
        description="jsonl, parquet, csv: the fields that hold the answer; of a list each text is an answer. Without "
        "query and label the rows are read as by data.sources: the field text, or what a pair, a question, a "
        "conversation or a preference consists of.",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> BenchmarkConfig:
        if bool(self.path) == bool(self.task):
            raise ValueError("a benchmark is either files or a task; write path: bench.jsonl, or task: arc_easy")
        shaping = [name for name in ("query", "label") if getattr(self, name)]
        if self.task and shaping:
            raise ValueError(f"a task says itself what it asks; leave {' and '.join(shaping)} out")
        return self


def _benchmark(value: Any) -> Any:
    """A text alone is a path if it looks like one, else a task, or the YAML file of one."""
    if isinstance(value, str):
        is_path = any(mark in value for mark in "./\\*?[") and not value.endswith((".yaml", ".yml"))
        return {"path" if is_path else "task": value}
    return value


Benchmark = Annotated[BenchmarkConfig, BeforeValidator(_benchmark, json_schema_input_type=str | BenchmarkConfig)]


class DecontaminateConfig(Section):
    benchmarks: Annotated[list[Benchmark], Field(min_length=1), OneOrMore] = Field(
        description="Files, or tasks of lm-evaluation-harness."
    )
    words: Count = Field(
        default=12,
        ge=2,
        le=100,
        description="Words in an n-gram; a row of a benchmark with fewer cannot be found, and is counted.",
    )


def benchmarks_alone(value: Any) -> Any:
    """A list of benchmarks, or one, stands for the section with nothing else in it."""
    is_one = isinstance(value, dict) and bool({"path", "task"} & value.keys())
    return {"benchmarks": [value] if is_one else value} if is_one or isinstance(value, str | list) else value


Decontaminate = Annotated[
    DecontaminateConfig | None,
    BeforeValidator(
        benchmarks_alone, json_schema_input_type=str | BenchmarkConfig | list[Benchmark] | DecontaminateConfig | None
    ),
]
