"""Parse tool calls in text, as models write them and datasets store them, into names and arguments.

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>                                Hermes, Qwen, SmolLM3
    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>                   Qwen3-Coder, Qwen3.5
    <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>                       GLM-4.5
    <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>                                Nemotron, When2Call
    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]   [TOOL_CALLS]f[ARGS]{"a": 1}           Mistral
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}                                        Llama 3
    <|python_start|>I look.<|python_end|>{"name": "f", "parameters": {"a": 1}}                 Llama 4
    <|python_start|>[f(a=1)]<|python_end|>                                                     Llama 4
    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]                                        Granite 3
    <|tool_call>call:f{a:1,b:<|"|>c<|"|>}<tool_call|>                                          Gemma 4
    <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>      Kimi K2, in a section
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>          gpt-oss
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f … ```json {"a": 1} ```<｜tool▁call▁end｜>       DeepSeek, in a section
    <|message_sep|>function call<|role_sep|>{"name": "f", "arguments": {"a": 1}}               GigaChat 3
    <|function_call|>{"name": "f", "arguments": {"a": 1}}                                      GigaChat 3.1
    {"name": "f", "parameters": {"a": 1}}   [f(a=1)]                                           Llama 3 and 4, ToolACE

The last line has no marker: a text counts as calls only if all of it parses as calls of offered tools. A malformed
call stays text.

transformers' `parse_response` does less: it needs a `response_template` for each tokenizer, which few ship and datasets
lack, raises ValueError at a malformed call, and reads neither calls without a marker nor Python literals (Hermes).
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
_FIX_CALL = 'write {"name": "FUNCTION", "arguments": {…}}'
_PARSE_ERRORS = (BadRecord, ValueError, SyntaxError, RecursionError)


# Calls as JSON objects


def parse_call(value: Any) -> ToolCall:
    """Return the call in an object: {"name", "arguments"}, or OpenAI's {"function": {…}}.

    Raise BadRecord if the object has no name, or arguments that are not an object.
    """
    function = value.get("function") if isinstance(value, dict) and isinstance(value.get("function"), dict) else value
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise BadRecord("bad_tool_call", f"{repr(value)[:80]} is not a tool call; {_FIX_CALL}")
    name = function["name"]
    arguments = function.get("arguments", function.get("parameters"))
    call_id = value.get("id")
    fix = 'write {"NAME": VALUE}'
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise BadRecord("bad_arguments", f"the arguments of {name} are not JSON: {error}; {fix}") from None
    if not isinstance(arguments, dict | None):
        raise BadRecord("bad_arguments", f"the arguments of {name} are {repr(arguments)[:80]}; {fix}")
    return ToolCall(name.strip(), arguments or {}, call_id if isinstance(call_id, str) else "")


def parse_calls(value: Any) -> tuple[ToolCall, ...]:
    """Return the calls in an object, a list of objects, or the JSON of either.

    Raise BadRecord if it is not JSON or one of the calls is malformed.
    """
    if isinstance(value, str):
        try:
            value = _parse_json_or_literal(value)
        except ValueError as error:
            raise BadRecord("bad_tool_call", f"the call {repr(value)[:80]} is not JSON: {error}; {_FIX_CALL}") from None
    return tuple(parse_call(item) for item in (value if isinstance(value, list) else [value]))


def _parse_json_or_literal(text: str) -> Any:
    """Parse JSON, or a Python literal, which some datasets use instead. Raise ValueError if it is neither."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        try:
            return json.loads(json.dumps(ast.literal_eval(text.strip())))  # JSON has no sets, and lists for tuples
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(str(error)) from None


def tool_names(tools: Tools) -> list[str]:
    return [tool["function"]["name"] for tool in tools if isinstance(tool.get("function"), dict)]


# Calls between markers. Each parser gets the text between the markers, and raises one of _PARSE_ERRORS.


def _parse_json(text: str, tools: Tools) -> list[ToolCall]:
    return list(parse_calls(text))


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _parse_tool_call_tag(text: str, tools: Tools) -> list[ToolCall]:
    """Parse the content of `<tool_call>`, which three families of models write differently."""
    if "<function=" in text:
        match = _FUNCTION.fullmatch(text)
        if match is None:
            raise ValueError("malformed function tag")
        name, arguments = match[1].strip(), _PARAMETER.findall(match[2])
    elif "<arg_key>" in text or not text.lstrip().startswith(("{", "[")):
        name = text.partition("<arg_key>")[0].strip()
        if not name or re.search(r"\s", name):
            raise ValueError("no function name")
        arguments = [(key.strip(), value) for key, value in _ARGUMENT.findall(text)]
    else:
        return _parse_json(text, tools)
    types = _parameter_types(name, tools)
    return [ToolCall(name, {key: _parse_value(value, types.get(key)) for key, value in arguments})]


def _parameter_types(name: str, tools: Tools) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            if isinstance(properties, dict):
                return {key: value.get("type") for key, value in properties.items() if isinstance(value, dict)}
    return {}


def _parse_value(text: str, declared_type: Any) -> Any:
    """Return the text itself if the parameter is a string, else parse it as JSON."""
    if declared_type == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


