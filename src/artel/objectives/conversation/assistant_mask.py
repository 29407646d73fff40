"""Locates the assistant's turns in the text that a chat template renders.

A template is a program, so a turn need not end where its content ends. First the template renders the conversation
with placeholders in place of contents: the text between the placeholders is the template's. The generation prompt
before an assistant's content belongs to the prompt. The model writes everything after it, up to the token that
generation stops at. Then the template renders the real conversation, which must have the same text around its contents.

Some templates change an answer once it is history: they drop its thought, or (YandexGPT, DeepSeek R1) omit the last
answer. Training follows inference: the common prefix of the generation prompt and the turn is the prompt, and any part
of the last answer that a template omits is written after the generation prompt.

Tool calls are not contents, because each template has its own format of arguments. Placeholders as arguments reveal the
end of a turn with calls. Then the template renders the real calls with placeholders as contents: the turn is the text
between the end of the prompt and the known text before the next placeholder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

from artel.objectives.conversation.frame import (
    ConversationError,
    ConversationFrame,
    Difference,
    RenderedConversation,
    Slot,
    TurnFrame,
    common_prefix,
    locate,
    make_placeholder,
    parse_slots,
)
from artel.text import Message, ToolCall, Tools
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import TemplateRejection, added_tokens, markers_before_calls, render, turn_end
from artel.tokens.tokenizer.template_tools import ToolStyle, tool_style

_OPEN_TAG = "<think>\n"
_EXAMPLE_CALL = (ToolCall("f", {"a": "b"}),)
_MAX_FRAMES = 10_000
"""Maximum size of the cache: conversations with calls of many tools have many shapes."""


class TurnLocator:
    """Renders conversations with one template and locates the assistant's turns."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._frames: dict[tuple[Any, ...], ConversationFrame | ConversationError] = {}
        self._added = added_tokens(tokenizer)
        ends = turn_end(tokenizer, template)
        self._added_token = _match_any(self._added)
        stop_tokens = [token for token, token_id in self._added.items() if token_id in ends.ids]
        self._stop_token = _match_any(stop_tokens)
        self._stop = _match_any([*stop_tokens, *ends.texts])
        self._closing_markers = {*tokenizer.control_tokens} - markers_before_calls(tokenizer, template)
        self._thought_field = self._find_thought_field()

    @cached_property
    def _tool_style(self) -> ToolStyle | None:
        return tool_style(self._tokenizer, self._template)

    def _find_style(self, messages: Sequence[Message], tools: Tools) -> ToolStyle:
        has_calls = any(message.tool_calls for message in messages)
        return (self._tool_style if has_calls or tools else None) or ToolStyle()

    def unsupported_content(self, messages: Sequence[Message], tools: Tools) -> str:
        """Return a clause about content that the template does not write; empty if it writes everything."""
        has_calls = any(message.tool_calls for message in messages)
        if not (has_calls or tools):
            return ""
        if self._tool_style is None:
            return "does not write tool calls"
        if tools and not self._tool_style.writes_tools:
            return "does not write descriptions of tools"
        has_results = any(message.role == "tool" for message in messages)
        return "omits the results of tools" if has_results and not self._tool_style.writes_results else ""

    def write(self, messages: Sequence[Message], tools: Tools = ()) -> RenderedConversation:
        """Render a conversation and locate the assistant's turns.

        Raise ConversationError if the template rejects the conversation or the turns cannot be located.
        """
        style = self._find_style(messages, tools)
        messages = style.link_calls(messages)
        shape = (bool(tools), *map(_message_shape, messages))
        if shape not in self._frames:
            if len(self._frames) >= _MAX_FRAMES:
                self._frames.clear()
            try:
                self._frames[shape] = self._build_frame(messages, tools)
            except ConversationError as error:
                self._frames[shape] = error
        frame = self._frames[shape]
        if isinstance(frame, ConversationError):
            raise ConversationError(*frame.args)
        slots, after = list(frame.slots), frame.after
        if tools or any(message.tool_calls for message in messages):
            marked = _with_content_placeholders(messages)
            slots, after = parse_slots(self._render_messages(marked, frame.after_prompt, tools))
        text = self._render_messages(messages, frame.after_prompt, tools)
        return locate(text, slots, after, frame, messages)

    def _render_messages(self, messages: Sequence[Message], after_prompt: bool, tools: Tools) -> str:
        style = self._find_style(messages, tools)
        fields = [self._template_fields(message, style) for message in messages]
        if not after_prompt:
            return self._render(fields, tools)
        text = self._render(fields[:-1], tools, add_generation_prompt=True)
        return text + self._format_answer(text, messages[-1].thought, messages[-1].content)

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Return the prompt of the next answer: the conversation and the opening of a turn.

        Raise ConversationError if the template rejects the conversation.
        """
        style = self._find_style(messages, tools)
        fields = [self._template_fields(message, style) for message in style.link_calls(messages)]
        return self._render(fields, tools, add_generation_prompt=True)

    def _render(self, messages: list[dict[str, Any]], tools: Tools, add_generation_prompt: bool = False) -> str:
        try:
            return render(self._tokenizer, self._template, messages, add_generation_prompt, list(tools) or None)
        except TemplateRejection as refusal:
            raise ConversationError(f"the chat template raises an error: {refusal}") from None

    def _template_fields(self, message: Message, style: ToolStyle) -> dict[str, Any]:
        """Convert a message to the format of the template."""
        fields = style.fields(message)
        if message.thought and self._thought_field is not None:
            fields |= _thought_fields(self._thought_field, message.thought, message.content)
        return fields

    def _find_thought_field(self) -> str | None:
        """Return the field from which the template reads thoughts, or None."""
        for field, calls in product(("reasoning_content", "thinking", "content"), ((), _EXAMPLE_CALL)):
            with suppress(ConversationError):
                if make_placeholder(1, "thought") in self._render_thought(field, calls):
                    return field
        return None

    def _render_thought(self, field: str, calls: tuple[ToolCall, ...]) -> str:
        """Render a conversation of placeholders that ends with a thought and `calls`."""
        question = Message("user", make_placeholder(0, "content"))
        answer = Message("assistant", make_placeholder(1, "content"), tool_calls=calls)
        style = self._find_style([answer], ())
        fields = [style.fields(message) for message in style.link_calls([question, answer])]
        fields[1] |= _thought_fields(field, make_placeholder(1, "thought"), answer.content)
        return self._render(fields, ())

    def _format_answer(self, prompt: str, thought: str, content: str) -> str:
        """Return the text that the model writes after a generation prompt.

        Raise ConversationError if the format of thoughts is unknown.
        """
        if not thought:
            return content
        if prompt.rstrip().endswith("<think>"):
            return f"{thought}\n</think>\n\n{content}"
        if self._thought_tags is None:
            raise ConversationError("the chat template omits what the assistant thinks")
        before, after = self._thought_tags
        return f"{before}{thought}{after}{content}"

    @cached_property
    def _thought_tags(self) -> tuple[str, str] | None:
        """The text before and after a thought that precedes a call; None if the template omits it.

        Needed for Kimi K2 Thinking: its template omits the thought of the last answer, but the model writes it.
        """
        if self._thought_field is None:
            return None
        with suppress(ConversationError):
            text = self._render_thought(self._thought_field, _EXAMPLE_CALL)
            before, _, after = text.partition(make_placeholder(1, "thought"))
            between, has_content, _ = after.partition(make_placeholder(1, "content"))
            prompt = self.prompt([Message("user", make_placeholder(0, "content"))])
            if has_content and before.startswith(prompt):
                return before[len(prompt) :], between
        return None

    def _build_frame(self, messages: Sequence[Message], tools: Tools) -> ConversationFrame:
        marked = _with_content_placeholders(messages)
        for index, message in enumerate(marked):
            argument = make_placeholder(index, "argument")
            calls = (ToolCall(call.name, {"a": argument}, call.id) for call in message.tool_calls)
            marked[index] = replace(message, tool_calls=tuple(calls))
        style = self._find_style(messages, tools)
        fields = [self._template_fields(message, style) for message in marked]
        text = self._render(fields, tools)
        last = marked[-1]
        is_answer = last.role == "assistant" and not last.tool_calls
        after_prompt = is_answer and (last.content not in text or last.thought not in text)
        if after_prompt:
            self._check_history(marked, fields, tools)
            text = self._render_messages(marked, after_prompt, tools)
        slots, after = parse_slots(text)
        _check_order(slots, marked)
        frame = ConversationFrame(
            tuple(slot for slot in slots if slot.kind != "argument"), after, {}, 0, None, after_prompt
        )
        differences: list[Difference] = []
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        closing = ""
        for turn, index in enumerate(answers, 1):
            message_slots = [position for position, slot in enumerate(slots) if slot.message == index]
            first, end = message_slots[0], message_slots[-1] + 1
            opening = slots[first].before
            text_after = slots[end].before if end < len(slots) else after
            text_at_end = text  # the text of a conversation that ends with this message
            if index < len(messages) - 1:
                with suppress(ConversationError):  # the template may refuse a conversation that ends here
                    text_at_end = self._render(fields[: index + 1], tools)
            if after_prompt and index < len(messages) - 1 and marked[index].content not in text_at_end:
                # The template omits last answers: the model reads earlier answers but does not learn them.
                differences.append(Difference(turn, "unlearned"))
                continue
            after_at_end = parse_slots(text_at_end)[1]
            tag = _OPEN_TAG if messages[index].thought and self._thought_field == "content" else ""
            header = opening.removesuffix(tag)
            if slots[first].kind == "argument":  # before an argument, only the header is not part of the call
                header = self._common_tokens(header, self._opening_without_calls(fields[:index], header, tools))
            length = self._prompt_length(fields[:index], header, tools)
            # The closing text follows a turn both here and at the end of a conversation.
            closing = text_after[: self._closing_length(text_after, after_at_end)]
            # Some closing texts end only a call, or the content before one.
            ends_turn = closing.endswith(tuple(self._closing_markers)) or self._stop.search(closing) is not None
            frame.turns[index] = TurnFrame(
                _count_contents(slots[:first]),
                _count_contents(slots[:end]),
                opening[:length],
                text_after[len(closing) :],
                ends_turn,
            )
            start = text.index(slots[first].placeholder) - len(opening) + length
            kind = self._find_difference(
                fields[:index], text, text_at_end, start, text.rindex(slots[end - 1].placeholder), index, tools
            )
            if kind:
                differences.append(Difference(turn, kind))
        open_end = self._tokenizer.end_id
        if answers and not frame.turns[answers[-1]].is_closed and not after_prompt:
            open_end = self._open_end(fields, tools)
        return replace(frame, open_end=open_end, difference=differences[0] if differences else None)

    def _check_history(self, marked: Sequence[Message], fields: list[dict[str, Any]], tools: Tools) -> None:
        """Raise ConversationError if the next prompt also lacks the last answer: no answer would ever be read.

        Templates that take a single question may refuse the next one.
        """
        question = {"role": "user", "content": make_placeholder(len(marked), "content")}
        try:
            prompt = self._render([*fields, question], tools, add_generation_prompt=True)
        except ConversationError:
            return
        if marked[-1].content not in prompt:
            raise ConversationError("the chat template omits what the assistant says")

    def _prompt_length(self, before: list[dict[str, Any]], opening: str, tools: Tools) -> int:
        """Return the length of the generation prompt within the text before an assistant's content."""
        if not any(message["role"] != "system" for message in before):
            # An assistant that speaks first has no generation prompt.
            length = self._header_end(opening)
            if length is None:
                raise ConversationError(
                    "the chat template does not support a conversation that begins with the assistant"
                )
            return length
        prompt = parse_slots(self._render(before, tools, add_generation_prompt=True))[1]
        length = None
        if opening.startswith(prompt):
            length = len(prompt)
        elif prompt.startswith(opening) and opening.strip():
            length = len(opening)  # the prompt begins a thought, and this turn has none
        if before[-1]["role"] == "assistant":  # some templates write no generation prompt after it
            header_end = self._header_end(opening[length or 0 :])
            length = length if header_end is None else (length or 0) + header_end
        if length is None:
            raise ConversationError("the chat template begins an answer differently from its generation prompt")
        return length

    def _opening_without_calls(self, before: list[dict[str, Any]], opening: str, tools: Tools) -> str:
        """Return the text before the content of an answer without calls; `opening` if the template refuses it."""
        try:
            answer = {"role": "assistant", "content": make_placeholder(len(before), "content")}
            slots, _ = parse_slots(self._render([*before, answer], tools))
        except ConversationError:
            return opening
        return slots[-1].before if slots and slots[-1].message == len(before) else opening

    def _header_end(self, opening: str) -> int | None:
        """Return the end of an answer's header in `opening`, or None.

        The header is the text that a generation prompt adds after a user's turn.
        """
        user = [{"role": "user", "content": make_placeholder(0, "content")}]
        without_prompt, prompt = (
            parse_slots(self._render(user, (), add_generation_prompt=wants_prompt))[1] for wants_prompt in (False, True)
        )
        header = prompt[len(self._common_tokens(without_prompt, prompt)) :]
        if header and header in opening:
            return opening.rindex(header) + len(header)
        if not header:  # the template writes a generation prompt after every conversation
            header = common_prefix(prompt[::-1], opening[::-1])[::-1]
        if any(opening.endswith(header[:length]) for length in range(len(header), 0, -1) if header[:length].strip()):
            return len(opening)
        return None

    def _closing_length(self, text_after: str, after_at_end: str) -> int:
        """Return the length of the text that closes an assistant's turn.

        `text_after`: text after its content inside the conversation. `after_at_end`: the same at the end of one.
        """
        common = self._common_tokens(text_after, after_at_end)
        if stop := self._stop.search(common):
            return stop.end()
        end = len(common.rstrip())  # or the end of the token around it: some tokens end with line feeds
        tokens = self._added_token.finditer(common)
        end = next((token.end() for token in tokens if token.start() < end < token.end()), end)
        # Without an end of turn at the end of a conversation, generation may stop at the next role.
        space = len(text_after[end:]) - len(text_after[end:].lstrip())
        stop = self._stop_token.match(text_after, end + space)
        return stop.end() if stop else end

    def _common_tokens(self, first: str, second: str) -> str:
        """Return the common prefix of two texts, in whole tokens."""
        common = common_prefix(first, second)
        for text in (first, second):
            for token in self._added_token.finditer(text):
                if token.start() < len(common) < token.end():
                    common = common[: token.start()]
        return common

    def _open_end(self, fields: list[dict[str, Any]], tools: Tools) -> int:
        """Return the token that ends an unclosed last turn: the one that begins the next turn, or the end token."""
        role = "tool" if "tool_calls" in fields[-1] else "user"
        with suppress(ConversationError):
            text = self._render([*fields, {"role": role, "content": "\ue002"}], tools).partition("\ue002")[0]
            if stop := self._stop_token.search(parse_slots(text)[1]):
                return self._added[stop[0]]
        return self._tokenizer.end_id

    def _find_difference(
        self, before: list[dict[str, Any]], text: str, text_at_end: str, start: int, end: int, index: int, tools: Tools
    ) -> str | None:
        """Return the kind of difference between training and inference at message `index`, or None.

        See `Difference`.
        """
        thought = make_placeholder(index, "thought")
        if text_at_end[:start] != text[:start]:
            return "prompt"
        if text_at_end[:end] != text[:end] or (thought in text_at_end) != (thought in text):
            return "thought"
        if not any(message["role"] != "system" for message in before):
            return None
        prompt = self._render(before, tools, add_generation_prompt=True)
        if prompt == text[:start]:
            return None
        return "opening" if prompt.startswith(text[:start]) else "prompt"


