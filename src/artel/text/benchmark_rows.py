"""Rows of benchmarks, from files or from tasks of lm-evaluation-harness (Gao et al. 2021; the extra `tasks`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from artel.config import BenchmarkConfig, DataConfig, SourceConfig
from artel.errors import InputError, Problem, missing_extra
from artel.registry import FORMATS
from artel.text.formats.format import choose_format
from artel.text.formats.jsonl import describe_fields, get_nested_field, read_rows, require_object
from artel.text.formats.table import read_csv_rows
from artel.text.reading.source_file import SourceFile
from artel.text.records import (
    BadRecord,
    Conversation,
    DroppedRecord,
    Match,
    Message,
    Pair,
    Preference,
    Prompt,
    Question,
    Record,
    Rejected,
)
from artel.text.sources.find import check_files
from artel.text.sources.inputs import Input, list_inputs, read_inputs, read_or_reject

# Problems listed per benchmark. If a field is wrong, it is wrong in every row.
_MAX_PROBLEMS = 5


class Row(NamedTuple):
    """A row of a benchmark."""

    origin: str
    """`file:line`, `file[index]`, or the task and the index of its example."""
    query: str
    labels: list[str]


def benchmark_source(benchmark: BenchmarkConfig) -> SourceConfig:
    """Return the source that reads the files of a benchmark."""
    return SourceConfig(path=[benchmark.path], format=benchmark.format, document="line")


def benchmark_files(benchmark: BenchmarkConfig, key: str, data: DataConfig) -> list[Input]:
    """Return the files of a benchmark. Raise InputError if there are none."""
    return list(list_inputs(benchmark_source(benchmark), key, data))


def file_problems(benchmark: BenchmarkConfig, key: str) -> list[Problem]:
    """Return the problems of a benchmark's files that can be found without reading them."""
    if not FORMATS[benchmark.format].has_files:
        return [Problem(f"{key}.format", f"{benchmark.format} has no files", "use a file format, or remove it")]
    return check_files(benchmark_source(benchmark), key)


def file_rows(benchmark: BenchmarkConfig, key: str, data: DataConfig) -> Iterator[Row]:
    """Yield the rows of the files of a benchmark. Raise InputError for rows that cannot be used. No row is skipped."""
    source = benchmark_source(benchmark)
    problems: list[Problem] = []
    names_fields = benchmark.query or benchmark.label
    read = partial(_read_rows_by_fields, benchmark) if names_fields else _read_rows_by_format
    for item in read_inputs(benchmark_files(benchmark, key, data), source, data, read, key=key):
        if isinstance(item, Row):
            yield item
            continue
        fix = f"name the fields: {{path: {benchmark.path}, query: question, label: answer}}"
        problems.append(Problem(item.origin, item.detail.partition(";")[0], fix))
        if len(problems) == _MAX_PROBLEMS:
            break
    if problems:
        raise InputError(problems)


def _read_rows_by_format(file: SourceFile) -> Iterator[Row | Rejected]:
    """Yield the rows of a file as its format reads them."""
    for item in read_or_reject(choose_format(file.source, file.origin, file.content_type).read, file):
        if isinstance(item, Record):
            yield Row(item.origin, *query_and_labels(item))
        elif not isinstance(item, DroppedRecord):
            yield item


def _read_rows_by_fields(benchmark: BenchmarkConfig, file: SourceFile) -> Iterator[Row | Rejected]:
    """Yield the rows of a file, from the fields that the benchmark names."""
    for origin, fields in _read_objects(benchmark, file):
        try:
            row = require_object(fields)
            query = [text for name in benchmark.query for text in _get_texts(row, name, "query")]
            labels = [text for name in benchmark.label for text in _get_texts(row, name, "label")]
            is_one_answer = len(benchmark.label) > 1
            yield Row(origin, "\n".join(query), ["\n".join(labels)] if is_one_answer else labels)
        except BadRecord as error:
            yield file.reject(origin, error)


def _read_objects(benchmark: BenchmarkConfig, file: SourceFile) -> Iterator[tuple[str, Any]]:
    if not file.origin.lower().endswith((".csv", ".tsv")) and not FORMATS[benchmark.format].is_table:
        yield from read_rows(file)
        return
    names = [*benchmark.query, *benchmark.label]
    keys = ["query"] * len(benchmark.query) + ["label"] * len(benchmark.label)
    for origin, values in read_csv_rows(file, list(zip(keys, names, strict=True))):
        yield origin, values if isinstance(values, BadRecord) else dict(zip(names, values, strict=True))


