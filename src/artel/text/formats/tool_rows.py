"""Tools in rows: descriptions of functions, calls and results, also inside texts.

- Descriptions come from `tools` (or `functions`) of the row, from `tools` of the source, or from the system message
  (<tools> of Hermes, the list of functions of ToolACE). They are removed from the system message, together with the
  instructions for calling, since the chat template writes both.
- Calls come from `tool_calls`, the older `function_call` of OpenAI, and turns of the role `function_call`. If functions
  are described, they also come from the text of the assistant (<tool_call> … </tool_call>, [f(a=1)]).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from artel.text.records import BadRecord, Message, ToolCall, Tools
from artel.text.tool_calls import parse_calls, read_calls, tool_names

TOOLS_FIELDS = ("tools", "functions")
_DECODER = json.JSONDecoder()
_FIX_TOOLS = 'write [{"name": "FUNCTION", "description": "…", "parameters": {…}}]'
# Python names of types in datasets, and their JSON Schema names.
_TYPES = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array",
    "tuple": "array", "set": "array", "any": "any",
}  # fmt: skip
# Instructions for calling, up to the end of a system message (Hermes, Qwen).
_CALL_INSTRUCTIONS = re.compile(r"You are a function calling AI model\b.*|#+ Tools\s*\n.*<tools>.*", re.DOTALL)
# Single lines of instructions for calling (variants of Hermes, ToolACE, Glaive).
_CALLING_LINE = re.compile(
    r"</?tools>|<tool_call>|list of functions in JSON format|\[func(?:_name)?1?\(|NO other text MUST be included|"
    r"only return the function call|with access to the following functions|с доступом к следующим функциям",
    re.IGNORECASE,
)
_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_CALL_MARKS = ("<tool_call>", "<TOOLCALL>", "[TOOL_CALLS]")


def tools_field(row: dict[str, Any]) -> str | None:
    """Return the field of a row that describes functions."""
    return next((name for name in TOOLS_FIELDS if row.get(name)), None)


def parse_tools(value: Any, where: str) -> Tools:
    """Return functions from a list, JSON, or a list of JSON texts. Raise BadRecord if they are something else."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError) as error:
            raise BadRecord("bad_tools", f"{where} are not JSON: {error}; {_FIX_TOOLS}") from None
    items = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_parse_tool(item, f"{where}[{index}]") for index, item in enumerate(items))


def _parse_tool(item: Any, where: str) -> dict[str, Any]:
    if isinstance(item, str):
        (item,) = parse_tools(item, where) or ({},)
    function = item.get("function", item) if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRecord("bad_tools", f"{where} is {repr(item)[:80]}, not a function; {_FIX_TOOLS}")
    if "parameters" in function:
        function = {**function, "parameters": _to_schema(function["parameters"])}
    other_fields = {name: value for name, value in item.items() if name != "type"} if "function" in item else {}
    return {"type": "function", **other_fields, "function": function}


def _to_schema(parameters: Any) -> Any:
    """Return parameters as JSON Schema. Some datasets list only the properties, with Python names of types."""
    if not isinstance(parameters, dict):
        return {"type": "object", "properties": {}}
    is_schema = not parameters or "properties" in parameters or isinstance(parameters.get("type"), str)
    if is_schema:
        return _convert_types(parameters)
    required = [
        name
        for name, parameter in parameters.items()
        if isinstance(parameter, dict) and "default" not in parameter and "optional" not in str(parameter.get("type"))
    ]
    schema = {"type": "object", "properties": _convert_types(parameters)}
    return schema | ({"required": required} if required else {})