def _message_shape(message: Message) -> tuple[Any, ...]:
    """Return everything that determines the text around a message, including names and ids of calls."""
    calls = tuple((call.name, call.id) for call in message.tool_calls)
    has_content = bool(message.content) or not calls
    return message.role, bool(message.thought), has_content, calls, message.name, message.tool_call_id


def _with_content_placeholders(messages: Sequence[Message]) -> list[Message]:
    """Return messages with placeholders as contents. Empty contents beside calls stay: templates test for them."""
    return [
        replace(
            message,
            content=make_placeholder(index, "content") if message.content or not message.tool_calls else "",
            thought=make_placeholder(index, "thought") if message.thought else "",
        )
        for index, message in enumerate(messages)
    ]


def _count_contents(slots: list[Slot]) -> int:
    return sum(slot.kind != "argument" for slot in slots)


def _check_order(slots: list[Slot], marked: Sequence[Message]) -> None:
    contents = [slot.message for slot in slots if slot.kind == "content"]
    missing = [message.role for index, message in enumerate(marked) if message.content and index not in contents]
    if missing:
        raise ConversationError(f"the chat template omits what the {missing[0]} says")
    num_calls = Counter(slot.message for slot in slots if slot.kind == "argument")
    if any(len(message.tool_calls) != num_calls[index] for index, message in enumerate(marked)):
        raise ConversationError("the chat template omits or repeats tool calls")
    # A system message may be anywhere (Mistral's is inside a user's turn); turns keep their order.
    turns = [slot.message for slot in slots if slot.kind != "thought" and marked[slot.message].role != "system"]
    if len(set(contents)) < len(contents) or turns != sorted(turns):
        raise ConversationError("the chat template repeats turns, or changes their order")


def _match_any(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the texts, the longest first."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _thought_fields(field: str, thought: str, content: str) -> dict[str, str]:
    """Return the field that contains a thought. In the content, tags surround it."""
    return {field: thought if field != "content" else f"{_OPEN_TAG}{thought}\n</think>\n\n{content}"}
