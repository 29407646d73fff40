"""The command `artel`: its verbs, and how errors become messages and exit statuses.

0 done, 1 the work failed, 2 the input was wrong, 130 interrupted (the same command goes on). Verbs import what they
need when they run, so that `artel --help` does not wait for torch.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from artel.cli import (
    bench,
    chat,
    config,
    data,
    doctor,
    evaluate,
    export,
    generate,
    launch,
    prepare,
    recipes,
    report,
    train,
)
from artel.errors import ArtelError, OutOfMemory
from artel.launching.worker import LostOthers

app = typer.Typer(
    name="artel",
    help="From raw text to a trained transformer language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def artel(
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """From raw text to a trained transformer language model."""
    if local_rank is not None:  # the launcher of deepspeed writes it before the verb
        os.environ.setdefault("LOCAL_RANK", str(local_rank))


app.command("prepare")(prepare.prepare)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("export")(export.export)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")
app.add_typer(recipes.app, name="recipes")
app.add_typer(config.app, name="config")
app.add_typer(launch.app, name="launch")


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except ArtelError as error:
        for line in str(error).splitlines():
            print(f"artel: {line}" if not line.startswith(" ") else line, file=sys.stderr)
        if isinstance(error, LostOthers | OutOfMemory):
            # Python's own end would wait, for the group's 20 minutes, for sums in which a lost process has a part.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.exit_code)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("artel: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output (head, less) went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
