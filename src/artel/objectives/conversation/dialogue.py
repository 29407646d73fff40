"""The conversation of an answer with several replies, and the ids that continue it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from artel.objectives.conversation.writer import ConversationWriter
from artel.text import Message, ToolCall, Tools
from artel.text.formats.turns import split_thought
from artel.text.tool_calls import read_calls
from artel.tokens.tokenizer.template_tools import ToolStyle


class NextPrompt(NamedTuple):
    """The ids that the model reads before its next reply."""

    ids: list[int]
    """The ids after those so far; all ids if it `restarts`."""
    restarts: bool = False
    """True if the conversation, as the template now writes it, does not begin with the ids so far."""


class Dialogue:
    """The prompt of an answer, and the messages after it: replies, results of tools, messages of an environment."""

    def __init__(self, writer: ConversationWriter, prompt: Sequence[Message], tools: Tools) -> None:
        self._writer, self._tools = writer, tools
        self._messages = list(prompt)
        self._reply = ""  # the last one, as the model wrote it
        self.turns: list[dict[str, Any]] = []
        """The messages after the prompt, as rewards and the round's file have them."""

    def open(self, text: str) -> list[int]:
        """Add a text to the prompt's last message of the user. Return the ids of the prompt.

        Raise ConversationError if the template rejects the conversation.
        """
        last = self._messages[-1]
        if last.role == "user":
            self._messages[-1] = replace(last, content=f"{last.content}\n\n{text}")
        else:
            self._messages.append(Message("user", text))
        self._record([Message("user", text)])
        return self._writer.prompt_ids(self._messages, self._tools)

    def add_reply(self, text: str) -> tuple[ToolCall, ...]:
        """Add a reply of the model. Return its calls."""
        self._reply = text
        content, calls = read_calls(text, self._tools) if self._tools else (text, ())
        self._record([Message("assistant", content, tool_calls=calls)])
        thought, content = split_thought(content)
        self._messages.append(Message("assistant", content, thought, tool_calls=calls))
        return calls

    def has_control_token(self, text: str) -> bool:
        """True if a message would contain a control token, which could end a turn or fake a role."""
        return self._writer.has_control_token([Message("user", text)])

    def add(self, messages: Sequence[Message]) -> None:
        """Add messages after the last reply: results of its calls, or a message of the environment."""
        self._record(messages)
        self._messages += messages

    def next_prompt(self, end: tuple[int, str]) -> NextPrompt:
        """Return the ids of the messages after the last reply. `end`: see `ConversationWriter.continuation`.

        Raise ConversationError if the template rejects the conversation.
        """
        last = max(index for index, message in enumerate(self._messages) if message.role == "assistant")
        messages, added = self._messages[: last + 1], self._messages[last + 1 :]
        ids = self._writer.continuation(messages, added, self._tools, self._reply, end)
        if ids is not None:
            return NextPrompt(ids)
        return NextPrompt(self._writer.prompt_ids(self._messages, self._tools), restarts=True)

    def _record(self, messages: Sequence[Message]) -> None:
        style = ToolStyle()
        linked = style.link_calls([*self._messages, *messages])[len(self._messages) :]
        self.turns += [style.fields(message) for message in linked]
