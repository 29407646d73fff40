"""Turns as rows have them, to messages: roles, contents, thoughts, weights, and the fields of rows by our names.

What is decided here for all forms of rows:
- Turns of the user, or of the assistant, that follow one another become one, a blank line between them: chat templates
  want the two in turns, and data sets that are split by message do not care.
- A system message that is empty is none.
- <think> … </think> at the beginning of what the assistant says is its thought.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from artel.config import SourceConfig
from artel.text.records import Message

Turn = dict[str, Any]
"""A message as a row has it, under the names `role` and `content`."""

Role = Literal["system", "user", "assistant", "tool"]

_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user", "operator": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "char": "assistant",
    "tool": "tool", "function": "tool",
}  # fmt: skip
_ROLE_FIELDS = ("role", "from")
_CONTENT_FIELDS = ("content", "value")
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
_TRAINED_FIELDS = ("loss_weight", "weight", "train")
_CALL_FIELDS = ("tool_calls", "function_call")
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


class WrongRow(Exception):
    """What is wrong with a row: the reason for the ledger and the sentence for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class RowReader:
    """Rows of one source to turns and messages, by its `mapping` and `fill`."""

    def __init__(self, source: SourceConfig) -> None:
        self.mapping = source.mapping
        self._fill = source.fill
        self._filled = re.compile(r"\{\{\s*(" + "|".join(map(re.escape, source.fill)) + r")\s*\}\}")

    def named(self, row: Any) -> dict[str, Any]:
        """The row, its fields under our names; a dot in theirs reaches inside. Raises WrongRow when it is no object."""
        if not isinstance(row, dict):
            raise WrongRow("bad_json", f"is {type(row).__name__}; write an object with fields")
        renamed = {*self.mapping, *self.mapping.values()}
        named = {name: value for name, value in row.items() if name not in renamed}
        for ours, theirs in self.mapping.items():
            value: Any = row
            for step in [theirs] if theirs in row else theirs.split("."):
                value = value.get(step) if isinstance(value, dict) else None
            if value is not None:
                named[ours] = value
        return named

    def turns(self, value: Any, path: str) -> list[Turn]:
        """Turns from any of their forms: objects, columns (an object of lists), texts of user and assistant in turn."""
        if isinstance(value, dict):
            value = _transposed(value, path)
        if not isinstance(value, list):
            fix = "write a list of messages, each with role and content"
            raise WrongRow("no_messages", f"{path} is {type(value).__name__}; {fix}")
        if value and all(isinstance(item, str) for item in value):
            return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(value)]
        return [self._turn(item, f"{path}[{number}]") for number, item in enumerate(value)]

    def _turn(self, item: Any, path: str) -> Turn:
        if not isinstance(item, dict):
            raise WrongRow("no_messages", f"{path} is {type(item).__name__}; write an object with role and content")
        turn = {name: item[name] for name in (*THOUGHT_FIELDS, *_TRAINED_FIELDS, *_CALL_FIELDS) if name in item}
        for ours, usual in (("role", _ROLE_FIELDS), ("content", _CONTENT_FIELDS)):
            wanted = self.mapping.get(ours, usual[0])
            name = next((name for name in (wanted, *usual) if name in item), None)
            if name is None:
                fix = f"write mapping: {{{ours}: NAME}}"
                raise WrongRow("no_field", f"{path} has no field {wanted!r} (it has: {names_of(item)}); {fix}")
            turn[ours] = item[name]
        return turn

    def messages(self, turns: list[Turn], of: str = "") -> list[Message]:
        """The messages of turns, joined where one speaks twice. Raises WrongRow; `of` says what the turns belong to."""
        messages: list[Message] = []
        for number, turn in enumerate(turns, 1):
            message = self._message(turn, f"{of}message {number}")
            if message.role == "system" and not message.content.strip():
                continue
            if not message.content.strip():
                fix = "fill it in, or leave the row out"
                raise WrongRow("empty_message", f"{of}message {number} ({message.role}) is empty; {fix}")
            if message.role == "system" and messages:
                two = messages[0].role == "system"
                what, fix = (
                    ("is the second of the system", "make them one")
                    if two
                    else ("is of the system and does not stand first", "put it before all others")
                )
                raise WrongRow("two_systems" if two else "late_system", f"{of}message {number} {what}; {fix}")
            if messages and message.role == messages[-1].role and message.role in ("user", "assistant"):
                message = _joined(messages.pop(), message, f"{of}message {number}")
            messages.append(message)
        return messages

    def _message(self, turn: Turn, place: str) -> Message:
        said = turn["role"]
        role = _ROLES.get(said.strip().lower()) if isinstance(said, str) else None
        if role is None:
            fix = f"known are {', '.join(_ROLES)}; rename it, or write converter: module:function"
            raise WrongRow("unknown_role", f"{place} has the role {repr(said)[:80]}; {fix}")
        calls = next((name for name in _CALL_FIELDS if turn.get(name)), None)
        if calls is not None:
            fix = "write the call into content as the model shall write it"
            raise WrongRow("tool_calls", f"{place} has {calls}, which would not be learned; {fix}")
        content = self._filled_in(_text_of(turn["content"], f"the content of {place}"))
        thought = next((turn[name] for name in THOUGHT_FIELDS if turn.get(name)), "") if role == "assistant" else ""
        thought = self._filled_in(_text_of(thought, f"the thought of {place}"))
        if role == "assistant" and content.lstrip().startswith("<think>"):
            found = _THINK.match(content)
            if found is None:
                raise WrongRow("open_thought", f"{place} begins with <think>, which is never closed; write </think>")
            thought, content = found[1].strip() or thought, content[found.end() :]
        return Message(role, content, thought.strip(), _trained(turn, place))

    def _filled_in(self, text: str) -> str:
        if not self._fill:
            return text
        return self._filled.sub(lambda found: self._fill[found[1]], text)

    # What converters take from rows

    def text(self, fields: dict[str, Any], name: str, path: str = "") -> str:
        """A text that must be there."""
        if fields.get(name) is None:
            theirs = self.mapping.get(name, name)
            fix = f"write mapping: {{{name}: NAME}}, or converter: module:function"
            of = f"{path} " if path else ""
            raise WrongRow("no_field", f"{of}has no field {theirs!r} (it has: {names_of(fields)}); {fix}")
        return self.optional(fields, name, path)

    def optional(self, fields: dict[str, Any], name: str, path: str = "") -> str:
        """A text that may be absent."""
        value = fields.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            place = f"{path}.{name}" if path else f"field {name!r}"
            raise WrongRow("no_text", f"{place} is {type(value).__name__}; write it as text, in quotes")
        return value

    def system(self, row: dict[str, Any]) -> list[Turn]:
        """The system message that stands beside the messages, if any."""
        text = self.optional(row, "system")
        return [{"role": "system", "content": text}] if text.strip() else []

    def question(self, row: dict[str, Any], given: dict[str, Any] | None = None) -> list[Turn]:
        """Alpaca's turns up to the answer. What is given is put under the instruction, after a blank line."""
        history = row.get("history") or []
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise WrongRow("bad_history", "field 'history' holds no pairs; write [[question, answer], …]")
        turns = self.system(row)
        for asked, answered in history:
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        parts = (self.text(row, "instruction"), self.optional(row if given is None else given, "input"))
        return [*turns, {"role": "user", "content": "\n\n".join(part for part in parts if part.strip())}]


