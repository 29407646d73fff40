"""What a source yields, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

AnswerClass = Literal["yes", "no", "short", "long", "unknown"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A text and what it should have been."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the document that may answer it, and where in it the answer stands."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[int, int], ...]
    """Character spans (start, end) of the gold answers in `context`; the first is learned. Empty when unknown."""
    answer_class: AnswerClass
    candidates: tuple[tuple[int, int], ...] = ()
    """Natural Questions: (start, end) of each long-answer candidate, in the document's space-separated words."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    thought: str = ""
    """What the assistant thought before it wrote `content` (the inside of <think> … </think>)."""
    trained: bool | None = None
    """Whether it is learned, where the data say so (`loss_weight`); None goes by `chat.train_on`."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in their order: at most one system message, and it stands first."""

    messages: tuple[Message, ...]
    left_out: int = field(default=0, repr=False, compare=False)
    """Turns after the assistant's last one, which nothing answers."""


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt (turns up to the user's last) and its better and worse answer; unpaired data have only one of them."""

    prompt: tuple[Message, ...]
    chosen: Message | None
    rejected: Message | None


class Record(NamedTuple):
    """One text, or the fields of a pair, question or conversation, with its origin: `file:line`, the file, or a URL.

    A tuple: a frozen dataclass takes 1.7 µs to make and this 0.4, of the 19 µs that a packed line takes.
    """

    text: str
    """The text; of fields, what duplicates are told by and a tokenizer is trained on."""
    origin: str
    set_name: str
    fields: Pair | Question | Conversation | Preference | None = None
    group: str = ""
    """What the split goes by where it is not the text: records of one group fall into one part."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """What could not be read: why, in one word for the ledger and in a sentence for people."""

    origin: str
    reason: str
    detail: str
    set_name: str

    def to_json(self) -> dict[str, str]:
        """As it stands in rejected.jsonl."""
        return {"origin": self.origin, "reason": self.reason, "detail": self.detail, "set": self.set_name}


@dataclass(frozen=True, slots=True)
class Dropped:
    """A good record that is left out for a reason of the run's own making; it does not count as bad."""

    reason: str
    set_name: str = ""
    """Where a source leaves it out itself: the set that it is counted in."""


@dataclass(frozen=True, slots=True)
class Document:
    """A cleaned, unique record and the part of the data that it belongs to."""

    record: Record
    part: Literal["train", "validation"]
