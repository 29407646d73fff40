"""Score answers with the scorers of reasoning-gym.

Some of them pass the answer to `eval`, or to sympy's parser, which does the same. For their tasks artel accepts only
numbers, operators, brackets, single letters and a few functions. Any other answer scores 0 without being evaluated.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from typing import Any

from pydantic import Field

from artel.config import ShortSection
from artel.errors import InputError, missing_extra
from artel.rewards.completion import Completion

# Tasks of reasoning-gym 0.1.25 whose scorer evaluates the answer.
EVALUATING_TASKS = frozenset(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion".split()
)
_BOARD_TASKS = ("arc_agi", "rearc")  # their scorers compare a board with tuples, which JSON turns into lists
_COMPUTATION = re.compile(r"(?:(?:sin|cos|tan|exp|log|sqrt|[A-Za-z])\b|[\d\s+\-*/^(),\[\]]|(?<=\d)\.|\.(?=\d))*")
_LIST = re.compile(r"(?:[\d\s,\[\]]|'[A-Za-z_.]{0,9}'|\"[A-Za-z_.]{0,9}\")*")  # for n_queens and string_insertion
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class GymConfig(ShortSection):
    """The scorer of a task of reasoning-gym (needs artel-lm[gym])."""

    task: str = Field(
        default="",
        description="Name of the task, e.g. countdown; by default that of the record. Records need the columns answer "
        "and metadata.",
    )

    @property
    def label(self) -> str:
        return self.task or "gym"


class Gym:
    """Score of the text in the last `<answer>` tags, 0 to 1. Without tags, the full text is scored."""

    def __init__(self, settings: GymConfig) -> None:
        try:
            from reasoning_gym.factory import DATASETS, get_score_answer_fn
        except ImportError:
            raise missing_extra("reasoning-gym", "gym", "gym") from None
        if settings.task and settings.task not in DATASETS:
            matches = difflib.get_close_matches(settings.task, DATASETS, 1)
            fix = f"did you mean {matches[0]}?" if matches else f"write one of: {', '.join(sorted(DATASETS))}"
            raise InputError.at("gym.task", f"reasoning-gym has no task {settings.task!r}", fix)
        self._task = settings.task
        self._get_scorer: Any = cache(get_score_answer_fn)

    def __call__(self, completions: list[Completion]) -> list[float]:
        return [self._score(completion) for completion in completions]

    def _score(self, completion: Completion) -> float:
        metadata: Any = completion.column("metadata")
        if isinstance(metadata, str):
            metadata = json.loads(metadata)
        task = self._task or metadata.get("source_dataset")
        if not task:
            raise ValueError("its metadata names no task (source_dataset); write gym: TASK")
        if task in _BOARD_TASKS:
            metadata = {**metadata, "output": tuple(map(tuple, metadata["output"]))}
        entry = {"question": completion.prompt, "answer": completion.column("answer"), "metadata": metadata}
        tagged = _ANSWER.findall(completion.text)
        answer = (tagged[-1] if tagged else completion.text).strip()
        if task in EVALUATING_TASKS and not is_harmless(answer):
            return 0.0
        return float(self._get_scorer(task)(answer, entry))


def is_harmless(answer: str) -> bool:
    """True if evaluating the answer can only compute a value."""
    return bool(_COMPUTATION.fullmatch(answer) or _LIST.fullmatch(answer))