def _convert_types(value: Any) -> Any:
    if isinstance(value, list):
        return [_convert_types(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _json_type(item) if name == "type" and isinstance(item, str) else _convert_types(item)
        for name, item in value.items()
    }


def _json_type(kind: str) -> str:
    """Return the JSON Schema type: integer for `int, optional`, array for `List[str]`."""
    base = re.match(r"\s*(\w*)", kind)
    assert base is not None
    return _TYPES.get(base[1].lower(), kind)


def extract_tools(messages: list[Message], tools: Tools) -> tuple[list[Message], Tools, dict[str, int]]:
    """Read the functions, calls and results inside texts. Return messages, functions and counts for the ledger.

    Raise BadRecord for a function or call that cannot be read.
    """
    counts = {}
    if messages and messages[0].role == "system":
        text, described_tools = _extract_descriptions(messages[0].content, tools)
        if text != messages[0].content:
            tools = tools or described_tools
            messages = [*([replace(messages[0], content=text)] if text else []), *messages[1:]]
            counts = {"tools_of_system": 1}
    if tools:
        messages = [
            item for position, message in enumerate(messages, 1) for item in _parse_message(message, tools, position)
        ]
    return messages, tools, counts


def _parse_message(message: Message, tools: Tools, position: int) -> Iterable[Message]:
    if message.role == "assistant" and not message.tool_calls:
        content, calls = read_calls(message.content, tools)
        if not calls and any(mark in message.content for mark in _CALL_MARKS):
            fix = 'write <tool_call>{"name": "FUNCTION", "arguments": {…}}</tool_call>'
            raise BadRecord("bad_tool_call", f"message {position} has a call that cannot be read; {fix}")
        return [replace(message, content=content, tool_calls=calls)]
    results = _RESPONSE.findall(message.content) if message.role in ("tool", "user") else []
    if results and not _RESPONSE.sub("", message.content).strip():
        return [replace(message, role="tool", content=text) for text in results]
    return [message]


def _extract_descriptions(text: str, tools: Tools) -> tuple[str, Tools]:
    """Return a system message without functions and instructions for calling, and the functions that it describes."""
    descriptions: list[Any] = []
    kept_texts, end = [], 0
    names = {tool["function"]["name"] for tool in tools}
    for match in re.finditer(r"[\[{]", text):
        if match.start() < end:
            continue
        try:
            value, value_end = _DECODER.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        items = value if isinstance(value, list) else [value]
        if items and all(_is_description(item, names) for item in items):
            descriptions += items
            kept_texts.append(text[end : match.start()])
            end = value_end
    if not descriptions:
        return text, ()
    remaining = _CALL_INSTRUCTIONS.sub("", "".join([*kept_texts, text[end:]]))
    lines = [line for line in remaining.split("\n") if not _CALLING_LINE.search(line) and line.strip(" \t,.;") != ""]
    return "\n".join(lines).strip(), parse_tools(descriptions, "the functions of the system message")


def _is_description(value: Any, names: set[str]) -> bool:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("parameters"), dict) or (function["name"] in names and "description" in function)


def read_turn_calls(turn: dict[str, Any], where: str) -> tuple[ToolCall, ...]:
    """Return the calls in `tool_calls` or `function_call` of a turn. Raise BadRecord if one is malformed."""
    value = turn.get("tool_calls") or turn.get("function_call") or []
    try:
        return parse_calls(value)
    except BadRecord as error:
        raise BadRecord(error.reason, f"{where}: {error.detail}") from None


def check_names(messages: Iterable[Message], tools: Tools) -> None:
    """Raise BadRecord for a call of a function that the row does not list, except in turns that are not learned."""
    names = tool_names(tools)
    for position, message in enumerate(messages, 1):
        for call in message.tool_calls:
            if call.name not in names and message.trained is not False:
                what = f"message {position} calls {call.name!r}, not one of the tools of the row ({', '.join(names)})"
                raise BadRecord("unknown_tool", f"{what}; describe it there, or remove the row")


def check_results(messages: Iterable[Message]) -> None:
    """Raise BadRecord for a tool result that answers no call."""
    messages = list(messages)
    has_calls = any(message.tool_calls for message in messages)
    ids = {call.id for message in messages for call in message.tool_calls if call.id}
    caller: Message | None = None
    num_results = 0
    for position, message in enumerate(messages, 1):
        if message.role != "tool":
            caller, num_results = (message if message.role == "assistant" else None), 0
            continue
        num_results += 1
        fix = "put it after the message with the call, or remove the row"
        if caller is None or (has_calls and not caller.tool_calls):
            raise BadRecord("no_call", f"message {position} is a tool result without a call before it; {fix}")
        if message.tool_call_id and ids and message.tool_call_id not in ids:
            what = f"message {position} answers the call {message.tool_call_id!r}, which does not exist"
            raise BadRecord("no_call", what)
        if has_calls and num_results > len(caller.tool_calls):
            num_calls = len(caller.tool_calls)
            raise BadRecord("no_call", f"message {position} is a result too many for {num_calls} calls; {fix}")


def is_padded(row: Any) -> bool:
    """True for a row written as JSON by `datasets`: each message has the keys of all messages, most of them null."""
    values = row.values() if isinstance(row, dict) else ()
    messages = [item for value in values if isinstance(value, list) for item in value if isinstance(item, dict)]
    return any(message.get(name, "") is None for message in messages for name in ("tool_calls", "tool_call_id"))


def drop_nulls(value: Any) -> Any:
    """Remove nulls. Rows of parquet have one for each key that only other rows have."""
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: drop_nulls(item) for name, item in value.items() if item is not None}
    return value
