"""Calls of tools in texts, as models write them and data sets have them: read back into names and arguments.

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>                                Hermes, Qwen, SmolLM3
    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>                   Qwen3-Coder, Qwen3.5
    <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>                       GLM-4.5
    <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>                                Nemotron, When2Call
    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]   [TOOL_CALLS]f[ARGS]{"a": 1}           Mistral
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}                                        Llama 3
    {"name": "f", "parameters": {"a": 1}}   [f(a=1)]                                           Llama 3 and 4, ToolACE

Those of the last line have no mark: a whole text is taken for a call if it calls tools that were offered. A call that
is not written out whole, or not as it must be, stays text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from artel.text.records import BadRecord, ToolCall, Tools

_DECODER = json.JSONDecoder()
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MISTRAL = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN = " \t\r\n;,"


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
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(str(error)) from None


def _shown(value: Any) -> str:
    return repr(value)[:80]


def read_calls(text: str, tools: Tools = ()) -> tuple[str, tuple[ToolCall, ...]]:
    """The text without the calls in it, and the calls. Calls without a mark are recognized if they are of `tools`."""
    reader = CallReader(tools)
    rest = reader.add(text) + reader.rest()
    return (rest.strip() if reader.calls else text), tuple(reader.calls)


@dataclass(frozen=True, slots=True)
class _Form:
    """Calls between marks."""

    opens: str
    closes: str
    """Empty if everything up to the end of the text belongs to the calls."""
    calls: Callable[[str, Tools], list[ToolCall]]
    """Those of the text between the marks. Raises BadRecord, ValueError."""


@dataclass(slots=True)
class CallReader:
    """Takes a text piece by piece: what is no call is returned as soon as that is certain."""

    tools: Tools = ()
    calls: list[ToolCall] = field(default_factory=list)
    """Those that are whole."""
    _held: str = ""
    _inside: _Form | None = None
    _begun: bool = False
    """Whether the text has begun with something that is no call."""

    def add(self, text: str) -> str:
        """The text that is no call, as far as that is certain."""
        self._held += text
        if not self._begun and self._inside is None:
            if self._may_be_unmarked():
                return ""
            self._begun = bool(self._held.strip())
        shown = ""
        while True:
            if self._inside is None:
                form, at = self._next_mark()
                if form is None:
                    break
                shown += self._held[:at]
                self._held = self._held[at + len(form.opens) :]
                self._inside = form
            body, found, after = self._held.partition(self._inside.closes) if self._inside.closes else ("", "", "")
            if not found:
                return shown
            shown += self._closed(body, found)
            self._held = after
        kept = max(_unfinished(self._held, form.opens) for form in _FORMS)
        shown += self._held[: len(self._held) - kept]
        self._held = self._held[len(self._held) - kept :]
        return shown

    def rest(self) -> str:
        """What was held back, when nothing more comes; a call may lack its end."""
        if self._inside is not None:
            return self._closed(self._held, "")
        if not self._begun:
            self.calls += (calls := _unmarked(self._held, self.tools))
            if calls:
                return ""
            self._begun = True
            held, self._held = self._held, ""
            return self.add(held) + self.rest()
        return self._held

    def _closed(self, body: str, closing: str) -> str:
        """Take the calls of a body; the text that it is if it has none."""
        form = self._inside
        assert form is not None
        self._inside = None
        try:
            self.calls += form.calls(body, self.tools)
        except (BadRecord, ValueError, SyntaxError):
            return form.opens + body + closing
        return ""

    def _next_mark(self) -> tuple[_Form | None, int]:
        found = [(at, form) for form in _FORMS if (at := self._held.find(form.opens)) >= 0]
        if not found:
            return None, -1
        at, form = min(found, key=lambda pair: pair[0])
        return form, at

    def _may_be_unmarked(self) -> bool:
        text = self._held.lstrip()
        if not self.tools or any(text.startswith(form.opens) for form in _FORMS):
            return False
        return text[:1] in ("", "{", "[") or any(
            name.startswith(text) or text.startswith(f"{name}{{") for name in names_of_tools(self.tools)
        )


def _unfinished(text: str, mark: str) -> int:
    """Characters at the end of a text with which a mark begins."""
    return max(size for size in range(len(mark)) if text.endswith(mark[:size]))


def names_of_tools(tools: Tools) -> list[str]:
    return [tool["function"]["name"] for tool in tools if isinstance(tool.get("function"), dict)]


# What stands between the marks


def _tagged(text: str, tools: Tools) -> list[ToolCall]:
    if "<function=" in text:
        return [_of_function_tag(text, tools)]
    if "<arg_key>" in text or not text.lstrip().startswith(("{", "[")):
        return [_of_argument_tags(text, tools)]
    return list(calls_of(text))


def _of_function_tag(text: str, tools: Tools) -> ToolCall:
    match = _FUNCTION.fullmatch(text)
    if match is None:
        raise ValueError("no function")
    name = match[1].strip()
    types = _types(name, tools)
    return ToolCall(name, {key: _typed(value, types.get(key)) for key, value in _PARAMETER.findall(match[2])})


def _of_argument_tags(text: str, tools: Tools) -> ToolCall:
    name = text.partition("<arg_key>")[0].strip()
    if not name or re.search(r"\s", name):
        raise ValueError("no function")
    types = _types(name, tools)
    found = _ARGUMENT.findall(text)
    return ToolCall(name, {key.strip(): _typed(value, types.get(key.strip())) for key, value in found})


def _types(name: str, tools: Tools) -> dict[str, Any]:
    """The declared type of each parameter of a function."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            if isinstance(properties, dict):
                return {key: value.get("type") for key, value in properties.items() if isinstance(value, dict)}
    return {}


