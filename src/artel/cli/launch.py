"""`artel launch`: submit a run to a cluster or a cloud, and follow it. Each launcher has a command of its own."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperGroup

from artel.cli.common import AsJson, RunName, print_json, print_status
from artel.cli.streams import print_result
from artel.registry import LAUNCHERS

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_OTHER_FLAGS = {"queue": ("--partition",), "environment": ("--env",)}
Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]... [-- COMMAND]",
        help="Overrides; and after -- a command to run in place of `train RUN`: prepare, evaluate, generate --prompts "
        "or data mine.",
    ),
]
JobName = Annotated[str, typer.Argument(metavar="RUN", help="The run file or run folder of a job.")]


class _Launchers(TyperGroup):
    """The commands of `artel launch`: one per launcher, made when it is asked for, and those that follow a job."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*(name.replace("_", "-") for name in LAUNCHERS.names), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or _launcher_command(cmd_name)


app = typer.Typer(cls=_Launchers, no_args_is_help=True, help="Submit a run to a cluster or a cloud, and follow it.")


@app.callback()
def launch() -> None:
    """Submit a run to a cluster or a cloud, and follow it.

    Example: artel launch slurm run.yaml --nodes 2 --gpus 8 --time 12:00:00
    """


@app.command(short_help="Show the state of a run's job.")
def status(name: JobName, as_json: AsJson = False) -> None:
    """Show the state of the newest job of a run, as its backend calls it.

    Example: artel launch status runs/tolstoy
    """
    from artel.launching.submit import open_submission

    submission = open_submission(name)
    state = submission.launcher.status(submission.job)
    if as_json:
        print_json({"job": submission.job, "state": state})
    else:
        print_result(f"{submission.job}: {state}")


@app.command(short_help="Show the output of a run's job.")
def logs(
    name: JobName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job ends.")] = False,
) -> None:
    """Show the output of the newest job of a run.

    Example: artel launch logs runs/tolstoy --follow
    """
    from artel.launching.submit import open_submission

    submission = open_submission(name)
    submission.launcher.show_logs(submission.job, submission.folder, follow)


@app.command(short_help="Cancel a run's job.")
def cancel(name: JobName) -> None:
    """Cancel the newest job of a run. It saves before it ends, if its backend leaves it the time.

    Example: artel launch cancel runs/tolstoy
    """
    from artel.launching.submit import open_submission

    submission = open_submission(name)
    submission.launcher.cancel(submission.job)
    print_status(f"canceled job {submission.job}")


def _launcher_command(command: str) -> Any:
    """Return the command of a launcher. Its options are the keys of `launch` and of the launcher's own settings."""
    from artel.config import LaunchConfig

    to = command.replace("-", "_")
    settings = LAUNCHERS.get_settings(to)
    keys = {f"launch.{name}": field for name, field in LaunchConfig.model_fields.items() if name != "to"}
    keys |= {f"launch.{to}.{name}": field for name, field in (settings.model_fields if settings else {}).items()}
    options = {key.rpartition(".")[2]: key for key in keys}

    def run(name: str, overrides: list[str] | None, dry_run: bool, as_json: bool, **values: Any) -> None:
        words = [f"launch.to={to}"]
        for option, value in values.items():
            if value is not None and value != []:
                key = options[option]
                words.append(f"{key}={_override_value(option, keys[key], value)}")
        _launch(name, [*words, *(overrides or [])], dry_run=dry_run, as_json=as_json)

    parameters = [
        ("name", RunName, inspect.Parameter.empty),
        ("overrides", Command, None),
        *((option, _option(option, keys[key]), None) for option, key in options.items()),
        ("dry_run", Annotated[bool, typer.Option("--dry-run", help="Print the job without submitting it.")], False),
        ("as_json", AsJson, False),
    ]
    run.__doc__ = f"Submit a run to {command}.\n\nExample: artel launch {command} run.yaml --nodes 1 --dry-run"
    _set_signature(run, parameters)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(command, short_help=f"Submit a run to {command}.")(run)
    return typer.main.get_command(alone)


def _set_signature(function: Callable[..., None], parameters: list[tuple[str, Any, Any]]) -> None:
    kind = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature([inspect.Parameter(n, kind, default=d, annotation=a) for n, a, d in parameters])
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {name: annotation for name, annotation, _ in parameters}


def _option(name: str, field: FieldInfo) -> Any:
    """Return the type of the option of a key: text, or a list for a key that holds a list or a mapping."""
    is_many, _, is_mapping = _shape(field)
    flag = name.removesuffix("s") if is_many and name != "nodes" else name
    flags = [f"--{flag.replace('_', '-')}", *_OTHER_FLAGS.get(name, ())]
    if is_many:
        metavar = "NAME=VALUE" if is_mapping else "VALUE"
        return Annotated[
            list[str] | None, typer.Option(*flags, metavar=metavar, help=f"{field.description} Repeatable.")
        ]
    return Annotated[str | None, typer.Option(*flags, metavar="VALUE", help=field.description)]


def _shape(field: FieldInfo) -> tuple[bool, bool, bool]:
    """Return (True for a list or mapping, True for text, True for a mapping)."""
    kinds = [field.annotation]
    while any(isinstance(kind, types.UnionType) or get_origin(kind) is Annotated for kind in kinds):
        kinds = [inner for kind in kinds for inner in (get_args(kind) or [kind])]
    origins = {get_origin(kind) or kind for kind in kinds}
    return bool(origins & {list, dict}), bool(origins & {str, Literal}), dict in origins


def _override_value(option: str, field: FieldInfo, value: Any) -> str:
    """Return the value of an option as in an override, which is YAML. Raise InputError if it has no =."""
    from artel.errors import InputError, Problem

    is_many, is_text, is_mapping = _shape(field)
    if is_mapping:
        fix = "write NAME=VALUE, e.g. account=nlp"
        if problems := [Problem(f"--{option}", f"{text!r} has no =", fix) for text in value if "=" not in text]:
            raise InputError(problems)
        value = dict(text.split("=", 1) for text in value)
    return json.dumps(value) if is_many or is_text or option == "time" else str(value)


def _launch(name: str, words: list[str], *, dry_run: bool, as_json: bool) -> None:
    from artel.config import Overrides
    from artel.launching.submit import find_launcher, make_job, submit

    start = next((index for index, word in enumerate(words) if "=" not in word), len(words))
    job = make_job(name, Overrides.parse(words[:start]), words[start:])
    launcher = find_launcher(job.launch)
    text = launcher.describe(job)
    job_id = None if dry_run else submit(launcher, text, job).job
    if as_json:
        print_json({"job": job_id, "text": text})
    elif dry_run:
        print_result(text, end="")
    else:
        print_status(f"submitted job {job_id}; follow it: artel launch logs {job.folder} --follow")
