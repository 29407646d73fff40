"""Calls read out of a text, whole or as it is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from artel.text.calls.forms import FORMS, Form, unmarked_calls
from artel.text.calls.objects import names_of_tools
from artel.text.records import BadRecord, ToolCall, Tools


def read_calls(text: str, tools: Tools = ()) -> tuple[str, tuple[ToolCall, ...]]:
    """The text without the calls in it, and the calls. Calls without a mark are recognized if they are of `tools`."""
    reader = CallReader(tools)
    rest = reader.add(text) + reader.rest()
    return (rest.strip() if reader.calls else text), tuple(reader.calls)


@dataclass(slots=True)
class CallReader:
    """Takes a text piece by piece: what is no call is returned as soon as that is certain."""

    tools: Tools = ()
    calls: list[ToolCall] = field(default_factory=list)
    """Those that are whole."""
    is_over: bool = False
    """Whether the turn ends with them: what comes after it is dropped."""
    _held: str = ""
    _inside: Form | None = None
    _begun: bool = False
    """Whether the text has begun with something that is no call."""

    def add(self, text: str) -> str:
        """The text that is no call, as far as that is certain."""
        if self.is_over:
            return ""
        self._held += text
        if not self._begun and self._inside is None:
            if self._may_be_unmarked():
                return ""
            self._begun = bool(self._held.strip())
        shown = ""
        while True:
            if self._inside is None:
                form, at = self._next_mark()
                if form is None:
                    break
                shown += self._held[:at]
                self._held = self._held[at + len(form.opens) :]
                self._inside = form
            body, found, after = self._held.partition(self._inside.closes) if self._inside.closes else ("", "", "")
            if not found:
                return shown
            shown += self._closed(body, found)
            self._held = "" if self.is_over else after
        kept = max(_unfinished(self._held, form.opens) for form in FORMS)
        shown += self._held[: len(self._held) - kept]
        self._held = self._held[len(self._held) - kept :]
        return shown

    def rest(self) -> str:
        """What was held back, when nothing more comes; a call may lack its end."""
        if self._inside is not None:
            return self._closed(self._held, "")
        if not self._begun:
            self.calls += (calls := unmarked_calls(self._held, self.tools))
            if calls:
                return ""
            self._begun = True
            held, self._held = self._held, ""
            return self.add(held) + self.rest()
        return self._held

    def _closed(self, body: str, closing: str) -> str:
        """Take the calls of a body; what it says besides, or the text that it is if it has none."""
        form = self._inside
        assert form is not None
        self._inside = None
        try:
            self.calls += form.calls(body, self.tools)
        except (BadRecord, ValueError, SyntaxError, RecursionError):
            return form.opens + body + closing
        self.is_over = form.ends_turn and bool(closing)
        return form.said(body)

    def _next_mark(self) -> tuple[Form | None, int]:
        found = [(at, form) for form in FORMS if (at := self._held.find(form.opens)) >= 0]
        if not found:
            return None, -1
        at, form = min(found, key=lambda pair: pair[0])
        return form, at

    def _may_be_unmarked(self) -> bool:
        text = self._held.lstrip()
        if not self.tools or any(text.startswith(form.opens) for form in FORMS):
            return False
        return text[:1] in ("", "{", "[") or any(
            name.startswith(text) or text.startswith(f"{name}{{") for name in names_of_tools(self.tools)
        )


def _unfinished(text: str, mark: str) -> int:
    """Characters at the end of a text with which a mark begins."""
    return max(size for size in range(len(mark)) if text.endswith(mark[:size]))
