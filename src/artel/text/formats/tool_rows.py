"""Tools in rows: descriptions of functions in any of their forms, calls and results that are written in texts.

- Descriptions come from the row's `tools` (or `functions`), from `tools` of the source, or from the system message
  (Hermes' <tools>, ToolACE's list of functions): there they are taken out, with what tells how to write a call, for the
  chat template writes both itself.
- Calls come from `tool_calls`, OpenAI's older `function_call`, turns of the role `function_call`, and, where functions
  are described, from what the assistant says (<tool_call> … </tool_call>, [f(a=1)]).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from artel.text.calls.objects import calls_of, names_of_tools
from artel.text.calls.reader import read_calls
from artel.text.records import BadRecord, Message, ToolCall, Tools

_TOOLS_FIELDS = ("tools", "functions")
_DECODER = json.JSONDecoder()
_FIX_TOOLS = 'write [{"name": "FUNCTION", "description": "…", "parameters": {…}}]'
# Names of types that data sets take from Python, in place of JSON Schema's.
_TYPES = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array",
    "tuple": "array", "set": "array", "any": "any",
}  # fmt: skip
# From here to the end a system message tells how to call: the words of Hermes and Qwen.
_HOW_TO_CALL = re.compile(r"You are a function calling AI model\b.*|#+ Tools\s*\n.*<tools>.*", re.DOTALL)
# And lines that do: of Hermes' variants, ToolACE, Glaive.
_CALLING_LINE = re.compile(
    r"</?tools>|<tool_call>|list of functions in JSON format|\[func(?:_name)?1?\(|NO other text MUST be included|"
    r"only return the function call|with access to the following functions|с доступом к следующим функциям",
    re.IGNORECASE,
)
_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_CALL_MARKS = ("<tool_call>", "<TOOLCALL>", "[TOOL_CALLS]")


def tools_field(row: dict[str, Any]) -> str | None:
    """The field in which a row itself describes functions."""
    return next((name for name in _TOOLS_FIELDS if row.get(name)), None)


def tools_of(value: Any, place: str) -> Tools:
    """Functions from a list, from JSON, or from a list of JSON texts. Raises BadRecord."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError) as error:
            raise BadRecord("bad_tools", f"{place} are no JSON: {error}; {_FIX_TOOLS}") from None
    items = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_tool(item, f"{place}[{number}]") for number, item in enumerate(items))


def _tool(item: Any, place: str) -> dict[str, Any]:
    if isinstance(item, str):
        (item,) = tools_of(item, place) or ({},)
    function = item.get("function", item) if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRecord("bad_tools", f"{place} is {repr(item)[:80]}, no function; {_FIX_TOOLS}")
    if "parameters" in function:
        function = {**function, "parameters": _schema(function["parameters"])}
    rest = {name: value for name, value in item.items() if name != "type"} if "function" in item else {}
    return {"type": "function", **rest, "function": function}


def _schema(parameters: Any) -> Any:
    """Parameters as JSON Schema. Some data sets list the properties alone, and name types as Python does."""
    if not isinstance(parameters, dict):
        return {"type": "object", "properties": {}}
    is_schema = not parameters or "properties" in parameters or isinstance(parameters.get("type"), str)
    if is_schema:
        return _with_json_types(parameters)
    required = [
        name
        for name, what in parameters.items()
        if isinstance(what, dict) and "default" not in what and "optional" not in str(what.get("type"))
    ]
    schema = {"type": "object", "properties": _with_json_types(parameters)}
    return schema | ({"required": required} if required else {})


