"""Tool calls of chat completions: the demands of a request, the grammar that enforces them, and the stream's deltas."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from artel.generation.text_stream import find_stop
from artel.inference.serve.api_errors import ApiError
from artel.inference.serve.call_grammars import UnsupportedParameters, optional_calls_grammar, required_calls_grammar
from artel.inference.serve.schema import AllowedToolChoice, ChatRequest, NamedTool
from artel.inference.serve.served import ServedModel
from artel.text import Tools
from artel.text.tool_calls import CallReader
from artel.tokens.tokenizer.template_calls import NUMBER, CallForm

# Demands of a request


@dataclass(frozen=True, slots=True)
class ConstrainedCalls:
    """Calls that a grammar constrains to the form of the model's template."""

    make_matcher: Callable[[], Any]
    """Makes the matcher of one answer."""
    reader: Callable[[], CallDeltas]
    must_call: bool
    """True if the answer has only calls, without text."""
    mark: str
    """Text after which the answer has only calls. Empty if it has only calls from the start."""


def constrain_calls(
    served: ServedModel, body: ChatRequest, tools: Tools, answer: dict[str, Any] | None
) -> ConstrainedCalls | None:
    """Return the constraint on calls; None if the model calls freely, or has no functions.

    If calls of `strict` functions cannot be constrained, they are free, and the server logs this once, since clients
    send `strict` to any model. A function given by name is called once; `required` allows several calls, as in OpenAI's
    API. `answer` is the schema of an answer without calls, if the request has one.

    Raise ApiError if `tool_choice` demands calls that cannot be constrained.
    """
    must_call, allowed_names = _parse_tool_choice(body)
    if unknown := sorted((allowed_names or set()) - {tool["function"]["name"] for tool in tools}):
        raise ApiError(400, f"tools has no function {unknown[0][:100]!r}: there is nothing to call", "tool_choice")
    tools = tuple(tool for tool in tools if allowed_names is None or tool["function"]["name"] in allowed_names)
    if must_call and not tools:
        raise ApiError(400, "tools is empty, so there is nothing to call", "tool_choice")
    strict = any(tool["function"].get("strict") for tool in tools)
    # A schema constrains the answer from the first token on, so the grammar must also allow calls.
    if not (must_call or allowed_names or strict or (answer is not None and tools)):
        return None
    try:
        return _make_constraint(served, body, tools, must_call, answer)
    except UnsupportedParameters as reason:
        refusal = ApiError(400, f"a call cannot be forced: {reason}", "tools")
    except ApiError as error:
        refusal = error
    if must_call or allowed_names:
        raise refusal
    consequence = "strict is ignored" if strict else "response_format disables function calls"
    served.log_once(f"{consequence}: {refusal}")
    return None


def _make_constraint(
    served: ServedModel, body: ChatRequest, tools: Tools, must_call: bool, answer: dict[str, Any] | None
) -> ConstrainedCalls:
    """Return the constraint. Raise UnsupportedParameters or ApiError if calls cannot be constrained."""
    form, tokenizer = served.call_form, served.opened.tokenizer
    if form is None:
        message = "calls cannot be forced in the form in which this model's chat template writes them"
        fix = f"use auto{' or none' if must_call else ', and list only the allowed functions in tools'}"
        raise ApiError(400, f"{message}: {fix}", "tool_choice")
    if not (must_call or form.mark):
        message = "this model may call without a mark: use auto, and list only the allowed functions in tools"
        raise ApiError(400, message, "tool_choice")
    parallel_calls = not isinstance(body.tool_choice, NamedTool) and body.parallel_tool_calls is not False
    if must_call:
        grammar = required_calls_grammar(form, tools, tokenizer, parallel_calls=parallel_calls)
        make_matcher = served.grammars.lark_matcher_factory(grammar, "tools")
        return ConstrainedCalls(make_matcher, lambda: required_calls(form, tools), True, "")
    grammar = optional_calls_grammar(
        form, tools, tokenizer, served.turn_end.ids, parallel_calls=parallel_calls, answer=answer
    )
    make_matcher = served.grammars.lark_matcher_factory(grammar, "tools")
    no_text = answer is not None
    return ConstrainedCalls(make_matcher, lambda: optional_calls(form, tools, no_text=no_text), False, form.mark)


def _parse_tool_choice(body: ChatRequest) -> tuple[bool, set[str] | None]:
    """Return True if the answer must be calls, and the names of the allowed functions (None: all)."""
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return True, {choice.function.name}
    if isinstance(choice, AllowedToolChoice):
        allowed = choice.allowed_tools
        return allowed.mode == "required", {tool.function.name for tool in allowed.tools}
    return choice == "required", None


# Tool call readers


class CallDeltas(ABC):
    """Takes the text of an answer chunk by chunk, and collects its calls as deltas of OpenAI's API."""

    def __init__(self) -> None:
        self.count = 0
        """Number of calls that have started."""
        self._deltas: list[dict[str, Any]] = []

    @abstractmethod
    def feed(self, text: str) -> str:
        """Return the text that is certainly not part of a call."""

    def flush(self) -> str:
        """Return the text that is still pending at the end."""
        return ""

    def take_deltas(self) -> list[dict[str, Any]]:
        """Return the deltas since the last `take_deltas`: starts of tool calls, and chunks of their arguments."""
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def is_full(self) -> bool:
        """True if the answer must end now, since no more calls are allowed."""
        return False

    def _start_call(self, name: str, arguments: str) -> None:
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        self._deltas.append({"index": self.count, **call, "function": {"name": name, "arguments": arguments}})
        self.count += 1


