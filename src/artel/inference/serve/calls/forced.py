"""Calls that an answer must consist of: the grammar that allows nothing else, and what is read out of its text.

The grammar is Lark's, as llguidance takes it, with the schemas of arguments within:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from artel.inference.serve.calls.read import CallUpdates, ToolCalls
from artel.text import Tools
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import added_tokens
from artel.tokens.tokenizer.template_calls import NUMBER, ArgumentTags, CallForm

_MOST_CALLS = 16
"""Of an answer: small models may never end by themselves."""
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it, which the model has learned."""
_PLAIN = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "title",
    "description",
    "$defs",
    "definitions",
    "$schema",
}
"""Keys of parameters that are nothing but a list of arguments."""


class CannotForce(Exception):
    """A function whose call cannot be forced, and why."""


# The grammar


def call_grammar(form: CallForm, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str:
    """A grammar of answers that are calls of `tools`, one or, where the form has them, `several`.

    Raises CannotForce for parameters that the form has no place for.
    """
    texts = Texts(tokenizer)
    rules = call_rules(form, [(tool["function"], True) for tool in tools], texts, several=several)
    return "\n".join([f"start: {texts.of(form.opens)} calls", *rules])


def call_rules(
    form: CallForm, functions: Sequence[tuple[dict[str, Any], bool]], texts: Texts, *, several: bool
) -> Iterator[str]:
    """The rules of `calls`: what follows a form's opening. `functions`: each, and whether its schema is kept.

    Raises CannotForce.
    """
    names = " | ".join(f"call{number}" for number in range(len(functions)))
    more = f"({texts.of(form.between)} call){{0,{_MOST_CALLS - 1}}}" if several and form.between is not None else ""
    yield f"calls: call {more} {texts.of(form.closes)}"
    yield f"call: {names}"
    for number, (function, keeps_schema) in enumerate(functions):
        rule, name = f"call{number}", texts.of(function["name"])
        if form.tags is None:
            schema = _object_schema(function) if keeps_schema else {"type": "object"}
            yield f"{rule}: {name} {texts.of(form.named)} {rule}_arguments"
            yield f"{rule}_arguments: {_json(schema)}"
        else:
            schema = _object_schema(function) if keeps_schema else _texts_alone(function)
            yield f"{rule}: {name} {rule}_first0"
            yield from _tagged(rule, function["name"], schema, form.tags, texts)


def _texts_alone(function: dict[str, Any]) -> dict[str, Any]:
    """A schema in which every argument may be left out, and may be any text: tags have no quotes around it."""
    schema = function.get("parameters") or {}
    _check_shape(function["name"], schema)
    return {"type": "object", "properties": {key: {"type": "string"} for key in schema.get("properties", {})}}


def _object_schema(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object. Raises CannotForce."""
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    _check_shape(function["name"], schema)
    if schema.get("type", "object") != "object":
        raise CannotForce(f"{function['name']}: parameters of the type {schema['type']!r}; write object")
    # Few schemas say that there are no other arguments, and a weak model invents some.
    closed = schema.keys() <= _PLAIN and "properties" in schema
    return {"type": "object"} | ({"additionalProperties": False} if closed else {}) | schema


def _check_shape(name: str, schema: dict[str, Any]) -> None:
    """Raise CannotForce where what is read of a schema is not what JSON Schema has there."""
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(properties, dict):
        raise CannotForce(f"{name}: properties that are no object")
    if not (isinstance(required, list) and all(isinstance(key, str) for key in required)):
        raise CannotForce(f"{name}: required that is no list of names")


def _json(schema: Any) -> str:
    options = {"x-guidance": _WRITTEN}
    return f"%json {json.dumps(options | schema if isinstance(schema, dict) else schema)}"


class Texts:
    """Texts as symbols of a grammar: added tokens by their ids, what stands between them as literals."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = added_tokens(tokenizer)
        longest_first = sorted([*self._ids, NUMBER], key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def of(self, text: str) -> str:
        """The symbols of a text, in a row."""
        return " ".join(map(self._symbol, filter(None, self._split.split(text)))) or '""'

    def _symbol(self, piece: str) -> str:
        if piece == NUMBER:
            return "/[0-9]{1,3}/"
        return f"<[{self._ids[piece]}]>" if piece in self._ids else json.dumps(piece, ensure_ascii=False)


def _tagged(rule: str, name: str, schema: dict[str, Any], tags: ArgumentTags, texts: Texts) -> Iterator[str]:
    """The rules of arguments in tags, in the order of the schema; those that are not required may be left out."""
    if unknown := sorted(schema.keys() - _PLAIN):
        raise CannotForce(f"{name}: {unknown[0]!r} of its parameters, which the model writes in tags")
    required, properties = dict.fromkeys(schema.get("required", [])), schema.get("properties", {})
    properties = properties | {key: {} for key in required if key not in properties}
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for number, (key, value) in enumerate(properties.items()):
        if not re.fullmatch(r"[^<>\s]+", key):
            raise CannotForce(f"{name}: a parameter by the name {key!r}, which the model writes in tags")
        written = f"{texts.of(key + tags.value)} {rule}_value{number} {rule}_next{number + 1}"
        for before, state in ((tags.first, "first"), (tags.next.removeprefix(tags.value_end), "next")):
            skipped = "" if key in required else f" | {rule}_{state}{number + 1}"
            yield f"{rule}_{state}{number}: {texts.of(before)} {written}{skipped}"
        yield from _tagged_value(f"{rule}_value{number}", f"{name}: {key}", value, shared, tags.value_end, texts)
    yield f"{rule}_first{len(properties)}: {texts.of(tags.none)}"
    yield f"{rule}_next{len(properties)}: {texts.of(tags.last.removeprefix(tags.value_end))}"


def _tagged_value(rule: str, place: str, schema: Any, shared: dict[str, Any], end: str, texts: Texts) -> Iterator[str]:
    """A value and the tag that ends it: a string without quotes, anything else as JSON."""
    if not isinstance(schema, dict) or schema.get("type") != "string":
        yield f"{rule}: {rule}_json {texts.of(end)}"
        yield f"{rule}_json: {_json(shared | schema if isinstance(schema, dict) else schema)}"
        return
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None:
        if not isinstance(choices, list):
            raise CannotForce(f"{place}: an enum that is no list")
        words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices if isinstance(choice, str))
        yield f"{rule}: ({words}) {texts.of(end)}"
        return
    if "pattern" in schema:
        raise CannotForce(f"{place}: a pattern of a text that the model writes in tags")
    size = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    # The reader of calls must find the end of the value, of the call, and the form again.
    marks = "|".join(map(re.escape, (end.strip(), "</tool_call>", "<function="))).replace("/", "\\/")
    terminal = rule.upper()
    yield f"{rule}[lazy]: {terminal}"
    yield f"{terminal}: {terminal}_TEXT {json.dumps(end)}"
    yield f"{terminal}_TEXT: /(?s:.){size}/ & ~/(?s:.*)({marks})(?s:.*)/"


# What is read


def forced_calls(form: CallForm, tools: Tools) -> CallUpdates:
    """What reads the calls of an answer that was forced into a form."""
    return _InJson(form, tools) if form.tags is None else _InTags(tools)


class _InTags(ToolCalls):
    """Reads calls as where they are not forced; other text is of the form."""

    def add(self, text: str) -> str:
        super().add(text)
        return ""

    def rest(self) -> str:
        super().rest()
        return ""


class _InJson(CallUpdates):
    """Takes the text of a forced answer piece by piece; the arguments of a call are given as they come."""

    def __init__(self, form: CallForm, tools: Tools) -> None:
        super().__init__()
        names = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
        self._first, self._next = (
            re.compile(rf"{_loosely(before)}(?P<name>{names}){_loosely(form.named)}(?=\{{)", re.DOTALL)
            for before in (form.opens, form.between or "")
        )
        self._held = ""
        self._arguments: _ObjectEnd | None = None

    def add(self, text: str) -> str:
        """Nothing: all of the answer is calls."""
        self._held += text
        while self._held:
            if self._arguments is None:
                match = (self._next if self.count else self._first).match(self._held)
                if match is None:
                    break
                self._held = self._held[match.end() :]
                self._arguments = _ObjectEnd()
                self.begin(match["name"], "")
            size = self._arguments.find(self._held)
            if self._held[:size]:
                self.go_on(self._held[:size])
            self._held = self._held[len(self._held) if size is None else size :]
            if size is not None:
                self._arguments = None
        return ""

    def rest(self) -> str:
        return ""


def _loosely(text: str) -> str:
    """A pattern of a text of a form, whatever white space a tokenizer makes of its own."""
    pattern = r"\s*".join(re.escape(word) for word in ("", *text.split(), ""))
    return pattern.replace(re.escape(NUMBER), "[0-9]+")


class _ObjectEnd:
    """Finds the end of an object of JSON that comes piece by piece."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, piece: str) -> int | None:
        """Characters of the piece up to the object's end; None if it does not end there."""
        for at, sign in enumerate(piece):
            if self._in_string:
                self._in_string = self._escaped or sign != '"'
                self._escaped = sign == "\\" and not self._escaped
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "]}":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return None
