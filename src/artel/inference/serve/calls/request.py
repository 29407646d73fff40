"""What a request demands of calls: `tool_choice` that forces them or allows some, and functions that are `strict`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from artel.inference.serve.calls.forced import CannotForce, call_grammar, forced_calls
from artel.inference.serve.calls.read import CallUpdates
from artel.inference.serve.calls.spoken import opening_text, spoken_calls, spoken_grammar
from artel.inference.serve.chat_prompt import chat_tools
from artel.inference.serve.errors import ApiError
from artel.inference.serve.schema import AllowedToolChoice, ChatRequest, NamedTool
from artel.inference.serve.served import ServedModel


@dataclass(frozen=True, slots=True)
class HeldCalls:
    """Calls that are held to the form of the model's template."""

    make_matcher: Callable[[], Any]
    """Makes what allows nothing else, for one answer."""
    reader: Callable[[], CallUpdates]
    must_call: bool
    """All of the answer is calls: it has no text."""
    mark: str
    """The text after which the answer is calls."""


def hold_calls(served: ServedModel, body: ChatRequest, answer: dict[str, Any] | None) -> HeldCalls | None:
    """None if the model calls as it likes, or not at all. Raises ApiError.

    A function by name is called once, and `required` may be several calls, as OpenAI has it. `answer` is the schema of
    an answer that calls nothing, where the request has one.
    """
    must_call, names = _demanded(body)
    tools = chat_tools(body)
    if unknown := sorted((names or set()) - {tool["function"]["name"] for tool in tools}):
        raise ApiError(400, f"tools has no function {unknown[0][:100]!r}: there is nothing to call", "tool_choice")
    tools = tuple(tool for tool in tools if names is None or tool["function"]["name"] in names)
    if must_call and not tools:
        raise ApiError(400, "tools names none: there is nothing to call", "tool_choice")
    if not (must_call or names or any(tool["function"].get("strict") for tool in tools)):
        return None
    form = served.call_form
    if form is None:
        raise _refusal(must_call, names)
    several = not isinstance(body.tool_choice, NamedTool) and body.parallel_tool_calls is not False
    tokenizer = served.opened.tokenizer
    try:
        if must_call:
            grammar = call_grammar(form, tools, tokenizer, several=several)
        else:
            ends = served.turn_end.ids
            grammar = spoken_grammar(form, tools, tokenizer, ends, several=several, answer=answer)
    except CannotForce as reason:
        raise ApiError(400, f"a call cannot be forced of {reason}", "tools") from None
    read = forced_calls if must_call else spoken_calls
    matcher = served.grammars.lark_matcher(grammar, "tools")
    return HeldCalls(matcher, lambda: read(form, tools), must_call, opening_text(form))


def _demanded(body: ChatRequest) -> tuple[bool, set[str] | None]:
    """Whether the answer must be calls, and the names of those that are allowed; None for all."""
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return True, {choice.function.name}
    if isinstance(choice, AllowedToolChoice):
        allowed = choice.allowed_tools
        return allowed.mode == "required", {tool.function.name for tool in allowed.tools}
    return choice == "required", None


def _refusal(must_call: bool, names: set[str] | None) -> ApiError:
    """What a model is answered with whose calls cannot be held to a form."""
    what = "calls cannot be forced in the form in which this model's chat template writes them"
    if must_call:
        return ApiError(400, f"{what}: write auto or none", "tool_choice")
    if names is not None:
        return ApiError(400, f"{what}: write auto, and in tools those alone that may be called", "tool_choice")
    return ApiError(400, f"{what}: leave strict out", "tools")
