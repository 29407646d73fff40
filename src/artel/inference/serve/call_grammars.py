"""Grammars of tool calls, in llguidance's dialect of Lark. The JSON schemas of arguments are inside.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. llguidance's own `StructTag` supports no added
tokens other than `<…>` and no arguments in tags, and lets text follow a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from artel.inference.serve.grammars import WHITESPACE
from artel.text import Tools
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import added_tokens
from artel.tokens.tokenizer.template_calls import NUMBER, ArgumentTags, CallForm

_MAX_CALLS = 16
"""Maximum calls in one answer, since small models may never stop."""
_TEMPLATE_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it, which the model has learned."""
_PLAIN_KEYS = {
    *("type", "properties", "required", "additionalProperties", "title", "description"),
    *("$defs", "definitions", "$schema"),
}
"""Keys of parameters that only list arguments."""


class UnsupportedParameters(Exception):
    """Raised if the call of a function cannot be forced, with its name and the reason."""


def required_calls_grammar(form: CallForm, tools: Tools, tokenizer: Tokenizer, *, parallel_calls: bool) -> str:
    """Return a grammar of answers that are one call of `tools`, or several with `parallel_calls` if the form allows it.

    Raise UnsupportedParameters for parameters that the form cannot express.
    """
    symbols = _Symbols(tokenizer)
    rules = _call_rules(form, [(tool["function"], True) for tool in tools], symbols, parallel_calls=parallel_calls)
    return "\n".join([f"start: {symbols.encode(form.prefix)} calls", *rules])


def optional_calls_grammar(
    form: CallForm,
    tools: Tools,
    tokenizer: Tokenizer,
    ends: Collection[int],
    *,
    parallel_calls: bool,
    answer: dict[str, Any] | None = None,
) -> str:
    """Return a grammar of answers that are text, calls of `tools`, or text followed by calls.

    After the mark that opens calls, only calls are allowed: one, or several with `parallel_calls`. A `strict` function
    takes arguments that fit its schema, any other function any object. `ends`: ids that end an answer. `answer`: a JSON
    schema; an answer is then calls, or JSON that fits the schema.

    The form must have a mark. Raise UnsupportedParameters for parameters that it cannot express.
    """
    symbols = _Symbols(tokenizer)
    functions = [(tool["function"], bool(tool["function"].get("strict"))) for tool in tools]
    if answer is not None:
        start = [
            f"start: answer | {symbols.encode(form.prefix_after_text)} calls",
            f"answer: %json {json.dumps({'x-guidance': WHITESPACE} | answer)}",
        ]
    else:
        start = [*_text_rules(form, symbols, added_tokens(tokenizer), ends)]
    return "\n".join([*start, *_call_rules(form, functions, symbols, parallel_calls=parallel_calls)])


def _text_rules(form: CallForm, symbols: _Symbols, added: dict[str, int], ends: Collection[int]) -> Iterator[str]:
    """Yield the rules of an answer that begins with text. The text has no mark, as a token or as characters."""
    mark = re.escape(form.mark).replace("/", "\\/")
    allowed = sorted({token_id for text, token_id in added.items() if text != form.mark} - {*ends})
    opening = symbols.encode(form.prefix_after_text[len(form.mark) :])
    yield f"start: {'added* ' if allowed else ''}(TEXT? | begin {opening} calls)"
    if allowed:
        yield f"added: TEXT? <[{','.join(map(str, allowed))}]>"
    yield f"TEXT: /(?s:.+)/ & ~/(?s:.*){mark}(?s:.*)/"
    if form.mark in added:
        yield f"begin: TEXT? {symbols.encode(form.mark)}"
    else:
        yield "begin[lazy]: MARKED"
        yield f"MARKED: /(?s:.*){mark}/"


class _Symbols:
    """Turns texts into symbols of a grammar: added tokens by id, the text between them as literals."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = added_tokens(tokenizer)
        longest_first = sorted([*self._ids, NUMBER], key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode(self, text: str) -> str:
        return " ".join(map(self._encode_symbol, filter(None, self._split.split(text)))) or '""'

    def _encode_symbol(self, text: str) -> str:
        if text == NUMBER:
            return "/[0-9]{1,3}/"
        return f"<[{self._ids[text]}]>" if text in self._ids else json.dumps(text, ensure_ascii=False)


def _call_rules(
    form: CallForm, functions: Sequence[tuple[dict[str, Any], bool]], symbols: _Symbols, *, parallel_calls: bool
) -> Iterator[str]:
    """Yield the rules of `calls`, the text after a form's opening. `functions`: (function, True if it is strict)."""
    more_calls = ""
    if parallel_calls and form.between_calls is not None:
        more_calls = f"({symbols.encode(form.between_calls)} call){{0,{_MAX_CALLS - 1}}}"
    yield f"calls: call {more_calls} {symbols.encode(form.suffix)}"
    yield f"call: {' | '.join(f'call{index}' for index in range(len(functions)))}"
    for index, (function, strict) in enumerate(functions):
        rule = f"call{index}"
        name = symbols.encode(function["name"])
        if form.tags is None:
            schema = _arguments_schema(function) if strict else {"type": "object"}
            yield f"{rule}: {name} {symbols.encode(form.after_name)} {rule}_arguments"
            yield f"{rule}_arguments: {_json_rule(schema)}"
        else:
            schema = _arguments_schema(function) if strict else _text_arguments_schema(function)
            yield f"{rule}: {name} {rule}_first0"
            yield from _tag_rules(rule, function["name"], schema, form.tags, symbols)


