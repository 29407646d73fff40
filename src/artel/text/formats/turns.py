"""Turns of rows to messages: roles, contents, thoughts and weights. Fields of rows are renamed (`mapping`).

Rules for all forms of rows:
- Consecutive turns of the user, or of the assistant, become one, joined by a blank line: chat templates expect the two
  to alternate, but in datasets split by message they do not.
- An empty system message is dropped.
- A turn of the role function_call is a call by the assistant.
- <think> … </think> at the beginning of a message of the assistant is its thought. The opening tag may be missing: the
  generation prompts of DeepSeek R1 and Qwen 3.5 end with it.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from artel.config import SourceConfig
from artel.text.formats.jsonl import describe_fields, get_nested_field, require_object
from artel.text.formats.tool_rows import parse_tools, read_turn_calls, tools_field
from artel.text.records import BadRecord, Message, Tools

Turn = dict[str, Any]
"""A message of a row, with the fields `role` and `content`."""

Role = Literal["system", "user", "assistant", "tool"]

_ALIASES: dict[Role, str] = {
    "system": "system developer",
    "user": "user human prompter operator",
    "assistant": "assistant gpt chatgpt bot model char",
    "tool": "tool function observation function_response tool_response ipython",
}
_CALLING_ROLES = ("function_call", "tool_call")
_ROLES = {alias: role for role, aliases in _ALIASES.items() for alias in aliases.split()}
_ROLE_FIELDS = ("role", "from")
_CONTENT_FIELDS = ("content", "value")
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
_TRAINED_FIELDS = ("loss_weight", "weight", "train")
_CALL_FIELDS = ("tool_calls", "function_call", "name", "tool_call_id")
# Spaces beside the tags and blank lines separate the thought from the answer, which keeps its indentation.
_THINK = re.compile(r"\s*<think>(?:\s*\n|[ \t]+)?(.*?)\s*</think>(?:\s*\n|[ \t]+)?", re.DOTALL)


def split_thought(content: str) -> tuple[str, str]:
    """Return the thought at the beginning of an assistant's message, and the rest. A thought that never ends stays."""
    if "</think>" in content and "<think>" not in content:
        content = f"<think>{content}"  # the generation prompt had the opening tag
    match = _THINK.match(content)
    return (match[1], content[match.end() :]) if match else ("", content)


