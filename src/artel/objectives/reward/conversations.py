"""Conversations as a reward model reads them: written by the chat template, encoded in one piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError
from artel.objectives.conversation.frame import Unfit
from artel.objectives.conversation.writer import ConversationWriter
from artel.text import Message, Tools
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import template_of

Prompt = str | Sequence[Mapping[str, Any] | Message]
"""A message of the user, or messages up to the user's last: {"role": "user", "content": "…"}."""
_ROLES = ("system", "user", "assistant", "tool")


class ConversationReader:
    """Conversations to ids.

    A decoder reads what the template writes. The tokenizer of an encoder puts its special tokens around it
    (`[CLS] … [SEP]`), unless the template writes them itself.
    """

    def __init__(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        """Raises InputError for a template that is missing or no Jinja."""
        self.template = template_of(tokenizer, run.chat.template)
        tokenizer.hf.chat_template = self.template  # so that the folder of the model says how to ask it
        self._tokenizer = tokenizer
        self._writer = ConversationWriter(tokenizer, self.template)
        self._before, self._after = _frame(tokenizer)

    @property
    def is_framed(self) -> bool:
        """True if the tokenizer puts special tokens around the text."""
        return bool(self._before)

    def check_tools(self, messages: Sequence[Message], tools: Tools, origin: str) -> None:
        """Raise InputError if the template does not write tools, calls or results that a conversation has."""
        self._writer.check_tools(messages, tools, origin)

    def has_control_token(self, messages: Sequence[Message], tools: Tools = ()) -> bool:
        """Whether a text would be read as the template's own writing."""
        return self._writer.has_control_token(messages, tools)

    def text(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The conversation as the template writes it. Raises Unfit."""
        return self._writer.write(messages, tools).text

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of written conversations, int64 (tokens,) each."""
        return [self._framed(encoded.ids) for encoded in self._tokenizer.encode_with_offsets(texts, control=True)]

    def ids(self, prompt: Prompt, answer: str) -> np.ndarray:
        """Ids of an answer behind its prompt: a message of the user, or messages. Raises InputError."""
        messages = [*_messages(prompt), Message("assistant", answer)]
        if self.has_control_token(messages):
            what = "a text has a special token of the tokenizer, which would be read as the chat template's own"
            raise InputError.at("--prompt", what, "leave it out")
        try:
            return self.encode([self.text(messages)])[0]
        except Unfit as unfit:
            raise InputError.at("--prompt", str(unfit), "mend it") from None

    def _framed(self, ids: np.ndarray) -> np.ndarray:
        before, after = self._before, self._after
        if ids[: len(before)].tolist() == before:
            before = []
        if ids[len(ids) - len(after) :].tolist() == after:
            after = []
        return np.concatenate([before, ids, after]).astype(np.int64)


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens of an encoder's tokenizer around a text; none where it has them on one side at most."""
    try:
        frame = tokenizer.frame()
    except InputError:
        return [], []
    return list(frame.before), list(frame.after)


def _messages(prompt: Prompt) -> list[Message]:
    if isinstance(prompt, str):
        return [Message("user", prompt)]
    messages = []
    for number, message in enumerate(prompt):
        if isinstance(message, Message):
            messages.append(message)
            continue
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES or not isinstance(content, str):
            fix = f"write role ({', '.join(_ROLES)}) and content"
            raise InputError.at(f"messages[{number}]", "has no role and content", fix)
        messages.append(Message(role, content))
    return messages