def merge_deltas(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the deltas of a stream into complete calls."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta["index"] == len(calls):
            calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
        else:
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


class FreeCalls(CallDeltas):
    """Reads calls without a grammar. Holds back text that may become a call."""

    def __init__(self, tools: Tools, limit: int | None = None, *, drop_text: bool = False) -> None:
        """Ignore calls beyond `limit`."""
        super().__init__()
        self._reader, self._limit, self._drop_text = CallReader(tools), limit, drop_text

    def feed(self, text: str) -> str:
        return self._take_calls(self._reader.feed(text))

    def flush(self) -> str:
        return self._take_calls(self._reader.flush())

    @property
    def is_full(self) -> bool:
        return self.count == self._limit or self._reader.is_over

    def _take_calls(self, text: str) -> str:
        for call in self._reader.calls[self.count : self._limit]:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            # Lone surrogates are not text.
            self._start_call(call.name, arguments.encode(errors="backslashreplace").decode())
        return "" if self._drop_text else text


def required_calls(form: CallForm, tools: Tools) -> CallDeltas:
    """Return a reader of answers that follow `required_calls_grammar`."""
    return _JsonCalls(form, tools) if form.tags is None else FreeCalls(tools, drop_text=True)


class _JsonCalls(CallDeltas):
    """Reads calls with JSON arguments, and passes the arguments on as they arrive. The answer has no text."""

    def __init__(self, form: CallForm, tools: Tools) -> None:
        super().__init__()
        names = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
        self._first, self._next = (
            re.compile(
                rf"{_whitespace_pattern(prefix)}(?P<name>{names}){_whitespace_pattern(form.after_name)}(?=\{{)",
                re.DOTALL,
            )
            for prefix in (form.prefix, form.between_calls or "")
        )
        self._pending = ""
        self._arguments: _ObjectEndFinder | None = None

    def feed(self, text: str) -> str:
        self._pending += text
        while self._pending:
            if self._arguments is None:
                match = (self._next if self.count else self._first).match(self._pending)
                if match is None:
                    break
                self._pending = self._pending[match.end() :]
                self._arguments = _ObjectEndFinder()
                self._start_call(match["name"], "")
            end = self._arguments.find(self._pending)
            arguments, self._pending = self._pending[:end], "" if end is None else self._pending[end:]
            if arguments:
                self._deltas.append({"index": self.count - 1, "function": {"arguments": arguments}})
            if end is not None:
                self._arguments = None
        return ""


def _whitespace_pattern(text: str) -> str:
    """Return a pattern for a form's text that allows any whitespace, since tokenizers decode it differently."""
    pattern = r"\s*".join(re.escape(word) for word in ("", *text.split(), ""))
    return pattern.replace(re.escape(NUMBER), "[0-9]+")


class _ObjectEndFinder:
    """Finds the end of a JSON object that arrives in chunks."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, chunk: str) -> int | None:
        """Return the end of the object in the chunk, exclusive, or None if it does not end there."""
        for index, character in enumerate(chunk):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if not self._depth:
                    return index + 1
        return None


def optional_calls(form: CallForm, tools: Tools, *, no_text: bool = False) -> CallDeltas:
    """Return a reader of answers that follow `optional_calls_grammar`.

    `no_text`: an answer with calls begins with them, and any other is JSON, which may mention the mark.
    """
    return _CallsAfterText(form.mark, required_calls(replace(form, prefix=form.prefix_after_text), tools), no_text)


class _CallsAfterText(CallDeltas):
    """Returns the text before the mark, and passes the text after it on to a reader of calls."""

    def __init__(self, mark: str, calls: CallDeltas, no_text: bool) -> None:
        super().__init__()
        self._mark, self._calls, self._no_text = mark, calls, no_text
        self._pending = ""
        self._in_calls = self._in_text = False

    def feed(self, text: str) -> str:
        text_before = ""
        if not self._in_calls:
            self._pending += text
            end, self._in_calls = self._text_end(self._pending)
            text_before, text = self._pending[:end], self._pending[end:]
            self._pending = "" if self._in_calls else text
        if self._in_calls:
            self._calls.feed(text)
            self.count = self._calls.count
        return text_before

    def flush(self) -> str:
        pending, self._pending = self._pending, ""
        return pending

    def take_deltas(self) -> list[dict[str, Any]]:
        return self._calls.take_deltas()

    def _text_end(self, pending: str) -> tuple[int, bool]:
        """Return (end of the text that is certainly no call, True if calls follow)."""
        if not self._no_text:
            return find_stop(pending, (self._mark,))
        stripped = pending.lstrip()
        if self._in_text or not self._mark.startswith(stripped[: len(self._mark)]):
            self._in_text = True
            return len(pending), False
        return (len(pending) - len(stripped), True) if stripped.startswith(self._mark) else (0, False)
