"""Calls of tools in an answer: `<tool_call>{"name": …, "arguments": …}</tool_call>`, as Hermes, Qwen and others write.

The text before a call is shown as it comes; what may become a call is held back.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(slots=True)
class ToolCalls:
    """Takes the text of an answer piece by piece."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    """Whole calls, as OpenAI's answers have them."""
    _held: str = ""
    _inside: bool = False

    def add(self, text: str) -> str:
        """The text that is no call, as far as that is certain."""
        self._held += text
        shown = ""
        while True:
            mark = _CLOSE if self._inside else _OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            if not self._inside:
                shown += before
            elif (call := _call(before)) is not None:
                self.calls.append(call)
            else:
                shown += _OPEN + before + _CLOSE
            self._held, self._inside = after, not self._inside
        if self._inside:
            return shown
        kept = max(size for size in range(len(_OPEN)) if self._held.endswith(_OPEN[:size]))
        shown += self._held[: len(self._held) - kept]
        self._held = self._held[len(self._held) - kept :]
        return shown

    def rest(self) -> str:
        """What was held back, when nothing more comes; a call may lack its end."""
        if not self._inside:
            return self._held
        call = _call(self._held)
        if call is None:
            return _OPEN + self._held
        self.calls.append(call)
        return ""


def _call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str):
        return None
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": written}}
