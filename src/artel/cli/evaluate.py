"""`artel evaluate`: compare models by their metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from artel.cli.common import AsJson, print_json, print_status
from artel.launching.quiet_libraries import quiet_libraries

if TYPE_CHECKING:
    from artel.inference import EvaluationResult


def evaluate(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Runs, model folders or hub ids, and overrides such as data.block=256."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="File, folder or glob to evaluate on in full, or a run file (its validation split)."),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(help="Question answering: write predictions in SQuAD's or NQ's format to this file."),
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(
            help="Embeddings: corpus to search with the queries of --data (a file or glob, added to its texts), or a "
            "folder in BEIR format, which has its own queries."
        ),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="Evaluate on these tasks of lm-evaluation-harness, or YAML files, e.g. lambada_openai,my.yaml. For "
            "embeddings and rerankers: tasks of MTEB, e.g. NFCorpus."
        ),
    ] = "",
    task_folder: Annotated[str | None, typer.Option(help="Folder with custom task files.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum examples per task.")] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate models by their objective's metrics, on the validation split of their run or on other data.

    Example: artel evaluate runs/tolstoy runs/tolstoy-finetune --data novel.txt
    """
    models, overrides = [name for name in names if "=" not in name], [name for name in names if "=" in name]
    if models:
        print_status(f"loading {', '.join(models)}")
    quiet_libraries()
    from artel.config import Overrides
    from artel.errors import InputError
    from artel.inference import evaluate as evaluate_model
    from artel.inference import evaluate_on_corpus, open_model
    from artel.launching.hosts import choose_process_interface
    from artel.launching.launcher_environment import check_worker
    from artel.parallel import join_world
    from artel.storage import check_new_file

    if not models:
        raise InputError.at("MODEL", "missing", "use e.g. artel evaluate runs/NAME")
    if predictions is not None and len(models) > 1:
        raise InputError.at("--predictions", "works with one model only", "evaluate each model separately")
    if predictions is not None:
        check_new_file(predictions, "--predictions")
    _check_combination(overrides, data, predictions, corpus, tasks)
    if tasks:
        _run_tasks(models, tasks.split(","), task_folder, limit, as_json)
        return
    check_worker()
    if corpus is not None:
        results = [evaluate_on_corpus(open_model(name), corpus, data) for name in models]
        _print_results(results, as_json)
        return
    choose_process_interface()
    with join_world(None) as world:
        results = [evaluate_model(open_model(name), data, Overrides.parse(overrides), world) for name in models]
        if predictions is not None and world.first:
            _write_predictions(results[0], predictions)
    _print_results(results, as_json)


def _check_combination(
    overrides: list[str], data: str | None, predictions: Path | None, corpus: str | None, tasks: str
) -> None:
    """Raise InputError for options that --corpus or --tasks ignore."""
    from artel.errors import InputError, Problem

    flag = "--tasks" if tasks else "--corpus" if corpus is not None else ""
    ignored_options = {
        "overrides": overrides,
        "--predictions": predictions,
        "--data": data if tasks else None,
        "--corpus": corpus if tasks else None,
    }
    problems = [
        Problem(key, f"cannot be combined with {flag}", "remove it") for key, value in ignored_options.items() if value
    ]
    if flag and problems:
        raise InputError(problems)


def _print_results(results: list[EvaluationResult], as_json: bool) -> None:
    from artel.reports.details import detail_lines, read_details

    print_status(*_format_table(results))
    for result in results:
        if result.details:
            print_status(
                *([f"{result.model}:"] if len(results) > 1 else []), *detail_lines(read_details(result.details))
            )
    if as_json:
        print_json({"models": [result.to_json() for result in results]})


def _write_predictions(result: EvaluationResult, file: Path) -> None:
    from artel.errors import InputError
    from artel.storage import write_output

    if result.predictions is None:
        raise InputError.at("--predictions", f"{result.model} is not a question-answering model", "remove it")
    write_output(file, json.dumps(result.predictions, ensure_ascii=False, indent=1))
    print_status(f"answers to {result.documents:,} questions: {file}")


def _format_table(results: list[EvaluationResult]) -> list[str]:
    """Return the lines of a table with a row per model and a column per metric, then a line on the size of the data."""
    columns = list(dict.fromkeys(name for result in results for name in result.metrics))
    rows = [["model", *(name.replace("_", " ") for name in columns)]]
    rows += [
        [result.model, *(f"{result.metrics[name]:,.4f}" if name in result.metrics else "-" for name in columns)]
        for result in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns) + 1)]
    lines = ["  ".join([f"{row[0]:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return [*lines, results[0].data_size]


def _run_tasks(models: list[str], tasks: list[str], folder: str | None, limit: int | None, as_json: bool) -> None:
    from artel.inference import open_model, run_tasks

    results_by_model: dict[str, Any] = {name: run_tasks(open_model(name), tasks, folder, limit) for name in models}
    for name, results in results_by_model.items():
        for task, metrics in results["results"].items():
            scores = " · ".join(
                f"{key.split(',')[0]} {value:.4f}" for key, value in metrics.items() if isinstance(value, float)
            )
            print_status(f"{name}  {task}: {scores}")
    if as_json:
        print_json({"models": results_by_model})