def _typed(text: str, kind: Any) -> Any:
    """The value of a parameter that is written without quotes: a string where that is its type, else as JSON."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _mistral(text: str, tools: Tools) -> list[ToolCall]:
    if text.lstrip().startswith(("[{", "{")):
        value, _ = _DECODER.raw_decode(text.lstrip())
        return list(calls_of(value))
    calls: list[ToolCall] = []
    at = 0
    while (match := _MISTRAL.match(text, at)) is not None:
        arguments, at = _DECODER.raw_decode(text, match.end())
        calls.append(call_of({"name": match[1], "arguments": arguments}))
    if not calls or text[at:].strip():
        raise ValueError("no call")
    return calls


def _llama(text: str, tools: Tools) -> list[ToolCall]:
    """JSON objects one after another, with or without `;` between them."""
    calls: list[ToolCall] = []
    rest = text.strip(_BETWEEN)
    while rest:
        value, at = _DECODER.raw_decode(rest)
        calls += calls_of(value)
        rest = rest[at:].lstrip(_BETWEEN)
    if not calls:
        raise ValueError("no call")
    return calls


_DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(.+?)(?:<｜tool▁sep｜>|\n```json\n)(.*?)(?:\n```)?<｜tool▁call▁end｜>",
    re.DOTALL,
)


def _deepseek(text: str, tools: Tools) -> list[ToolCall]:
    found = _DEEPSEEK_CALL.findall(text)
    if not found:
        raise ValueError("no call")
    return [call_of({"name": name, "arguments": arguments}) for name, arguments in found]


_FORMS = (
    _Form("<tool_call>", "</tool_call>", _tagged),
    _Form("<TOOLCALL>", "</TOOLCALL>", lambda text, tools: list(calls_of(text))),
    _Form("[TOOL_CALLS]", "", _mistral),
    _Form("<|python_tag|>", "", _llama),
    _Form("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek),
)


# Calls without a mark


def _unmarked(text: str, tools: Tools) -> list[ToolCall]:
    """The calls that a whole text consists of; none if it has others than those of `tools`."""
    offered = set(names_of_tools(tools))
    body = text.strip()
    for read in (_llama, _mistral, _pythonic) if offered and body else ():
        try:
            calls = read(body, tools)
        except (BadRecord, ValueError, SyntaxError, RecursionError):
            continue
        if calls and all(call.name in offered for call in calls):
            return calls
    return []


def _pythonic(text: str, tools: Tools) -> list[ToolCall]:
    """`[f(a=1), g()]`. Names of functions may have spaces, and names of arguments may be Python's own words."""
    if not text.startswith("[") or not text.endswith("]"):
        raise ValueError("no list")
    calls = []
    for piece in _pieces(text[1:-1]):
        name, found, inside = piece.strip().partition("(")
        if not found or not inside.endswith(")") or not name.strip():
            raise ValueError("no call")
        arguments = {}
        for argument in _pieces(inside[:-1]):
            key, equals, value = argument.partition("=")
            if not equals:
                raise ValueError("an argument without a name")
            arguments[key.strip()] = json_or_literal(value)
        calls.append(ToolCall(name.strip(), arguments))
    return calls


def _pieces(text: str) -> Iterator[str]:
    """What stands between the commas that are in no brackets and no quotes."""
    depth, quote, begin, at = 0, "", 0, 0
    while at < len(text):
        sign = text[at]
        if quote:
            if sign == "\\":
                at += 1
            elif sign == quote:
                quote = ""
        elif sign in "\"'" and (depth or "=" in text[begin:at]):  # an apostrophe in a name is no quote
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and not depth:
            yield text[begin:at]
            begin = at + 1
        at += 1
    if text[begin:].strip():
        yield text[begin:]