def _text_arguments_schema(function: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of optional arguments that may be any text, since tags have no quotes."""
    schema = function.get("parameters") or {}
    _check_shape(function["name"], schema)
    return {"type": "object", "properties": {key: {"type": "string"} for key in schema.get("properties", {})}}


def _arguments_schema(function: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments. Raise UnsupportedParameters if it is not that of an object."""
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    _check_shape(function["name"], schema)
    if schema.get("type", "object") != "object":
        raise UnsupportedParameters(f"{function['name']}: parameters must have the type object, not {schema['type']!r}")
    # Few schemas forbid other arguments, and weak models invent some.
    closed = schema.keys() <= _PLAIN_KEYS and "properties" in schema
    return {"type": "object"} | ({"additionalProperties": False} if closed else {}) | schema


def _check_shape(name: str, schema: dict[str, Any]) -> None:
    """Raise UnsupportedParameters if `properties` or `required` do not have the types of JSON Schema."""
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(properties, dict):
        raise UnsupportedParameters(f"{name}: properties must be an object")
    if not (isinstance(required, list) and all(isinstance(key, str) for key in required)):
        raise UnsupportedParameters(f"{name}: required must be an array of names")


def _json_rule(schema: Any) -> str:
    return f"%json {json.dumps({'x-guidance': _TEMPLATE_JSON} | schema if isinstance(schema, dict) else schema)}"


def _tag_rules(rule: str, name: str, schema: dict[str, Any], tags: ArgumentTags, symbols: _Symbols) -> Iterator[str]:
    """Yield the rules of arguments in tags, in the order of the schema. Only required arguments must be present."""
    if unknown := sorted(schema.keys() - _PLAIN_KEYS):
        raise UnsupportedParameters(
            f"{name}: {unknown[0]!r} is not supported in parameters that the model writes in tags"
        )
    required = dict.fromkeys(schema.get("required", []))
    properties = schema.get("properties", {})
    properties = properties | {key: {} for key in required if key not in properties}
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for index, (key, value) in enumerate(properties.items()):
        if not re.fullmatch(r"[^<>\s]+", key):
            raise UnsupportedParameters(
                f"{name}: {key!r} is not a valid name for a parameter that the model writes in tags"
            )
        argument = f"{symbols.encode(key + tags.value)} {rule}_value{index} {rule}_next{index + 1}"
        for prefix, state in ((tags.first, "first"), (tags.next.removeprefix(tags.value_end), "next")):
            skipped = "" if key in required else f" | {rule}_{state}{index + 1}"
            yield f"{rule}_{state}{index}: {symbols.encode(prefix)} {argument}{skipped}"
        yield from _value_rules(f"{rule}_value{index}", f"{name}: {key}", value, shared, tags.value_end, symbols)
    yield f"{rule}_first{len(properties)}: {symbols.encode(tags.none)}"
    yield f"{rule}_next{len(properties)}: {symbols.encode(tags.last.removeprefix(tags.value_end))}"


def _value_rules(
    rule: str, location: str, schema: Any, shared: dict[str, Any], end: str, symbols: _Symbols
) -> Iterator[str]:
    """Yield the rules of a value and its closing tag: a string without quotes, anything else as JSON."""
    if not isinstance(schema, dict) or schema.get("type") != "string":
        yield f"{rule}: {rule}_json {symbols.encode(end)}"
        yield f"{rule}_json: {_json_rule(shared | schema if isinstance(schema, dict) else schema)}"
        return
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None:
        if not isinstance(choices, list):
            raise UnsupportedParameters(f"{location}: enum must be an array")
        literals = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices if isinstance(choice, str))
        yield f"{rule}: ({literals}) {symbols.encode(end)}"
        return
    if "pattern" in schema:
        raise UnsupportedParameters(f"{location}: pattern is not supported in parameters that the model writes in tags")
    length_range = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    # CallReader must find the end of the value and of the call, and recognize the form.
    marks = "|".join(map(re.escape, (end.strip(), "</tool_call>", "<function="))).replace("/", "\\/")
    terminal = rule.upper()
    yield f"{rule}[lazy]: {terminal}"
    yield f"{terminal}: {terminal}_TEXT {json.dumps(end)}"
    yield f"{terminal}_TEXT: /(?s:.){length_range}/ & ~/(?s:.*)({marks})(?s:.*)/"
