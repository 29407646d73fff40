"""What a source yields (texts, pairs, questions, conversations, preferences, labels …), and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

AnswerClass = Literal["yes", "no", "short", "long", "unknown"]
Split = Literal["train", "validation"]


class BadRecord(Exception):
    """Why a record, a row or a whole file cannot be used.

    Readers raise it, or yield it in place of a row, so that the rows after it are still read.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        """One word for the ledger."""
        self.detail = detail
        """A sentence for people: what is wrong, then what to do."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A text and what it should have been."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the document that may answer it, and the position of the answer in the document."""

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
    """By which the tool's answer names the call; empty where the data have none."""

    def written(self) -> str:
        """The call as JSON: {"name": …, "arguments": {…}}."""
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    thought: str = ""
    """What the assistant thought before it wrote `content` (the inside of <think> … </think>)."""
    trained: bool | None = None
    """Whether the model learns it, if the data say so (`loss_weight`); with None, `chat.train_on` decides."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The functions that the assistant calls after `content`, which may then be empty."""
    name: str = ""
    """Of a tool's answer: the function that it comes from, where the data tell."""
    tool_call_id: str = ""
    """Of a tool's answer: the id of the call, where the data have one."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All that is said in it: thought, content, calls as JSON; without what is empty."""
        texts = (self.thought, self.content, *(call.written() for call in self.tool_calls))
        return tuple(text for text in texts if text)

    @property
    def is_empty(self) -> bool:
        """True if nothing is said. A tool may return nothing, and a call needs no words."""
        return not self.content.strip() and not self.tool_calls and self.role != "tool"


Tools = tuple[dict[str, Any], ...]
"""Functions that may be called, as OpenAI's API describes them: {"type": "function", "function": {"name": …}}."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order. At most one is from the system, and it is the first."""

    messages: tuple[Message, ...]
    tools: Tools = ()
    counted: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    """What reading changed, for the ledger: turns_left_out (after the assistant's last), tools_of_system."""


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt (messages up to the user's last) with a better and a worse answer; unpaired data have one of the two."""

    prompt: tuple[Message, ...]
    chosen: Message | None
    rejected: Message | None
    tools: Tools = ()
    margin: float = 0.0
    """By how much the chosen answer is better, in units of a reward, where the data say that."""


@dataclass(frozen=True, slots=True)
class Labeled:
    """A text, or a pair of texts, with its labels or a number."""

    text: str
    second: str = ""
    """The other text of a pair; empty where there is one text."""
    labels: tuple[str, ...] = ()
    """One for most data; none to several where a text may have several."""
    number: float | None = None
    """What is to be predicted, where that is a number."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text, self.second) if self.second else (self.text,)

    def with_texts(self, texts: tuple[str, ...]) -> Labeled:
        """The same with other texts, as many as `texts`."""
        return replace(self, text=texts[0], second=texts[1] if self.second else "")


@dataclass(frozen=True, slots=True)
class Tagged:
    """A text and what is named in it."""

    text: str
    spans: tuple[tuple[int, int, str], ...]
    """(start, end, label): characters from `start` to before `end`. One may lie within another."""


@dataclass(frozen=True, slots=True)
class Match:
    """A query, texts that match it, and texts that do not."""

    query: str
    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    score: float | None = None
    """How well the only positive matches, where the data say that by a number."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.query, *self.positives, *self.negatives)

    def with_texts(self, texts: tuple[str, ...]) -> Match:
        """The same with other texts, as many as `texts`."""
        count = 1 + len(self.positives)
        return replace(self, query=texts[0], positives=texts[1:count], negatives=texts[count:])


class Record(NamedTuple):
    """One text, or the fields of a pair, question or conversation, with its origin: `file:line`, the file, or a URL.

    A named tuple takes 0.4 µs to create and a frozen dataclass 1.7 µs; a packed JSON line takes 19 µs in all.
    """

    text: str
    """The text. If there are `fields`: the text by which duplicates are found and on which a tokenizer is trained."""
    origin: str
    set_name: str
    fields: Pair | Question | Conversation | Preference | Labeled | Tagged | Match | None = None
    group: str = ""
    """The text whose hash chooses the split, if not `text`: records of one group go into the same split."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that could not be used: its origin, a reason (one word, for the ledger) and a sentence for people."""

    origin: str
    reason: str
    detail: str
    set_name: str

    def to_json(self) -> dict[str, str]:
        """Its line in rejected.jsonl."""
        return {"origin": self.origin, "reason": self.reason, "detail": self.detail, "set": self.set_name}


@dataclass(frozen=True, slots=True)
class Contaminated:
    """A document that shares an n-gram of words with benchmarks."""

    origin: str
    set_name: str
    rows: list[int]
    """The numbers of the benchmarks' rows that it shares n-grams with, in the index of the run."""
    words: str
    """The first n-gram that it shares, in simplified words."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A good record that the run's own settings leave out. It does not count as bad."""

    reason: str
    set_name: str = ""
    """If a source leaves it out itself: the set in which it is counted."""


@dataclass(frozen=True, slots=True)
class Document:
    """A cleaned, unique record and the split it belongs to."""

    record: Record
    split: Split
