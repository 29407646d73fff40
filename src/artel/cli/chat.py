"""`artel chat`: talk to a model in the terminal, or run a script of messages and commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from artel.cli.chat_session import Screen, Session
from artel.cli.common import AsJson, echo, print_json
from artel.errors import InputError
from artel.launching.quiet_libraries import quiet_libraries
from artel.messages import printed_by

if TYPE_CHECKING:
    from artel.inference.chat import Exchange


def chat(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A run's folder, a model folder or a hub id.")],
    system: Annotated[str, typer.Option(help="The system message: who the model is to be.")] = "",
    script: Annotated[
        str | None, typer.Option(metavar="FILE", help="Take messages and commands from a file's lines; - for stdin.")
    ] = None,
    tools: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Functions that the model may call: a .json file that describes them, you give the results; "
            "or a .py file, whose functions are run.",
        ),
    ] = "",
    history: Annotated[int, typer.Option(help="Earlier exchanges that a message is answered with.")] = 10,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", "--max-new-tokens", help="Tokens of an answer at most.")
    ] = 200,
    repetition_penalty: Annotated[float, typer.Option(help="Over 1 avoids tokens already there.")] = 1.2,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.5,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that sum to p.")] = 0.6,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest; 0 for all.")] = 40,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal conversations.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Talk to a model: its answers are streamed, Ctrl-C stops one, Ctrl-D ends. /help lists the commands.

    With --json the text goes to standard error, and the whole conversation to standard output at the end.

    Examples: artel chat runs/assistant --system "You answer briefly."
              artel chat runs/assistant --tools functions.py
    """
    echo("loading the model")
    quiet_libraries()
    from artel.inference import ChatSession, ChatSettings, open_model
    from artel.inference.chat_functions import read_functions

    try:
        system.encode()
    except UnicodeEncodeError:
        raise InputError.at("--system", "is not UTF-8", "write it in UTF-8") from None
    settings = ChatSettings(history, new_tokens, repetition_penalty, temperature, top_p, top_k, seed)
    if script is None and not sys.stdin.isatty():
        script = "-"
    lines = None if script is None else _lines(script)
    screen = Screen(sys.stderr if as_json else sys.stdout)
    functions = read_functions(tools) if tools else None
    offered = functions.tools if functions is not None else ()
    opened = open_model(name)
    with (
        printed_by(lambda record: screen.echo(record.getMessage())),
        closing(ChatSession(opened, settings, system, offered)) as talk,
    ):
        session = Session(talk, screen, functions)
        status = session.run_terminal() if lines is None else session.run_script(lines, script or "")
    if as_json:
        print_json(
            {
                "model": name,
                "answers": [_as_json(exchange) for exchange in session.written],
                "messages": session.talk.messages,
                "settings": asdict(session.talk.settings),
            }
        )
    if status:
        raise typer.Exit(status)


def _as_json(exchange: Exchange) -> dict[str, Any]:
    """Return an answer as plain values, with calls and results only if there are any."""
    return {name: value for name, value in asdict(exchange).items() if value or name not in ("calls", "results")}


def _lines(script: str) -> Iterable[str]:
    """Return the lines of a file, or an iterator over standard input."""
    if script == "-":
        return (line.removesuffix("\n") for line in sys.stdin)
    from artel.storage import check_regular

    check_regular(Path(script))
    try:
        return Path(script).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        what = f"{script} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        what = f"{script} is not UTF-8 (byte {error.start})"
    raise InputError.at("--script", what, "give a text file with a message or a command on each line")