def _get_texts(row: dict[str, Any], name: str, key: str) -> list[str]:
    """Return the texts in a field. A dot in its name selects a field of an object.

    Raise BadRecord if the row lacks the field, or the field has something other than texts.
    """
    value = get_nested_field(row, name)
    if value is None:
        raise BadRecord("no_field", f"has no field {name!r} ({key}; it has: {describe_fields(row)})")
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) for item in values):
        raise BadRecord("no_text", f"field {name!r} is {type(value).__name__}, not a text or a list of texts")
    return list(map(str, values))


def query_and_labels(record: Record) -> tuple[str, list[str]]:
    """Return the question of a record and its answers. A plain text is an answer without a question."""
    fields = record.fields
    if isinstance(fields, Pair):
        return fields.input, [fields.output]
    if isinstance(fields, Question):
        return f"{fields.context}\n{fields.question}", [fields.context[start:end] for start, end in fields.answers]
    if isinstance(fields, Conversation):
        return _join_messages(fields.messages[:-1]), [_join_messages(fields.messages[-1:])]
    if isinstance(fields, Preference):
        answers = [answer for answer in (fields.chosen, fields.rejected) if answer is not None]
        return _join_messages(fields.prompt), [_join_messages([answer]) for answer in answers]
    if isinstance(fields, Prompt):
        answer = fields.columns.get("answer")
        return record.text, [answer] if isinstance(answer, str) else []
    if isinstance(fields, Match):
        return fields.query, [*fields.positives, *fields.negatives]
    return "", [record.text]


def _join_messages(messages: Iterable[Message]) -> str:
    return "\n".join(text for message in messages for text in (message.thought, message.content) if text)


def task_problems(benchmark: BenchmarkConfig, key: str) -> list[Problem]:
    """Return a problem if the harness is not installed. Task names are checked later: listing them takes seconds."""
    return [] if find_spec("lm_eval") else list(missing_extra("lm_eval", "tasks", key).problems)


def task_rows(benchmark: BenchmarkConfig, key: str) -> Iterator[Row]:
    """Yield the evaluation examples of a task, or of all tasks of a group.

    Raise InputError if the task is unknown or its examples cannot be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "false")  # else datasets reports each file it opens to the Hub
    from lm_eval.tasks import TaskManager

    # Listing the tasks of the harness takes half a minute of CPU time.
    is_file = benchmark.task.endswith((".yaml", ".yml"))
    manager = TaskManager(include_defaults=not is_file)
    if is_file and not Path(benchmark.task).is_file():
        raise InputError.at(key, f"there is no file {benchmark.task}", "use the name of a task, or its YAML file")
    if not is_file and benchmark.task not in {*manager.all_tasks, *manager.all_groups, *manager.all_tags}:
        fix = (
            "list tasks with lm-eval ls tasks; use a YAML file for your own task, or {path: NAME} for a file or folder"
        )
        raise InputError.at(key, f"the harness has no task {benchmark.task!r}", fix)
    try:
        tasks = manager.load([benchmark.task])["tasks"]
    except Exception as error:  # datasets raises anything if its files are missing and there is no network
        reason = str(error).strip().partition("\n")[0][:200]
        fix = f"download them once with network access: lm-eval run --tasks {benchmark.task} --limit 1 …"
        raise InputError.at(key, f"the data of {benchmark.task} cannot be read: {reason}", fix) from None
    for name, task in tasks.items():
        for index, example in enumerate(task.eval_docs):
            yield Row(f"{name}[{index}]", _build_query(task, example), _find_labels(task, example))


def _build_query(task: Any, example: Any) -> str:
    query = task.doc_to_text(example)
    if isinstance(query, str):
        return query
    choices = _list_choices(task, example)  # an index: one of the choices is the question (winogrande)
    return choices[query] if isinstance(query, int) and query < len(choices) else ""


def _find_labels(task: Any, example: Any) -> list[str]:
    """Return the correct answers, as texts of the choices if the task has choices."""
    target = task.doc_to_target(example)
    choices = _list_choices(task, example)
    targets = target if isinstance(target, list) else [target]
    return [choices[item] if isinstance(item, int) and item < len(choices) else str(item) for item in targets]


def _list_choices(task: Any, example: Any) -> list[str]:
    if getattr(task.config, "doc_to_choice", None) is None:
        return []
    return list(map(str, task.doc_to_choice(example)))