class RowReader:
    """Turns a source's rows into messages by its `mapping` and `fill`. Methods raise BadRecord for an invalid row."""

    def __init__(self, source: SourceConfig) -> None:
        self.mapping = source.mapping
        self._fill = source.fill
        self._tools = parse_tools(source.tools, "tools of the source")
        self._placeholders = re.compile(r"\{\{\s*(" + "|".join(map(re.escape, source.fill)) + r")\s*\}\}")

    def rename_fields(self, row: Any) -> dict[str, Any]:
        """Return the row with its fields renamed (`mapping`). A dot in the name of a field reaches into an object."""
        row = require_object(row)
        mapped_names = {*self.mapping, *self.mapping.values()}
        fields = {name: value for name, value in row.items() if name not in mapped_names}
        for name, name_in_row in self.mapping.items():
            value = get_nested_field(row, name_in_row)
            if value is not None:
                fields[name] = value
        return fields

    def turns(self, value: Any, path: str) -> list[Turn]:
        """Return turns from objects, columns (an object of lists), or texts of user and assistant; or JSON of these."""
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise BadRecord("bad_json", f"{path} is not JSON: {error}; write a list of messages") from None
        if isinstance(value, dict):
            value = _columns_to_turns(value, path)
        if not isinstance(value, list):
            fix = "write a list of messages, each with role and content"
            raise BadRecord("no_messages", f"{path} is {type(value).__name__}; {fix}")
        if value and all(isinstance(item, str) for item in value):
            return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(value)]
        return [self._read_turn(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def _read_turn(self, item: Any, path: str) -> Turn:
        if not isinstance(item, dict):
            raise BadRecord("no_messages", f"{path} is {type(item).__name__}; write an object with role and content")
        turn = {name: item[name] for name in (*THOUGHT_FIELDS, *_TRAINED_FIELDS, *_CALL_FIELDS) if name in item}
        for field, default_names in (("role", _ROLE_FIELDS), ("content", _CONTENT_FIELDS)):
            field_name = self.mapping.get(field, default_names[0])
            name = next((name for name in (field_name, *default_names) if name in item), None)
            if name is None and field == "content" and any(item.get(name) for name in _CALL_FIELDS[:2]):
                turn[field] = None
                continue
            if name is None:
                raise _missing_field_error(field_name, field, item, f"{path} ")
            turn[field] = item[name]
        return turn

    def messages(self, turns: list[Turn], prefix: str = "") -> list[Message]:
        """Return the messages of turns, joining consecutive turns of one role. Errors name them with `prefix`."""
        messages: list[Message] = []
        for message_number, turn in enumerate(turns, 1):
            where = f"{prefix}message {message_number}"
            message = self._build_message(turn, where)
            calls = next((name for name in _CALL_FIELDS[:2] if turn.get(name)), None)
            if message.role == "user" and calls is not None:
                what = f"{where} has {calls}, but its role is user; are the roles swapped?"
                raise BadRecord("calls_of_user", f"{what} Write assistant, or remove the row")
            if message.is_empty:
                if message.role == "system":
                    continue
                fix = "fill it in, or remove the row"
                raise BadRecord("empty_message", f"{where} ({message.role}) is empty; {fix}")
            if message.role == "system" and messages:
                if messages[0].role == "system":
                    raise BadRecord("two_systems", f"{where} is a second system message; join the two")
                fix = "put it first"
                raise BadRecord("late_system", f"{where} is a system message, but not the first message; {fix}")
            if messages and message.role == messages[-1].role and message.role in ("user", "assistant"):
                message = _join_messages(messages.pop(), message, where)
            messages.append(message)
        return messages

    def _build_message(self, turn: Turn, where: str) -> Message:
        name = turn["role"]
        role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
        if role is None and isinstance(name, str) and name.strip().lower() in _CALLING_ROLES:
            role, turn = "assistant", {**turn, "tool_calls": turn["content"], "content": ""}
        if role is None:
            fix = f"known are {', '.join((*_ROLES, *_CALLING_ROLES))}; rename it, or write converter: module:function"
            raise BadRecord("unknown_role", f"{where} has the role {repr(name)[:80]}; {fix}")
        if role == "tool":
            values = (turn.get(field) for field in ("name", "tool_call_id"))
            texts = (value if isinstance(value, str) else "" for value in values)
            return Message(role, self.fill_in(_result_text(turn["content"], where)), "", None, (), *texts)
        content = self.fill_in(_content_text(turn["content"], f"the content of {where}"))
        thought = next((turn[name] for name in THOUGHT_FIELDS if turn.get(name)), "") if role == "assistant" else ""
        thought = self.fill_in(_content_text(thought, f"the thought of {where}"))
        if role == "assistant":
            written_thought, content = split_thought(content)
            if content.lstrip().startswith("<think>"):
                raise BadRecord("open_thought", f"{where} begins with <think>, which is never closed; write </think>")
            thought = written_thought or thought
        calls = read_turn_calls(turn, where) if role == "assistant" else ()
        return Message(role, content, thought if thought.strip() else "", _is_trained(turn, where), calls)

    def fill_in(self, text: str) -> str:
        """Replace {{name}} by its value in `fill` of the source."""
        return self._placeholders.sub(lambda match: self._fill[match[1]], text) if self._fill else text

    def text(self, fields: dict[str, Any], name: str, path: str = "") -> str:
        """Return a required text of a row."""
        if fields.get(name) is None:
            prefix = f"{path} " if path else ""
            raise _missing_field_error(
                self.mapping.get(name, name), name, fields, prefix, ", or converter: module:function"
            )
        return self.optional_text(fields, name, path)

    def optional_text(self, fields: dict[str, Any], name: str, path: str = "") -> str:
        """Return an optional text of a row; empty if it is missing."""
        value = fields.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            where = f"{path}.{name}" if path else f"field {name!r}"
            raise BadRecord("no_text", f"{where} is {type(value).__name__}; write it as text, in quotes")
        return value

    def tools(self, row: dict[str, Any]) -> Tools:
        """Return the functions that the row describes, else those of the source."""
        name = tools_field(row)
        return self._tools if name is None else parse_tools(row[name], name)

    def system(self, row: dict[str, Any]) -> list[Turn]:
        """Return the turn of the field `system` of a row, if it has one."""
        text = self.optional_text(row, "system")
        return [{"role": "system", "content": text}] if text.strip() else []

    def question(self, row: dict[str, Any], item: dict[str, Any] | None = None) -> list[Turn]:
        """Return the alpaca turns up to the answer. The input (of `item`, else of the row) follows the instruction."""
        history = row.get("history") or []
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise BadRecord("bad_history", "field 'history' holds no pairs; write [[question, answer], …]")
        turns = self.system(row)
        for question, answer in history:
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        texts = (self.text(row, "instruction"), self.optional_text(row if item is None else item, "input"))
        return [*turns, {"role": "user", "content": "\n\n".join(text for text in texts if text.strip())}]


def is_text(value: Any) -> bool:
    """True for a text that is not messages as JSON."""
    return isinstance(value, str) and not value.lstrip().startswith("[{")


def wrap_message(value: Any) -> Any:
    """Return a list of one message for a single message, and any other value unchanged."""
    is_message = isinstance(value, dict) and not any(isinstance(item, list) for item in value.values())
    return [value] if is_message else value


def check_prompt(prompt: list[Message]) -> tuple[Message, ...]:
    """Return the messages of a prompt. Raise BadRecord if it does not end with the user or the result of a tool."""
    if not prompt or prompt[-1].role not in ("user", "tool"):
        ending = f"ends with the {prompt[-1].role}" if prompt else "is empty"
        raise BadRecord("no_question", f"the prompt {ending}; end it with what the user asks")
    if sum(message.role == "system" for message in prompt) > 1:
        raise BadRecord("two_systems", "has a system message in 'system' and another in the messages; make them one")
    return tuple(prompt)


def _missing_field_error(
    field_name: str, name: str, fields: dict[str, Any], prefix: str, alternative: str = ""
) -> BadRecord:
    what = f"{prefix}has no field {field_name!r} (it has: {describe_fields(fields)})"
    return BadRecord("no_field", f"{what}; write mapping: {{{name}: NAME}}{alternative}")


def _join_messages(first: Message, second: Message, where: str) -> Message:
    if first.trained != second.trained:
        fix = "give both one loss_weight, or join them"
        raise BadRecord("mixed_weights", f"{where} follows another of its role, but only one is learned; {fix}")
    if first.tool_calls and second.content.strip():
        fix = "put the result between them, or remove the row"
        raise BadRecord("no_result", f"{where} continues after a call without a result; {fix}")
    content = "\n\n".join(text for text in (first.content, second.content) if text.strip())
    thought = "\n\n".join(text for text in (first.thought, second.thought) if text)
    return Message(first.role, content, thought, first.trained, (*first.tool_calls, *second.tool_calls))


def _result_text(content: Any, where: str) -> str:
    """Return the text of a tool result. Values other than texts become JSON."""
    has_types = isinstance(content, list) and all(isinstance(item, dict) and "type" in item for item in content)
    if content is None or isinstance(content, str) or (has_types and content):
        return _content_text(content, f"the content of {where}")
    return json.dumps(content, ensure_ascii=False)


def _content_text(content: Any, where: str) -> str:
    """Return the text of a content, which may be a list of texts. Null is the empty text."""
    items = content if isinstance(content, list) else ["" if content is None else content]
    texts = []
    for item in items:
        text: Any = item
        if isinstance(item, dict):
            if item.get("type", "text") != "text":
                detail = f"{where} holds {repr(item['type'])[:80]}, not text; remove the row"
                raise BadRecord("not_text", detail)
            text = item.get("text", item.get("value"))
        if not isinstance(text, str):
            fix = "write it as text, or as a list of {type: text, text: …}"
            raise BadRecord("no_text", f"{where} is {type(text).__name__}; {fix}")
        texts.append(text)
    return "".join(texts)


def _is_trained(turn: Turn, where: str) -> bool | None:
    name = next((name for name in _TRAINED_FIELDS if turn.get(name) is not None), None)
    if name is None:
        return None
    if not isinstance(turn[name], bool | int | float):
        raise BadRecord("bad_weight", f"{name} of {where} is {repr(turn[name])[:80]}; write 1 to learn it and 0 not to")
    return bool(turn[name] > 0)


def _columns_to_turns(columns: dict[str, Any], path: str) -> list[Turn]:
    """Turn columns into turns: {role: [user, assistant], content: [a, b]}."""
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    if not lists:
        fix = "write a list of messages, or lists of role and content"
        raise BadRecord("no_messages", f"{path} is an object without lists (it has: {describe_fields(columns)}); {fix}")
    if len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{len(values)} {name}" for name, values in lists.items())
        raise BadRecord("uneven_columns", f"the lists of {path} are not of one length ({lengths}); fix them")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