_MISTRAL_CALL = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


def _parse_mistral(text: str, tools: Tools) -> list[ToolCall]:
    if text.lstrip().startswith(("[{", "{")):
        value, _ = _DECODER.raw_decode(text.lstrip())
        return list(parse_calls(value))
    calls: list[ToolCall] = []
    offset = 0
    while (match := _MISTRAL_CALL.match(text, offset)) is not None:
        arguments, offset = _DECODER.raw_decode(text, match.end())
        calls.append(parse_call({"name": match[1], "arguments": arguments}))
    if text[offset:].strip():
        raise ValueError("text after a call")
    return _require_calls(calls)


def _require_calls(calls: list[ToolCall]) -> list[ToolCall]:
    if not calls:
        raise ValueError("no call")
    return calls


def _parse_llama(text: str, tools: Tools) -> list[ToolCall]:
    """Parse JSON objects one after another, with or without `;` between them."""
    calls: list[ToolCall] = []
    separators = " \t\r\n;,"
    remaining = text.strip(separators)
    while remaining:
        value, end = _DECODER.raw_decode(remaining)
        calls += parse_calls(value)
        remaining = remaining[end:].lstrip(separators)
    return _require_calls(calls)


def _parse_llama_4(text: str, tools: Tools) -> list[ToolCall]:
    """Parse the calls inside the block, or after it if the template wrote text inside."""
    inside, _, after = text.partition("<|python_end|>")
    body = (after if after.strip() else inside).strip()
    try:
        return _parse_llama(body, tools)
    except (BadRecord, ValueError):
        return _parse_pythonic(body, tools)


def _llama_4_text(text: str) -> str:
    inside, _, after = text.partition("<|python_end|>")
    return inside if after.strip() else ""


def _parse_gigachat(text: str, tools: Tools) -> list[ToolCall]:
    """Parse the call after `<|message_sep|>`. Without text after it, the marker only ended the message."""
    header, separator, call = text.partition("<|role_sep|>")
    if text.strip() and (header.strip() != "function call" or not separator):
        raise ValueError("no call")
    return list(parse_calls(call)) if separator else []


def _make_pattern_parser(pattern: str) -> Callable[[str, Tools], list[ToolCall]]:
    """Return a parser of calls that match a pattern with the groups name, arguments and, if calls have one, id."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text, tools: _require_calls([parse_call(match.groupdict()) for match in compiled.finditer(text)])


_parse_deepseek = _make_pattern_parser(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>.+?)(?:<｜tool▁sep｜>|\n```json\n)"
    r"(?P<arguments>.*?)(?:\n```)?<｜tool▁call▁end｜>"
)
_parse_gpt_oss = _make_pattern_parser(
    r"\A\s*(?P<name>[\w.-]+)(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?\s*(?:json)?<\|message\|>"
    r"(?P<arguments>.*)"
)
# The id contains the name: functions.f:0. Arguments end before the next call, or each end would be searched again.
_parse_kimi = _make_pattern_parser(
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
    r"(?P<arguments>(?:(?!<\|tool_call_begin\|>).)*?)<\|tool_call_end\|>"
)
_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*", re.DOTALL)
_GEMMA_STRING_OR_KEY = re.compile(r'<\|"\|>(.*?)<\|"\|>|([\w.-]+)(?=:)', re.DOTALL)


def _parse_gemma(text: str, tools: Tools) -> list[ToolCall]:
    """Parse JSON with bare keys, and `<|"|>` around strings."""
    match = _GEMMA_CALL.fullmatch(text)
    if match is None:
        raise ValueError("no call")
    arguments = _GEMMA_STRING_OR_KEY.sub(lambda item: json.dumps(item[1] if item[2] is None else item[2]), match[2])
    return [parse_call({"name": match[1], "arguments": arguments})]


@dataclass(frozen=True, slots=True)
class _Format:
    """Calls between two markers."""

    start_marker: str
    end_marker: str
    """Empty if the calls extend to the end of the text."""
    parse: Callable[[str, Tools], list[ToolCall]]
    text_of: Callable[[str], str] = lambda body: ""
    """Return the text between the markers that is not part of a call."""
    ends_turn: bool = False
    """True if the closing marker ends the turn."""


_FORMATS = (
    _Format("<tool_call>", "</tool_call>", _parse_tool_call_tag),
    _Format("<TOOLCALL>", "</TOOLCALL>", _parse_json),
    _Format("[TOOL_CALLS]", "", _parse_mistral),
    _Format("<|python_tag|>", "", _parse_llama),
    _Format("<|python_start|>", "", _parse_llama_4, _llama_4_text),
    _Format("<|tool_call|>", "", _parse_json),
    _Format("<|tool_call>", "<tool_call|>", _parse_gemma),
    _Format("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _parse_kimi),
    _Format("<|channel|>commentary to=functions.", "<|call|>", _parse_gpt_oss),
    _Format(" to=functions.", "<|call|>", _parse_gpt_oss),
    _Format("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _parse_deepseek),
    _Format("<|message_sep|>", "<|message_sep|>", _parse_gigachat, ends_turn=True),
    _Format("<|function_call|>", "<|message_sep|>", _parse_json, ends_turn=True),
)


# Calls without a marker


def _parse_unmarked_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Return the calls if the whole text consists of calls of `tools`; else an empty list."""
    offered = set(tool_names(tools))
    body = text.strip()
    for parse in (_parse_llama, _parse_mistral, _parse_pythonic) if offered and body else ():
        try:
            calls = parse(body, tools)
        except _PARSE_ERRORS:
            continue
        if calls and all(call.name in offered for call in calls):
            return calls
    return []


