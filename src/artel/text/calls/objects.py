"""Calls from objects of JSON, in the forms that data sets and servers have them."""

from __future__ import annotations

import ast
import json
from typing import Any

from artel.text.records import BadRecord, ToolCall, Tools


def call_of(value: Any) -> ToolCall:
    """A call from an object: {"name", "arguments"}, or {"function": {…}} as OpenAI has it. Raises BadRecord."""
    what = value.get("function") if isinstance(value, dict) and isinstance(value.get("function"), dict) else value
    if not isinstance(what, dict) or not isinstance(what.get("name"), str) or not what["name"].strip():
        fix = 'write {"name": "FUNCTION", "arguments": {…}}'
        raise BadRecord("bad_tool_call", f"{_shown(value)} is no call of a tool; {fix}")
    arguments = what.get("arguments", what.get("parameters"))
    identity = value.get("id")
    return ToolCall(what["name"].strip(), _arguments(arguments, what["name"]), identity if _is_id(identity) else "")


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _arguments(value: Any, name: str) -> dict[str, Any]:
    """Arguments, as an object or as the JSON of one. Raises BadRecord."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            what = f"the arguments of {name} are no JSON: {error}"
            raise BadRecord("bad_arguments", f'{what}; write {{"NAME": VALUE}}') from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRecord("bad_arguments", f'the arguments of {name} are {_shown(value)}; write {{"NAME": VALUE}}')
    return value


def calls_of(value: Any) -> tuple[ToolCall, ...]:
    """Calls from one object or a list of them, or from their JSON. Raises BadRecord."""
    if isinstance(value, str):
        try:
            value = json_or_literal(value)
        except ValueError as error:
            fix = 'write {"name": "FUNCTION", "arguments": {…}}'
            raise BadRecord("bad_tool_call", f"the call {_shown(value)} is no JSON: {error}; {fix}") from None
    return tuple(call_of(item) for item in (value if isinstance(value, list) else [value]))


def json_or_literal(text: str) -> Any:
    """The value of JSON, or of a Python literal, which some data sets have in its place. Raises ValueError of JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        try:
            return json.loads(json.dumps(ast.literal_eval(text.strip())))  # JSON has no sets, and lists for tuples
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(str(error)) from None


def _shown(value: Any) -> str:
    return repr(value)[:80]


def names_of_tools(tools: Tools) -> list[str]:
    return [tool["function"]["name"] for tool in tools if isinstance(tool.get("function"), dict)]
