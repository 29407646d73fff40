"""Words and number formats of the report, in English and Russian: words/LANGUAGE.json."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

import orjson

from artel.messages import Phrase, PhraseFormatter

LANGUAGES = ("en", "ru")
_NARROW_SPACE = "\u202f"


class Language(PhraseFormatter):
    """Words by name (`words.step`), translations of phrases in a run's files, and number formats."""

    def __init__(self, name: str) -> None:
        self.name = name
        content = files("artel.reports.page").joinpath("words", f"{name}.json").read_bytes()
        words = orjson.loads(content)
        self._phrases: dict[str, str] = words.pop("phrases")
        self.words: dict[str, str] = words

    def __getitem__(self, word: str) -> str:
        return self.words[word]

    def phrase(self, text: Any) -> str:
        """Translate an English text or a `Phrase` from a run's files. A text without a translation stays English."""
        if isinstance(text, Phrase) and text.arguments and text.template in self._phrases:
            return self.fill(self._phrases[text.template], text.arguments)
        return self._phrases.get(str(text), str(text))

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Phrase):
            return self.phrase(value)
        text = super().format_field(value, format_spec)
        return self._localize(text) if isinstance(value, int | float) else text

    def label(self, metric: str) -> str:
        """Return the display name of a metric."""
        return self._phrases.get(metric, metric.replace("_", " "))

    def integer(self, value: float) -> str:
        """Format 1234 as 1,234."""
        return self._localize(f"{round(value):,}")

    def number(self, value: float | None, digits: int = 4) -> str:
        """Format with `digits` significant digits. Uses an exponent only for very small or large values."""
        if value is None or not math.isfinite(value):
            return "NaN"
        magnitude = abs(value)
        if 10**digits <= magnitude < 1e12:
            return self.integer(value)
        if magnitude and not 1e-4 <= magnitude < 1e12:
            return self._localize(f"{value:.{digits - 1}e}")
        decimals = max(0, digits - 1 - (math.floor(math.log10(magnitude)) if magnitude else 0))
        return self._localize(f"{value:,.{decimals}f}")

    def percent(self, fraction: float, digits: int = 1) -> str:
        return self._localize(f"{fraction:.{digits}%}")

    def difference(self, fraction: float) -> str:
        """Format a relative difference, such as +12%."""
        return self._localize(f"{fraction:+.0%}")

    def duration(self, seconds: float) -> str:
        """Format as `45 s`, `12 min`, `3 h 20 min` or `2 d 4 h`."""
        seconds = max(0, round(seconds))
        amounts = []
        for unit, unit_seconds in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
            if seconds >= unit_seconds:
                amounts.append(f"{seconds // unit_seconds} {self.words[f'unit_{unit}']}")
                seconds %= unit_seconds
            elif amounts:
                break
            if len(amounts) == 2:
                break
        return " ".join(amounts) or f"0 {self.words['unit_s']}"

    def bytes(self, byte_size: float) -> str:
        for unit, unit_bytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if byte_size >= unit_bytes:
                return f"{self._localize(f'{byte_size / unit_bytes:,.1f}')} {self.phrase(unit)}"
        return f"{byte_size:,} B"

    def separators(self) -> str:
        """Return the decimal and thousands separators in Plotly's format."""
        return f",{_NARROW_SPACE}" if self.name == "ru" else ".,"

    def _localize(self, text: str) -> str:
        if self.name != "ru":
            return text.replace("-", "\u2212") if text.startswith("-") else text
        table: dict[int, Any] = {ord(","): _NARROW_SPACE, ord("."): ",", ord("%"): " %"}
        text = text.translate(table)
        return text.replace("-", "\u2212", 1) if text.startswith("-") else text
