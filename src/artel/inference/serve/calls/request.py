"""What a request demands of calls: `tool_choice` that forces them or allows some, and functions that are `strict`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from artel.inference.serve.calls.forced import CannotForce, call_grammar, forced_calls
from artel.inference.serve.calls.read import CallUpdates
from artel.inference.serve.calls.spoken import has_mark, opening_text, spoken_calls, spoken_grammar
from artel.inference.serve.chat_prompt import chat_tools
from artel.inference.serve.errors import ApiError
from artel.inference.serve.schema import AllowedToolChoice, ChatRequest, NamedTool
from artel.inference.serve.served import ServedModel
from artel.text import Tools
from artel.tokens.tokenizer.template_calls import CallForm


@dataclass(frozen=True, slots=True)
class HeldCalls:
    """Calls that are held to the form of the model's template."""

    make_matcher: Callable[[], Any]
    """Makes what allows nothing else, for one answer."""
    reader: Callable[[], CallUpdates]
    must_call: bool
    """All of the answer is calls: it has no text."""
    mark: str
    """The text after which the answer is calls; empty if all of it is."""


def hold_calls(served: ServedModel, body: ChatRequest, answer: dict[str, Any] | None) -> HeldCalls | None:
    """None if the model calls as it likes, or not at all. Raises ApiError.

    Functions that are `strict` and cannot be held are called freely, which the server says once: clients send `strict`
    without asking whether the model can keep it. What `tool_choice` demands is refused then.

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
    # An answer by a schema is held from its first token on: that a call may stand there, the grammar has to say.
    chooses = answer is not None and bool(tools)
    if not (must_call or names or chooses or any(tool["function"].get("strict") for tool in tools)):
        return None
    try:
        return _held(served, body, tools, must_call, answer)
    except CannotForce as reason:
        refusal = ApiError(400, f"a call cannot be forced of {reason}", "tools")
    except ApiError as error:
        refusal = error
    if must_call or names:
        raise refusal
    if any(tool["function"].get("strict") for tool in tools):
        served.say_once(f"strict is not kept: {refusal}")
    else:
        served.say_once(f"with response_format no function is called: {refusal}")
    return None


def _held(
    served: ServedModel, body: ChatRequest, tools: Tools, must_call: bool, answer: dict[str, Any] | None
) -> HeldCalls:
    """Raises CannotForce and ApiError where calls cannot be held."""
    form, tokenizer = served.call_form, served.opened.tokenizer
    if form is None or not (must_call or has_mark(form)):
        raise ApiError(400, _why_free(form, must_call), "tool_choice")
    several = not isinstance(body.tool_choice, NamedTool) and body.parallel_tool_calls is not False
    if must_call:
        matcher = served.grammars.lark_matcher(call_grammar(form, tools, tokenizer, several=several), "tools")
        return HeldCalls(matcher, lambda: forced_calls(form, tools), True, "")
    ends, at_once = served.turn_end.ids, answer is not None
    grammar = spoken_grammar(form, tools, tokenizer, ends, several=several, answer=answer)
    matcher = served.grammars.lark_matcher(grammar, "tools")
    return HeldCalls(matcher, lambda: spoken_calls(form, tools, at_once=at_once), False, opening_text(form))


def _why_free(form: CallForm | None, must_call: bool) -> str:
    """Why the calls of a model cannot be held to a form."""
    if form is not None:
        return "this model may call without a mark before it: write auto, and in tools those alone that may be called"
    what = "calls cannot be forced in the form in which this model's chat template writes them"
    return f"{what}: write auto{' or none' if must_call else ', and in tools those alone that may be called'}"


def _demanded(body: ChatRequest) -> tuple[bool, set[str] | None]:
    """Whether the answer must be calls, and the names of those that are allowed; None for all."""
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return True, {choice.function.name}
    if isinstance(choice, AllowedToolChoice):
        allowed = choice.allowed_tools
        return allowed.mode == "required", {tool.function.name for tool in allowed.tools}
    return choice == "required", None
