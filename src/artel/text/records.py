"""Records of sources (texts, pairs, questions, conversations, preferences, prompts, labels …), and documents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

AnswerClass = Literal["yes", "no", "short", "long", "unknown"]
Split = Literal["train", "validation"]


class BadRecord(Exception):
    """A record, row or file that cannot be used. Readers raise it, or yield it in place of a row."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        """One word for the ledger."""
        self.detail = detail
        """A sentence for the user: what is wrong, then what to do."""


@dataclass(frozen=True, slots=True)
class Pair:
    """An input text and the output to produce."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the document that may answer it, and the positions of the answers in the document."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[int, int], ...]
    """Character spans (start, end) of the gold answers in `context`; the first is learned. Empty when unknown."""
    answer_class: AnswerClass
    candidates: tuple[tuple[int, int], ...] = ()
    """Natural Questions: (start, end) of each long-answer candidate, in the document's space-separated words."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the assistant calls."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """The id that the result refers to; empty if the data has none."""

    def as_json(self) -> str:
        """Return the call as JSON: {"name": …, "arguments": {…}}."""
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    thought: str = ""
    """The reasoning before `content` (the inside of <think> … </think>)."""
    trained: bool | None = None
    """True if the model learns it, False if not (`loss_weight`). With None, `chat.train_on` decides."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The functions that the assistant calls after `content`. With calls, `content` may be empty."""
    name: str = ""
    """Name of the function in a tool result, if the data has it."""
    tool_call_id: str = ""
    """Id of the call in a tool result, if the data has one."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Thought, content, and calls as JSON, without empty ones."""
        texts = (self.thought, self.content, *(call.as_json() for call in self.tool_calls))
        return tuple(text for text in texts if text)

    @property
    def is_empty(self) -> bool:
        """True if the message says nothing. Results of tools and messages with calls may have no content."""
        return not self.content.strip() and not self.tool_calls and self.role != "tool"


Tools = tuple[dict[str, Any], ...]
"""Functions in the format of the OpenAI API: {"type": "function", "function": {"name": …}}."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order. At most one is a system message, and it comes first."""

    messages: tuple[Message, ...]
    tools: Tools = ()
    changes: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    """Changes made while reading, for the ledger: turns_left_out (after the last answer), tools_of_system."""


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt (up to the last message of the user), a better and a worse answer. Unpaired data has one answer."""

    prompt: tuple[Message, ...]
    chosen: Message | None
    rejected: Message | None
    tools: Tools = ()
    margin: float = 0.0
    """Reward of the chosen answer minus reward of the rejected one, if the data has it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that the model answers, with the other columns of its row, for functions that score the answers."""

    messages: tuple[Message, ...] = ()
    """A conversation up to what the model answers; empty if the prompt is a plain text."""
    text: str = ""
    """A plain text to continue; empty if there are messages."""
    tools: Tools = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns, as JSON values."""
    changes: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    """Changes made while reading, for the ledger: answers_cut (now in the column `answer`), tools_of_system."""


@dataclass(frozen=True, slots=True)
class LabeledText:
    """A text or a pair of texts, with labels or a number."""

    text: str
    second: str = ""
    """The second text of a pair; empty for a single text."""
    labels: tuple[str, ...] = ()
    """One label, or any number of them in multi-label data."""
    number: float | None = None
    """The number to predict, in regression data."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text, self.second) if self.second else (self.text,)

    def with_texts(self, texts: tuple[str, ...]) -> LabeledText:
        """Return a copy with its texts replaced, one for one."""
        return replace(self, text=texts[0], second=texts[1] if self.second else "")


@dataclass(frozen=True, slots=True)
class TaggedText:
    """A text and its labeled spans."""

    text: str
    spans: tuple[tuple[int, int, str], ...]
    """(start, end, label): character offsets, end exclusive. Spans may be nested."""


@dataclass(frozen=True, slots=True)
class Match:
    """A query, texts that match it (positives), and texts that do not (negatives)."""

    query: str
    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    score: float | None = None
    """Similarity of the query and the only positive, if the data has it."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.query, *self.positives, *self.negatives)

    def with_texts(self, texts: tuple[str, ...]) -> Match:
        """Return a copy with its texts replaced, one for one."""
        negatives_start = 1 + len(self.positives)
        return replace(self, query=texts[0], positives=texts[1:negatives_start], negatives=texts[negatives_start:])


class Record(NamedTuple):
    """A text, or the fields of a pair, question or conversation, with its origin: `file:line`, the file, or a URL.

    A named tuple takes 0.4 µs to create and a frozen dataclass 1.7 µs; a packed JSON line takes 19 µs in all.
    """

    text: str
    """The text. With `fields`: the text for finding duplicates and for training a tokenizer."""
    origin: str
    set_name: str
    fields: Pair | Question | Conversation | Preference | Prompt | LabeledText | TaggedText | Match | None = None
    group: str = ""
    """The text whose hash chooses the split, if not `text`. Records of one group go into the same split."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """An unusable record: its origin, a reason (one word, for the ledger) and a sentence for the user."""

    origin: str
    reason: str
    detail: str
    set_name: str

    def to_json(self) -> dict[str, str]:
        """Return its line in rejected.jsonl."""
        return {"origin": self.origin, "reason": self.reason, "detail": self.detail, "set": self.set_name}


@dataclass(frozen=True, slots=True)
class ContaminatedDocument:
    """A document that shares a word n-gram with benchmarks."""

    origin: str
    set_name: str
    benchmark_rows: list[int]
    """Indices of the benchmark rows that share its n-grams, in the index of the run."""
    words: str
    """The first shared n-gram, in simplified words."""


@dataclass(frozen=True, slots=True)
class DroppedRecord:
    """A valid record that the settings of the run exclude. It does not count as rejected."""

    reason: str
    set_name: str = ""
    """The set that counts it, if a source excludes it."""


@dataclass(frozen=True, slots=True)
class Document:
    """A cleaned, unique record and the split it belongs to."""

    record: Record
    split: Split
