"""`artel chat`: chat with a model in the terminal, or run a script of messages and commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from artel.cli.chat_session import Screen, Session
from artel.cli.common import AsJson, print_json, print_status
from artel.errors import InputError
from artel.launching.quiet_libraries import quiet_libraries
from artel.messages import route_messages

if TYPE_CHECKING:
    from artel.inference.chat import Exchange


def chat(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A run folder, a model folder or a hub id.")],
    system: Annotated[str, typer.Option(help="System message.")] = "",
    script: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File with a message or command per line; - for stdin."),
    ] = None,
    tools: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Functions that the model may call: a .py file, whose functions are run, or a .json file with "
            "descriptions; you then type the results.",
        ),
    ] = "",
    history: Annotated[int, typer.Option(help="Number of earlier exchanges in the prompt.")] = 10,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", "--max-new-tokens", help="Maximum tokens of an answer.")
    ] = 200,
    repetition_penalty: Annotated[float, typer.Option(help="Values over 1 make repeated tokens less likely.")] = 1.2,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.5,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling: total probability to keep.")] = 0.6,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 for all.")] = 40,
    seed: Annotated[int, typer.Option(help="Random seed; equal seeds give equal conversations.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Chat with a model. Answers are streamed; Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists the commands.

    With --json, text goes to standard error, and the full conversation to standard output at the end.

    Examples: artel chat runs/assistant --system "You answer briefly."
              artel chat runs/assistant --tools functions.py
    """
    print_status("loading the model")
    quiet_libraries()
    from artel.inference import ChatSession, ChatSettings, open_model
    from artel.text.tool_functions import read_functions

    try:
        system.encode()
    except UnicodeEncodeError:
        raise InputError.at("--system", "is not UTF-8", "write it in UTF-8") from None
    settings = ChatSettings(history, new_tokens, repetition_penalty, temperature, top_p, top_k, seed)
    if script is None and not sys.stdin.isatty():
        script = "-"
    lines = None if script is None else _read_script(script)
    screen = Screen(sys.stderr if as_json else sys.stdout)
    functions = read_functions(tools) if tools else None
    offered_tools = functions.tools if functions is not None else ()
    opened = open_model(name)
    with (
        route_messages(lambda record: screen.print_status(record.getMessage())),
        closing(ChatSession(opened, settings, system, offered_tools)) as conversation,
    ):
        session = Session(conversation, screen, functions)
        status = session.run_terminal() if lines is None else session.run_script(lines, script or "")
    if as_json:
        print_json(
            {
                "model": name,
                "answers": [_exchange_fields(exchange) for exchange in session.exchanges],
                "messages": session.conversation.messages,
                "settings": asdict(session.conversation.settings),
            }
        )
    if status:
        raise typer.Exit(status)


def _exchange_fields(exchange: Exchange) -> dict[str, Any]:
    """Return an exchange as plain values, without empty calls and results."""
    return {name: value for name, value in asdict(exchange).items() if value or name not in ("calls", "results")}


def _read_script(script: str) -> Iterable[str]:
    """Return the lines of a file, or an iterator over standard input."""
    if script == "-":
        return (line.removesuffix("\n") for line in sys.stdin)
    from artel.storage import check_regular

    check_regular(Path(script))
    try:
        return Path(script).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        message = f"{script} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        message = f"{script} is not UTF-8 (byte {error.start})"
    raise InputError.at("--script", message, "use a text file with one message or command per line")