def _with_json_types(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_json_types(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _json_type(item) if name == "type" and isinstance(item, str) else _with_json_types(item)
        for name, item in value.items()
    }


def _json_type(kind: str) -> str:
    """`int, optional` → integer, `List[str]` → array."""
    base = re.match(r"\s*(\w*)", kind)
    assert base is not None
    return _TYPES.get(base[1].lower(), kind)


def with_tools(messages: list[Message], tools: Tools) -> tuple[list[Message], Tools, dict[str, int]]:
    """Messages with the calls and results that their texts hold, the functions, and counts for the ledger.

    Raises BadRecord.
    """
    counted = {}
    if messages and messages[0].role == "system":
        text, found = _without_descriptions(messages[0].content, tools)
        if text != messages[0].content:
            tools = tools or found
            messages = [*([replace(messages[0], content=text)] if text else []), *messages[1:]]
            counted = {"tools_of_system": 1}
    if tools:
        messages = [item for number, message in enumerate(messages, 1) for item in _read(message, tools, number)]
    return messages, tools, counted


def _read(message: Message, tools: Tools, number: int) -> Iterable[Message]:
    if message.role == "assistant" and not message.tool_calls:
        content, calls = read_calls(message.content, tools)
        if not calls and any(mark in message.content for mark in _CALL_MARKS):
            fix = 'write <tool_call>{"name": "FUNCTION", "arguments": {…}}</tool_call>'
            raise BadRecord("bad_tool_call", f"message {number} has a call that cannot be read; {fix}")
        return [replace(message, content=content, tool_calls=calls)]
    results = _RESPONSE.findall(message.content) if message.role in ("tool", "user") else []
    if results and not _RESPONSE.sub("", message.content).strip():
        return [replace(message, role="tool", content=text) for text in results]
    return [message]


def _without_descriptions(text: str, tools: Tools) -> tuple[str, Tools]:
    """A system message without functions and how to call them, and the functions that it describes."""
    found: list[Any] = []
    kept, end = [], 0
    names = {tool["function"]["name"] for tool in tools}
    for match in re.finditer(r"[\[{]", text):
        if match.start() < end:
            continue
        try:
            value, stop = _DECODER.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        items = value if isinstance(value, list) else [value]
        if items and all(_is_description(item, names) for item in items):
            found += items
            kept.append(text[end : match.start()])
            end = stop
    if not found:
        return text, ()
    rest = _HOW_TO_CALL.sub("", "".join([*kept, text[end:]]))
    lines = [line for line in rest.split("\n") if not _CALLING_LINE.search(line) and line.strip(" \t,.;") != ""]
    return "\n".join(lines).strip(), tools_of(found, "the functions of the system message")


def _is_description(value: Any, names: set[str]) -> bool:
    what = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(what, dict) or not isinstance(what.get("name"), str):
        return False
    return isinstance(what.get("parameters"), dict) or (what["name"] in names and "description" in what)


def turn_calls(turn: dict[str, Any], place: str) -> tuple[ToolCall, ...]:
    """The calls in the fields `tool_calls` or `function_call` of a turn. Raises BadRecord."""
    value = turn.get("tool_calls") or turn.get("function_call") or []
    try:
        return calls_of(value)
    except BadRecord as error:
        raise BadRecord(error.reason, f"{place}: {error.detail}") from None


def check_names(messages: Iterable[Message], tools: Tools) -> None:
    """Raise BadRecord for a call of a function that is not among those of the row's own field.

    Turns that are not learned may call what they like.
    """
    names = names_of_tools(tools)
    for number, message in enumerate(messages, 1):
        for call in message.tool_calls:
            if call.name not in names and message.trained is not False:
                what = f"message {number} calls {call.name!r}, which is none of the row's tools ({', '.join(names)})"
                raise BadRecord("unknown_tool", f"{what}; describe it there, or leave the row out")


def check_results(messages: Iterable[Message]) -> None:
    """Raise BadRecord for a result that answers no call, and for what is said before a call's result."""
    messages = list(messages)
    has_calls = any(message.tool_calls for message in messages)
    ids = {call.id for message in messages for call in message.tool_calls if call.id}
    asking: Message | None = None
    results = 0
    for number, message in enumerate(messages, 1):
        if message.role != "tool":
            asking, results = (message if message.role == "assistant" else None), 0
            continue
        results += 1
        fix = "put it after the message that calls, or leave the row out"
        if asking is None or (has_calls and not asking.tool_calls):
            raise BadRecord("no_call", f"message {number} is a tool's answer, and no call is before it; {fix}")
        if message.tool_call_id and ids and message.tool_call_id not in ids:
            raise BadRecord("no_call", f"message {number} answers the call {message.tool_call_id!r}: there is none")
        if has_calls and results > len(asking.tool_calls):
            count = len(asking.tool_calls)
            raise BadRecord("no_call", f"message {number} is one answer of a tool more than the {count} calls; {fix}")


def is_padded(row: Any) -> bool:
    """True for a row that `datasets` wrote as JSON: each message has the keys of all messages, most of them null."""
    values = row.values() if isinstance(row, dict) else ()
    messages = [item for value in values if isinstance(value, list) for item in value if isinstance(item, dict)]
    return any(message.get(name, "") is None for message in messages for name in ("tool_calls", "tool_call_id"))


def without_nulls(value: Any) -> Any:
    """Rows of parquet have a null in place of each key that other rows have; what the file lacked is taken out."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return value
