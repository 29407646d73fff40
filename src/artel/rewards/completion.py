"""The input of rewards, and the interface of the rewards in the registry `REWARDS`."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of a model to one prompt."""

    prompt: str | list[dict[str, Any]]
    """Text, or the messages of a conversation."""
    text: str
    """The answer as text; the last reply if it has several."""
    columns: dict[str, Any]
    """The other columns of the prompt's record."""
    tokens: int
    cut_off: bool
    """True if it reached the maximum length."""
    replies: list[dict[str, Any]] = field(default_factory=list)
    """All messages after the prompt, if tools or an environment took part."""

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The messages after the prompt."""
        return self.replies or [{"role": "assistant", "content": self.text}]

    @property
    def messages(self) -> list[dict[str, Any]] | None:
        """The whole conversation; None if the prompt is a plain text."""
        return None if isinstance(self.prompt, str) else [*self.prompt, *self.turns]

    def column(self, name: str) -> Any:
        """Return the value of a column. Raise KeyError, with the names of all columns, if the record lacks it."""
        if name not in self.columns:
            raise MissingColumn(f"the prompt's record has no column {name!r} (it has: {', '.join(self.columns)})")
        return self.columns[name]


class MissingColumn(LookupError):
    """The record of a prompt lacks a column that a reward needs."""


ScoreList = Sequence[float | Exception | None]


class Reward(Protocol):
    """An entry of `REWARDS`, created from its settings in a child process.

    A call returns one number per completion, None where the reward does not apply, or an exception that says why there
    is no score. By default it gets a single completion; with the attribute `batch = True` it gets all completions of a
    round. If `__call__` is a coroutine function, `concurrent = True` lets several calls wait at the same time. With
    `resident = True` the reward exists in one process only, because it holds a model.
    """

    def __init__(self, settings: Any) -> None: ...

    def __call__(self, completions: list[Completion]) -> ScoreList | Awaitable[ScoreList]: ...
