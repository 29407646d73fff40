"""The forms in which models write calls: between marks of their own, or without any.

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

Those of the last line have no mark: a whole text is taken for a call if it calls tools that were offered. A call that
is not written out whole, or not as it must be, stays text (`reader.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from artel.text.calls.objects import call_of, calls_of, json_or_literal, names_of_tools
from artel.text.records import BadRecord, ToolCall, Tools

_DECODER = json.JSONDecoder()
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MISTRAL = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN = " \t\r\n;,"


@dataclass(frozen=True, slots=True)
class Form:
    """Calls between marks."""

    opens: str
    closes: str
    """Empty if everything up to the end of the text belongs to the calls."""
    calls: Callable[[str, Tools], list[ToolCall]]
    """Those of the text between the marks. Raises BadRecord, ValueError."""
    said: Callable[[str], str] = lambda text: ""
    """What of that text is no call, but said."""
    ends_turn: bool = False
    """Whether nothing of the turn follows the mark that closes its calls."""


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


_PYTHON_END = "<|python_end|>"


def _llama_4(text: str, tools: Tools) -> list[ToolCall]:
    """Calls after the end of the block, which the template writes around what is said, or within the block."""
    inside, _, after = text.partition(_PYTHON_END)
    body = (after if after.strip() else inside).strip()
    try:
        return _llama(body, tools)
    except (BadRecord, ValueError):
        return _pythonic(body, tools)


def _said_in_block(text: str) -> str:
    inside, _, after = text.partition(_PYTHON_END)
    return inside if after.strip() else ""


_MESSAGE_END = "<|message_sep|>"


def _gigachat(text: str, tools: Tools) -> list[ToolCall]:
    """The call between the end of what is said and its own; none where nothing follows the first."""
    if not text.strip():
        return []
    header, found, call = text.partition("<|role_sep|>")
    if header.strip() != "function call" or not found:
        raise ValueError("no call")
    return list(calls_of(call))


_DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(.+?)(?:<｜tool▁sep｜>|\n```json\n)(.*?)(?:\n```)?<｜tool▁call▁end｜>",
    re.DOTALL,
)


def _deepseek(text: str, tools: Tools) -> list[ToolCall]:
    found = _DEEPSEEK_CALL.findall(text)
    if not found:
        raise ValueError("no call")
    return [call_of({"name": name, "arguments": arguments}) for name, arguments in found]


_KIMI_CALL = re.compile(
    r"\s*((?:functions\.)?([^\s<]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
    re.DOTALL,
)


def _kimi(text: str, tools: Tools) -> list[ToolCall]:
    """The id of a call has the name in it: functions.f:0."""
    pieces = text.split("<|tool_call_begin|>")[1:]  # one search over all of it would look for each end again and again
    found = [match for piece in pieces if (match := _KIMI_CALL.match(piece)) is not None]
    if not found:
        raise ValueError("no call")
    return [call_of({"name": match[2], "arguments": match[3], "id": match[1]}) for match in found]


_GPT_OSS_CALL = re.compile(
    r"([\w.-]+)(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?\s*(?:json)?<\|message\|>(.*)", re.DOTALL
)


def _gpt_oss(text: str, tools: Tools) -> list[ToolCall]:
    match = _GPT_OSS_CALL.fullmatch(text.strip())
    if match is None:
        raise ValueError("no call")
    return [call_of({"name": match[1], "arguments": match[2]})]


_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*", re.DOTALL)
_GEMMA_TOKEN = re.compile(r'<\|"\|>(.*?)<\|"\|>|([\w.-]+)(?=:)|[^<\w]+|.', re.DOTALL)


def _gemma(text: str, tools: Tools) -> list[ToolCall]:
    """JSON without quotes around names, and with marks of their own around strings."""
    match = _GEMMA_CALL.fullmatch(text)
    if match is None:
        raise ValueError("no call")
    in_json = "".join(
        json.dumps(token[2] if token[1] is None else token[1]) if token[0].startswith('<|"|>') or token[2] else token[0]
        for token in _GEMMA_TOKEN.finditer(match[2])
    )
    return [call_of({"name": match[1], "arguments": in_json})]


FORMS = (
    Form("<tool_call>", "</tool_call>", _tagged),
    Form("<TOOLCALL>", "</TOOLCALL>", lambda text, tools: list(calls_of(text))),
    Form("[TOOL_CALLS]", "", _mistral),
    Form("<|python_tag|>", "", _llama),
    Form("<|python_start|>", "", _llama_4, _said_in_block),
    Form("<|tool_call|>", "", lambda text, tools: list(calls_of(text))),
    Form("<|tool_call>", "<tool_call|>", _gemma),
    Form("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _kimi),
    Form("<|channel|>commentary to=functions.", "<|call|>", _gpt_oss),
    Form(" to=functions.", "<|call|>", _gpt_oss),
    Form("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek),
    Form(_MESSAGE_END, _MESSAGE_END, _gigachat, ends_turn=True),
    Form("<|function_call|>", _MESSAGE_END, lambda text, tools: list(calls_of(text)), ends_turn=True),
)


# Calls without a mark


def unmarked_calls(text: str, tools: Tools) -> list[ToolCall]:
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
    if not calls:
        raise ValueError("no call")
    return calls


def _pieces(text: str) -> Iterator[str]:
    """What stands between the commas that are in no brackets and no quotes."""
    depth, quote, begin, at = 0, "", 0, 0
    has_equals = False  # in this piece
    while at < len(text):
        sign = text[at]
        if quote:
            if sign == "\\":
                at += 1
            elif sign == quote:
                quote = ""
        elif sign in "\"'" and (depth or has_equals):  # an apostrophe in a name is no quote
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and not depth:
            yield text[begin:at]
            begin, has_equals = at + 1, False
        has_equals = has_equals or sign == "="
        at += 1
    if text[begin:].strip():
        yield text[begin:]
