"""Words and number formats of the report, in English and Russian: words/LANGUAGE.json."""

from __future__ import annotations

import math
import re
from importlib.resources import files
from typing import Any

import orjson

LANGUAGES = ("en", "ru")
_NARROW_SPACE = "\u202f"
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?%?")


class Language:
    """Words by name (`words.step`), translations of phrases in a run's files, and number formats."""

    def __init__(self, name: str) -> None:
        self.name = name
        content = files("artel.reports.page").joinpath("words", f"{name}.json").read_bytes()
        words = orjson.loads(content)
        self._phrases: dict[str, str] = words.pop("phrases")
        self._sentences = [(_pattern(text), own) for text, own in self._phrases.items() if "{" in text]
        self.words: dict[str, str] = words

    def __getitem__(self, word: str) -> str:
        return self.words[word]

    def phrase(self, text: str) -> str:
        """Translate an English phrase from a run's files: a reason or note of the ledger, or a chosen value.

        In the phrases of words/LANGUAGE.json, `{name}` matches any text, which is kept, or a number; `{more}` matches
        one or more phrases, separated by commas; `{any_of}` matches values separated by `or`. A phrase without a
        translation stays English.
        """
        if text in self._phrases:
            return self._phrases[text]
        for pattern, own in self._sentences:
            if match := pattern.fullmatch(text):
                return own.format(**{name: self._filled(name, part) for name, part in match.groupdict().items()})
        return text

    def _filled(self, name: str, part: str) -> str:
        if _NUMBER.fullmatch(part):
            return self.percent(float(part[:-1]) / 100, 2) if part.endswith("%") else self._localized(part)
        if name.startswith("any_of"):
            return part.replace(" or ", f" {self.words['or']} ")
        if name != "more":
            return part
        whole = self.phrase(part)
        return ", ".join(map(self.phrase, part.split(", "))) if whole == part else whole

    def label(self, metric: str) -> str:
        """Return the display name of a metric."""
        return self._phrases.get(metric, metric.replace("_", " "))

    def integer(self, value: float) -> str:
        """Format 1234 as 1,234."""
        return self._localized(f"{round(value):,}")

    def number(self, value: float | None, digits: int = 4) -> str:
        """Format with `digits` significant digits. Uses an exponent only for very small or large values."""
        if value is None or not math.isfinite(value):
            return "NaN"
        size = abs(value)
        if size >= 10**digits and size < 1e12:
            return self.integer(value)
        if size and (size < 1e-4 or size >= 1e12):
            return self._localized(f"{value:.{digits - 1}e}")
        decimals = max(0, digits - 1 - (math.floor(math.log10(size)) if size else 0))
        return self._localized(f"{value:,.{decimals}f}")

    def percent(self, fraction: float, digits: int = 1) -> str:
        return self._localized(f"{100 * fraction:.{digits}f}") + (" %" if self.name == "ru" else "%")

    def difference(self, fraction: float) -> str:
        """Format a relative difference, such as +12%."""
        return self._localized(f"{100 * fraction:+.0f}") + (" %" if self.name == "ru" else "%")

    def duration(self, seconds: float) -> str:
        """`45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
        seconds = max(0, round(seconds))
        parts = []
        for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
            if seconds >= size:
                parts.append(f"{seconds // size} {self.words[f'unit_{unit}']}")
                seconds %= size
            elif parts:
                break
            if len(parts) == 2:
                break
        return " ".join(parts) or f"0 {self.words['unit_s']}"

    def bytes(self, count: float) -> str:
        for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if count >= size:
                return f"{self._localized(f'{count / size:,.1f}')} {self.phrase(unit)}"
        return f"{count:,} B"

    def separators(self) -> str:
        """Decimal and thousands separators, in Plotly's format."""
        return f",{_NARROW_SPACE}" if self.name == "ru" else ".,"

    def _localized(self, text: str) -> str:
        if self.name != "ru":
            return text.replace("-", "\u2212") if text.startswith("-") else text
        table: dict[int, Any] = {ord(","): _NARROW_SPACE, ord("."): ","}
        text = text.translate(table)
        return text.replace("-", "\u2212", 1) if text.startswith("-") else text


def _pattern(phrase: str) -> re.Pattern[str]:
    """Compile a phrase with `{name}` placeholders to a pattern."""
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+?)", re.escape(phrase)), re.DOTALL)