def _joined(before: Message, after: Message, place: str) -> Message:
    if before.trained != after.trained:
        fix = "give both one loss_weight, or join them"
        raise WrongRow("mixed_weights", f"{place} follows another of its role, and only one is learned; {fix}")
    content = f"{before.content}\n\n{after.content}"
    thought = "\n\n".join(text for text in (before.thought, after.thought) if text)
    return Message(before.role, content, thought, before.trained)


def _text_of(content: Any, place: str) -> str:
    """The text of a content, which may be a list of parts; null is the empty text."""
    parts = content if isinstance(content, list) else ["" if content is None else content]
    texts = []
    for part in parts:
        text: Any = part
        if isinstance(part, dict):
            if part.get("type", "text") != "text":
                raise WrongRow(
                    "not_text", f"{place} holds {repr(part['type'])[:80]}, which is no text; leave the row out"
                )
            text = part.get("text", part.get("value"))
        if not isinstance(text, str):
            fix = "write it as text, or as a list of {type: text, text: …}"
            raise WrongRow("no_text", f"{place} is {type(text).__name__}; {fix}")
        texts.append(text)
    return "".join(texts)


def _trained(turn: Turn, place: str) -> bool | None:
    name = next((name for name in _TRAINED_FIELDS if turn.get(name) is not None), None)
    if name is None:
        return None
    if not isinstance(turn[name], bool | int | float):
        raise WrongRow("bad_weight", f"{name} of {place} is {repr(turn[name])[:80]}; write 1 to learn it and 0 not to")
    return bool(turn[name] > 0)


def _transposed(columns: dict[str, Any], path: str) -> list[Turn]:
    """Columns to turns: {role: [user, assistant], content: [a, b]}."""
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    if not lists:
        fix = "write a list of messages, or lists of role and content"
        raise WrongRow("no_messages", f"{path} is an object without lists (it has: {names_of(columns)}); {fix}")
    if len({len(values) for values in lists.values()}) > 1:
        have = ", ".join(f"{len(values)} {name}" for name, values in lists.items())
        raise WrongRow("uneven_columns", f"the lists of {path} are not of one length ({have}); mend them")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def names_of(fields: dict[str, Any]) -> str:
    """The names of fields, for people. A function of the user's may have given them others than texts."""
    return ", ".join(map(str, fields)) or "none"
