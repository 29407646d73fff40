"""Calls of tools in an answer, as OpenAI's API has them."""

from __future__ import annotations

import json
import uuid
from typing import Any

from artel.text import Tools
from artel.text.calls.reader import CallReader


class ToolCalls:
    """Takes the text of an answer piece by piece; what may become a call is held back."""

    def __init__(self, tools: Tools) -> None:
        self._reader = CallReader(tools)
        self.calls: list[dict[str, Any]] = []
        """Whole calls, as OpenAI's answers have them."""

    def add(self, text: str) -> str:
        """The text that is no call, as far as that is certain."""
        return self._taken(self._reader.add(text))

    def rest(self) -> str:
        """What was held back, when nothing more comes."""
        return self._taken(self._reader.rest())

    def _taken(self, text: str) -> str:
        for call in self._reader.calls[len(self.calls) :]:
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            self.calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return text