def _parse_pythonic(text: str, tools: Tools) -> list[ToolCall]:
    """Parse `[f(a=1), g()]`. Function names may contain spaces, and argument names may be Python keywords."""
    if not text.startswith("[") or not text.endswith("]"):
        raise ValueError("no list")
    calls = []
    for call in _split_at_commas(text[1:-1]):
        name, parenthesis, argument_list = call.strip().partition("(")
        if not parenthesis or not argument_list.endswith(")") or not name.strip():
            raise ValueError("no call")
        arguments = {}
        for argument in _split_at_commas(argument_list[:-1]):
            key, equals, value = argument.partition("=")
            if not equals:
                raise ValueError("an argument without a name")
            arguments[key.strip()] = _parse_json_or_literal(value)
        calls.append(ToolCall(name.strip(), arguments))
    return _require_calls(calls)


def _split_at_commas(text: str) -> Iterator[str]:
    """Split at the commas outside brackets and quotes."""
    depth = start = 0
    quote = ""
    has_equals = False  # in the current chunk: before an equals sign, an apostrophe is part of a name, not a quote
    for match in re.finditer(r"""\\.|["'()\[\]{},=]""", text, re.DOTALL):
        char = match[0]
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'" and (depth or has_equals):
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and not depth:
            yield text[start : match.start()]
            start, has_equals = match.end(), False
        has_equals = has_equals or char == "="
    if text[start:].strip():
        yield text[start:]


# Reading


def read_calls(text: str, tools: Tools = ()) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text without its calls, and the calls. Calls without a marker count only if they call `tools`."""
    reader = CallReader(tools)
    remaining = reader.feed(text) + reader.flush()
    return (remaining.strip() if reader.calls else text), tuple(reader.calls)


@dataclass(slots=True)
class CallReader:
    """Reads a text chunk by chunk, and returns text as soon as it cannot be part of a call."""

    tools: Tools = ()
    calls: list[ToolCall] = field(default_factory=list)
    """Complete calls."""
    is_over: bool = False
    """True once calls have ended the turn. Later text is dropped."""
    _pending: str = ""
    _open_format: _Format | None = None
    _has_text: bool = False
    """True once the text has begun with something other than a call."""

    def feed(self, text: str) -> str:
        """Return the text that is certainly not part of a call."""
        if self.is_over:
            return ""
        self._pending += text
        if not self._has_text and self._open_format is None:
            if self._may_be_unmarked():
                return ""
            self._has_text = bool(self._pending.strip())
        visible = ""
        while True:
            if self._open_format is None:
                starts = [(start, item) for item in _FORMATS if (start := self._pending.find(item.start_marker)) >= 0]
                if not starts:
                    break
                start, self._open_format = min(starts, key=lambda pair: pair[0])
                visible += self._pending[:start]
                self._pending = self._pending[start + len(self._open_format.start_marker) :]
            end_marker = self._open_format.end_marker
            body, closed, after = self._pending.partition(end_marker) if end_marker else ("", "", "")
            if not closed:
                return visible
            visible += self._close_call(body, closed)
            self._pending = "" if self.is_over else after
        markers = (item.start_marker for item in _FORMATS)
        overlap = max(n for marker in markers for n in range(len(marker)) if self._pending.endswith(marker[:n]))
        end = len(self._pending) - overlap  # the characters after `end` may be the beginning of a marker
        visible += self._pending[:end]
        self._pending = self._pending[end:]
        return visible

    def flush(self) -> str:
        """Return the text still pending at the end. The last call may lack its closing marker."""
        if self._open_format is not None:
            return self._close_call(self._pending, "")
        if not self._has_text:
            self.calls += (calls := _parse_unmarked_calls(self._pending, self.tools))
            if calls:
                return ""
            self._has_text = True
            pending, self._pending = self._pending, ""
            return self.feed(pending) + self.flush()
        return self._pending

    def _close_call(self, body: str, closing: str) -> str:
        """Collect the calls in `body` and return the remaining text, or all of it if the calls are malformed."""
        item = self._open_format
        assert item is not None
        self._open_format = None
        try:
            self.calls += item.parse(body, self.tools)
        except _PARSE_ERRORS:
            return item.start_marker + body + closing
        self.is_over = item.ends_turn and bool(closing)
        return item.text_of(body)

    def _may_be_unmarked(self) -> bool:
        text = self._pending.lstrip()
        if not self.tools or any(text.startswith(item.start_marker) for item in _FORMATS):
            return False
        return text[:1] in ("", "{", "[") or any(
            name.startswith(text) or text.startswith(f"{name}{{") for name in tool_names(self.tools)
        )
