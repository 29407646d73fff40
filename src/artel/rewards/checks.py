"""Rewards that check the text of an answer: 1 if it passes, otherwise 0 (`Language`: a probability)."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from pydantic import Field, field_validator

from artel.config import Count, Number, Section, ShortSection
from artel.rewards.completion import Completion


class EqualsConfig(Section):
    """Compare the answer with a column."""

    column: str = Field(default="answer", description="Column with the right answer, or a list of right answers.")


class Equals:
    """1 if the answer equals the column, ignoring surrounding white space. None if the column is null."""

    def __init__(self, settings: EqualsConfig) -> None:
        self._column = settings.column

    def __call__(self, completions: list[Completion]) -> list[float | None]:
        return [self._score(completion) for completion in completions]

    def _score(self, completion: Completion) -> float | None:
        value = completion.column(self._column)
        if value is None:
            return None
        answers = value if isinstance(value, list) else [value]
        return float(completion.text.strip() in {str(answer).strip() for answer in answers})


class MatchesConfig(ShortSection):
    """Search the answer for a pattern."""

    pattern: str = Field(description="Regular expression of Python that must occur in the answer.")

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            what = f"{pattern!r} is not a regular expression: {error}"
            raise ValueError(f"{what}; fix it, or escape special characters") from None
        return pattern


class Matches:
    """1 if the pattern occurs in the answer."""

    def __init__(self, settings: MatchesConfig) -> None:
        self._pattern = re.compile(settings.pattern)

    def __call__(self, completions: list[Completion]) -> list[float]:
        return [float(self._pattern.search(completion.text) is not None) for completion in completions]


class NumberConfig(Section):
    """Compare the last number of the answer with a column."""

    column: str = Field(default="answer", description="Column with the right number; of a text, its last number.")
    tolerance: Number = Field(default=0.0, ge=0, description="Largest difference that is still right.")


class NumberReward:
    """1 if the last number in the answer equals the last number in the column. None if the column is null."""

    def __init__(self, settings: NumberConfig) -> None:
        self._settings = settings

    def __call__(self, completions: list[Completion]) -> list[float | None]:
        return [self._score(completion) for completion in completions]

    def _score(self, completion: Completion) -> float | None:
        value = completion.column(self._settings.column)
        if value is None:
            return None
        expected = last_number(str(value))
        if expected is None:
            raise ValueError(f"column {self._settings.column!r} has no number: {str(value)[:80]!r}")
        number = last_number(completion.text)
        if number is None:
            return 0.0
        return float(math.isclose(number, expected, rel_tol=1e-9, abs_tol=self._settings.tolerance))


_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?")


def last_number(text: str) -> float | None:
    """Return the last number in a text (42, -3.5, 1,234.5, 1e-3), or None."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


class JsonConfig(Section):
    """Check that the answer is JSON."""

    keys: list[str] = Field(default=[], description="Keys that it must have; it is then an object.")


class Json:
    """1 if the full answer is JSON, and an object with the configured keys if there are any."""

    def __init__(self, settings: JsonConfig) -> None:
        self._keys = settings.keys

    def __call__(self, completions: list[Completion]) -> list[float]:
        return [float(self._is_valid(completion.text)) for completion in completions]

    def _is_valid(self, text: str) -> bool:
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return False
        return not self._keys or (isinstance(value, dict) and all(key in value for key in self._keys))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class LengthConfig(Section):
    """Check the length of the answer."""

    minimum: Count = Field(default=0, ge=0, description="Fewest tokens.")
    maximum: Count | None = Field(default=None, ge=1, description="Most tokens.")


class Length:
    """1 if the length of the answer in tokens is within the limits."""

    def __init__(self, settings: LengthConfig) -> None:
        self._minimum = settings.minimum
        self._maximum = math.inf if settings.maximum is None else settings.maximum

    def __call__(self, completions: list[Completion]) -> list[float]:
        return [float(self._minimum <= completion.tokens <= self._maximum) for completion in completions]


class LanguageConfig(Section):
    """Check the language of the answer (py3langid; needs artel-lm[languages])."""

    languages: list[str] = Field(min_length=1, description="Codes (ISO 639) of the right languages, e.g. [en, ru].")


class Language:
    """Probability that the answer is in one of the languages. None if it has fewer than 100 characters."""

    def __init__(self, settings: LanguageConfig) -> None:
        from artel.text.cleaning.quality import language_probability

        self._languages = tuple(settings.languages)
        self._probability = language_probability
        language_probability("", self._languages, "language.languages")  # raises InputError for an unknown language

    def __call__(self, completions: list[Completion]) -> list[float | None]:
        return [self._probability(completion.text, self._languages) for completion in completions]


class FormatConfig(Section):
    """Check the tags around thoughts and answer."""

    thoughts: str = Field(default="think", description="Tag around the thoughts, which come first.")
    answer: str | None = Field(
        default=None, description="Tag around the answer. null: all text after the thoughts is the answer."
    )


class Format:
    """1 if tagged thoughts are followed by a non-empty answer. Each tag must occur exactly once."""

    def __init__(self, settings: FormatConfig) -> None:
        self._tags = [settings.thoughts, *([settings.answer] if settings.answer else [])]
        opening, closing = (re.escape(mark.format(settings.thoughts)) for mark in ("<{}>", "</{}>"))
        answer = r"\s*\S.*"
        if settings.answer:
            answer = rf"\s*{re.escape(f'<{settings.answer}>')}\s*\S.*{re.escape(f'</{settings.answer}>')}\s*"
        self._pattern = re.compile(rf"\s*{opening}.*{closing}{answer}", re.DOTALL)

    def __call__(self, completions: list[Completion]) -> list[float]:
        return [float(self._is_valid(completion.text)) for completion in completions]

    def _is_valid(self, text: str) -> bool:
        marks = [mark.format(tag) for tag in self._tags for mark in ("<{}>", "</{}>")]
        return all(text.count(mark) == 1 for mark in marks) and self._pattern.fullmatch(text) is not None
