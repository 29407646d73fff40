"""Calls of tools in an answer, as OpenAI's API has them."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from typing import Any

from artel.text import Tools
from artel.text.calls.reader import CallReader


class CallUpdates(ABC):
    """Takes the text of an answer piece by piece, and gives its calls as a stream has them."""

    def __init__(self) -> None:
        self.count = 0
        """Calls that have begun."""
        self._updates: list[dict[str, Any]] = []

    @abstractmethod
    def add(self, text: str) -> str:
        """The text that is no call, as far as that is certain."""

    @abstractmethod
    def rest(self) -> str:
        """What was held back, when nothing more comes."""

    def updates(self) -> list[dict[str, Any]]:
        """What is new of the calls since the last time: their beginnings, and more of their arguments."""
        updates, self._updates = self._updates, []
        return updates

    @property
    def is_full(self) -> bool:
        """Whether the answer may have no more calls, and ends here."""
        return False

    def begin(self, name: str, arguments: str) -> None:
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        self._updates.append({"index": self.count, **call, "function": {"name": name, "arguments": arguments}})
        self.count += 1

    def go_on(self, arguments: str) -> None:
        """More of the last call's arguments."""
        self._updates.append({"index": self.count - 1, "function": {"arguments": arguments}})


class ToolCalls(CallUpdates):
    """Reads what the model writes by itself; what may become a call is held back."""

    def __init__(self, tools: Tools, most: int | None = None) -> None:
        """`most`: calls beyond so many are left out."""
        super().__init__()
        self._reader = CallReader(tools)
        self._most = most

    def add(self, text: str) -> str:
        return self._taken(self._reader.add(text))

    def rest(self) -> str:
        return self._taken(self._reader.rest())

    @property
    def is_full(self) -> bool:
        return self.count == self._most or self._reader.is_over

    def _taken(self, text: str) -> str:
        for call in self._reader.calls[self.count : self._most]:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            self.begin(call.name, arguments.encode(errors="backslashreplace").decode())  # half a character is no text
        return text


def whole_calls(updates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that updates make, as an answer has them that is no stream."""
    calls: list[dict[str, Any]] = []
    for update in updates:
        if update["index"] == len(calls):
            calls.append({"id": update["id"], "type": update["type"], "function": dict(update["function"])})
        else:
            calls[-1]["function"]["arguments"] += update["function"]["arguments"]
    return calls
