"""The exchanges of a conversation, and a file of them as `ChatSession.save` writes it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artel.errors import InputError
from artel.storage import check_regular
from artel.text import ToolCall
from artel.text.records import BadRecord
from artel.text.tool_calls import parse_call


@dataclass(slots=True)
class Exchange:
    """A message, or what called functions returned, and its answer so far."""

    message: str
    answer: str = ""
    finished: bool = False
    """Whether the model ended the answer itself."""
    calls: tuple[ToolCall, ...] = ()
    """The functions that the answer calls after its text."""
    results: tuple[str, ...] = ()
    """In place of a message: what the calls of the answer before returned, in their order."""


def from_a_message(exchanges: list[Exchange], last: bool = False) -> list[Exchange]:
    """The exchanges from the first that begins with a message, not with results; or from the `last` such one."""
    starts = [number for number, exchange in enumerate(exchanges) if not exchange.results]
    return exchanges[starts[-1 if last else 0] :] if starts else []


def read_conversation(file: Path, name: str) -> dict[str, Any]:
    """The fields of a file of one conversation: a system message or none, then messages and their answers."""
    fix = "give a file that /save wrote"
    check_regular(file)
    try:
        written = file.read_text(encoding="utf-8-sig").rstrip("\n")
        lines = written.split("\n") if written else []  # not at U+2028
        fields = json.loads(lines[0]) if len(lines) == 1 else None
    except OSError as error:
        raise InputError.at("load", f"{name} cannot be read: {error.strerror}", fix) from None
    except (ValueError, RecursionError):
        raise InputError.at("load", f"{name} is no JSON", fix) from None
    if not isinstance(fields, dict):
        raise InputError.at("load", f"{name} has {len(lines):,} lines, not one conversation", fix)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise InputError.at("load", f"{name} has no messages with role and content", fix)
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if re.fullmatch("(user assistant (tool (tool )*assistant )*)+", "".join(f"{role} " for role in turns)) is None:
        raise InputError.at("load", f"{name}: its messages are not those of user and assistant by turns", fix)
    return fields


def exchanges_of(messages: list[dict[str, Any]], name: str) -> list[Exchange]:
    """The exchanges of messages whose roles `read_conversation` has checked. Raises InputError for a wrong call."""
    exchanges: list[Exchange] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "user":
            exchanges.append(Exchange(message["content"]))
        elif message["role"] == "tool":
            results.append(message["content"])
        else:
            if results:
                exchanges.append(Exchange("", results=tuple(results)))
                results = []
            try:
                listed = message.get("tool_calls") or []
                calls = tuple(map(parse_call, listed if isinstance(listed, list) else [listed]))
            except BadRecord as error:
                raise InputError.at("load", f"{name}: a call {error.detail}", "give a file that /save wrote") from None
            exchanges[-1].answer, exchanges[-1].finished, exchanges[-1].calls = message["content"], True, calls
    return exchanges


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
