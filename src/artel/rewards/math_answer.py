"""Compare formulas with math-verify, which parses LaTeX and plain numbers and computes with sympy.

In a completion it evaluates only digits, operators and parentheses, and LaTeX that its own grammar accepts.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from artel.config import Section
from artel.errors import missing_extra
from artel.rewards.completion import Completion


class MathConfig(Section):
    """Compare the formula of the answer with a column (math-verify; needs artel-lm[math])."""

    column: str = Field(default="answer", description="Column with the right answer, as LaTeX or a plain number.")


class Math:
    """1 if the formulas in the answer and the column are equal. None if the column is null."""

    def __init__(self, settings: MathConfig) -> None:
        try:
            import math_verify
        except ImportError:
            raise missing_extra("math-verify", "math", "math") from None
        self._library: Any = math_verify
        self._column = settings.column

    def __call__(self, completions: list[Completion]) -> list[float | None]:
        return [self._score(completion) for completion in completions]

    def _score(self, completion: Completion) -> float | None:
        value = completion.column(self._column)
        if value is None:
            return None
        formula = str(value)
        if not any(mark in formula for mark in ("$", "\\boxed", "\\(", "\\[")):
            formula = f"${formula}$"
        expected = self._library.parse(formula)
        if not expected:
            raise ValueError(f"column {self._column!r} is not a formula: {str(value)[:80]!r}")
        return float(self._library.verify(expected, self._library.parse(completion.text)))
