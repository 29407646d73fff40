"""What a request demands of calls: `tool_choice: required`, or a function by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from artel.inference.serve.calls.forced import CannotForce, call_grammar, forced_calls
from artel.inference.serve.calls.read import CallUpdates
from artel.inference.serve.chat_prompt import chat_tools
from artel.inference.serve.errors import ApiError
from artel.inference.serve.schema import ChatRequest, NamedTool
from artel.inference.serve.served import ServedModel


@dataclass(frozen=True, slots=True)
class Forced:
    """An answer that must be calls."""

    make_matcher: Callable[[], Any]
    """Makes what allows nothing else, for one answer."""
    reader: Callable[[], CallUpdates]


def force_calls(served: ServedModel, body: ChatRequest) -> Forced | None:
    """None if the request leaves it to the model whether it calls. Raises ApiError.

    A function by name is called once, and `required` may be several calls, as OpenAI has it.
    """
    choice = body.tool_choice
    name = choice.function.name if isinstance(choice, NamedTool) else None
    if name is None and choice != "required":
        return None
    tools = tuple(tool for tool in chat_tools(body) if name in (None, tool["function"]["name"]))
    if not tools:
        known = "tools names none" if name is None else f"tools has no function {name[:100]!r}"
        raise ApiError(400, f"{known}: there is nothing to call", "tool_choice")
    form = served.call_form
    if form is None:
        what = "calls cannot be forced in the form in which this model's chat template writes them"
        raise ApiError(400, f"{what}: write auto or none", "tool_choice")
    several = name is None and body.parallel_tool_calls is not False
    try:
        grammar = call_grammar(form, tools, served.opened.tokenizer, several=several)
    except CannotForce as reason:
        raise ApiError(400, f"a call cannot be forced of {reason}", "tools") from None
    return Forced(served.grammars.lark_matcher(grammar, "tools"), lambda: forced_calls(form, tools))
