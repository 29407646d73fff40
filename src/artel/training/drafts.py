"""Answers in progress: their segments, and their conversation if they may have several replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from artel.generation import GenerationPrompt
from artel.generation.answers import SampledAnswer
from artel.objectives.conversation.dialogue import Dialogue
from artel.objectives.conversation.frame import ConversationError
from artel.objectives.rollouts import Segment
from artel.text import Message, ToolCall
from artel.tokens import Tokenizer

_CONTROL_TOKEN = "the text contains a control token of the tokenizer"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of a round."""

    number: int
    """Running number of the prompt in the run."""
    index: int
    """Index in its split."""
    epoch: int
    attempt: int = 0


@dataclass(slots=True)
class Draft:
    """An answer in progress."""

    question: Question
    answer: int
    """Index among the answers to its prompt."""
    position: int
    """Index among the answers that are written together. It selects the process of the environment."""
    prompt_ids: list[int]
    """The stored prompt. An environment may add a text to it."""
    reference: dict[str, Any]
    new_tokens: int
    """Maximum number of tokens after the stored prompt, over all turns."""
    dialogue: Dialogue | None = None
    segments: list[Segment] = field(default_factory=list)
    text: str = ""
    """The last reply."""
    replies: int = 0
    calls: tuple[ToolCall, ...] = ()
    """Calls of the last reply."""
    cut_off: bool = False
    is_over: bool = False
    failures: dict[str, str] = field(default_factory=dict)
    reward: float | None = None
    """Reward of the environment."""
    opening: str | None = None
    """The text that the environment added to the prompt."""
    steps: list[tuple[str, str | None]] = field(default_factory=list)
    """Replies that the environment has answered, with its messages."""
    _last_id: int = -1

    def __post_init__(self) -> None:
        self.segments.append(Segment(self.prompt_ids, [], []))

    @property
    def name(self) -> str:
        """Name of the answer, unique in a round."""
        return f"{self.question.number}:{self.question.attempt}:{self.answer}"

    @property
    def next_ids(self) -> list[int]:
        """The ids that the model continues."""
        return self.segments[-1].prompt_ids + self.segments[-1].ids

    @property
    def written(self) -> int:
        """Number of tokens that the model has written."""
        return sum(len(segment.written) for segment in self.segments)

    @property
    def space(self) -> int:
        """Maximum length of the next reply, so that each segment fits into the stored prompt's block."""
        return self.new_tokens - max(self.written, len(self.next_ids) - len(self.prompt_ids))

    @property
    def used(self) -> int:
        """Number of tokens that count towards `new_tokens`: the written ones, or those of a longer last segment."""
        return self.new_tokens if self.cut_off else self.new_tokens - self.space

    @property
    def prompt(self) -> str | list[dict[str, Any]]:
        """The prompt for rewards, with the text of the environment."""
        prompt: str | list[dict[str, Any]] = self.reference["prompt"]
        if self.opening is None or isinstance(prompt, str):
            return prompt
        *earlier, last = prompt
        if last["role"] != "user":
            return [*prompt, {"role": "user", "content": self.opening}]
        return [*earlier, {**last, "content": f"{last['content']}\n\n{self.opening}"}]

    @property
    def replies_and_results(self) -> list[dict[str, Any]]:
        """The messages after `prompt`."""
        return self.messages if self.opening is None else self.messages[1:]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Replies and the messages between them; empty without tools and environment."""
        return self.dialogue.turns if self.dialogue is not None else []

    def fail(self, name: str, reason: str) -> None:
        """Record a failure. Several of one name are joined."""
        earlier = self.failures.get(name)
        self.failures[name] = reason if earlier is None else f"{earlier}; {reason}"

    def open(self, text: str) -> None:
        """Add a text of the environment to the prompt."""
        assert self.dialogue is not None
        self.opening = text
        if self.dialogue.has_control_token(text):
            self.end_environment(_CONTROL_TOKEN)
            return
        try:
            self.segments.append(Segment(self.dialogue.open(text), [], []))
        except ConversationError as error:
            self.end_environment(str(error))
            return
        if self.space < 1:
            self.end_environment("its first message leaves no space for an answer (data.block)")

    def add_reply(self, sampled: SampledAnswer) -> None:
        """Add a reply of the model, and read its calls."""
        segment = self.segments[-1]
        segment.ids.extend(sampled.ids)
        segment.log_probs.extend(sampled.log_probs)
        self.text, self.cut_off, self.replies = sampled.text, sampled.cut_off, self.replies + 1
        self._last_id = sampled.ids[-1]
        self.calls = self.dialogue.add_reply(sampled.text) if self.dialogue is not None else ()

    def add_messages(self, messages: Sequence[Message], end: GenerationPrompt, tokenizer: Tokenizer) -> None:
        """Continue the conversation after the last reply. `end` has the ends of a reply."""
        assert self.dialogue is not None
        self.dialogue.add(messages)
        try:
            following = self.dialogue.next_prompt((self._last_id, self._end_text(end, tokenizer)))
        except ConversationError as error:
            self.fail("template", str(error))
            self.is_over = True
            return
        segments, segment = list(self.segments), self.segments[-1]
        if following.restarts:
            self.segments.append(Segment(following.ids, [], []))
        else:
            log_probs = [*segment.log_probs, *[None] * len(following.ids)]
            self.segments[-1] = Segment(segment.prompt_ids, segment.ids + following.ids, log_probs)
        if self.space < 1:  # the messages are not read
            self.segments = segments
            self.cut_off = self.is_over = True

    def end_environment(self, reason: str) -> None:
        """End the answer because its environment failed."""
        self.fail("environment", reason)
        self.is_over = True

    def make_message(self, text: str, call: ToolCall | None = None) -> Message:
        """Return the result of a call, or else a message of the environment."""
        assert self.dialogue is not None
        if call is None:
            if self.dialogue.has_control_token(text):
                self.end_environment(_CONTROL_TOKEN)
            return Message("user", text)
        if self.dialogue.has_control_token(text):
            self.fail("tools", f"{call.name}: {_CONTROL_TOKEN}")
            text = f"error: {_CONTROL_TOKEN}"
        return Message("tool", text, name=call.name, tool_call_id=call.id)

    def add_last_message(self, message: Message) -> None:
        """Add a message that the model does not answer."""
        assert self.dialogue is not None
        self.dialogue.add([message])

    def _end_text(self, end: GenerationPrompt, tokenizer: Tokenizer) -> str:
        """Return the text with which the model ended its last reply."""
        if self._last_id in end.end.ids:
            return tokenizer.decode([self._last_id])
        written = tokenizer.decode(self.segments[-1].ids)
        return next((text for text in end.end.texts if written.endswith(text)), "\0")  # \0: within a token
