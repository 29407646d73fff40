"""The four questions of `artel new`, each of which a flag may have answered."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from artel.errors import InputError, Problem
from artel.planning.new.answers import (
    SCRATCH,
    Answers,
    objectives_for,
    read_hardware,
    read_model,
    read_objective,
    read_time,
    read_time_and_hardware,
)
from artel.planning.new.look import look_at
from artel.printable import in_bytes

_HOPELESS_BYTES = 1_000_000
"""Bytes of conversations or pairs below which no model from scratch learns to write."""

PRETRAINED, _CAUSAL = "Qwen/Qwen3-0.6B", "AutoModelForCausalLM"
"""The default model to teach a chat, of the class that artel's recipes take."""

T = TypeVar("T")
Ask = Callable[[str, str], str]
"""(question, default) -> what was typed, or the default."""


@dataclass(frozen=True, slots=True)
class Given:
    """What flags say; None where there is none."""

    text: list[str] | None = None
    learn: str | None = None
    model: str | None = None
    time: str | None = None
    hardware: str | None = None

    @property
    def missing(self) -> list[str]:
        """Flags without which there is something to ask."""
        flags = {"--text": self.text, "--learn": self.learn, "--from": self.model, "--time": self.time}
        return [flag for flag, value in flags.items() if not value]


def answer_questions(given: Given, ask: Ask | None, tell: Callable[[str], object]) -> Answers:
    """What the flags say; the rest is asked. Raises InputError for wrong flags, and for missing ones without `ask`."""
    if ask is None and given.missing:
        what = f"there is no terminal to ask at, and {' and '.join(given.missing)} {_verb(given.missing)} missing"
        example = "artel new run.yaml --text novel.txt --learn write --from scratch --time 30min"
        raise InputError.at("artel new", what, f"give all of them: {example}")
    _check_flags(given)
    look = _answer(given.text, "Which text? Files, globs or folders", "", lambda text: look_at(_paths(text)), ask, tell)
    tell(look.describe())
    fitting = objectives_for(look)
    if given.learn is None:
        for name, objective in fitting.items():
            tell(f"  {objective.verb or name:<10}{objective.does}")
    first = next(iter(fitting))
    default = fitting[first].verb or first
    name = _answer(given.learn, "What is to be learned?", default, lambda text: read_objective(text, look), ask, tell)
    kind = fitting[name]
    has_answers = kind.generates and not kind.packs_text
    where, default = "From scratch, or from which model: a folder or a hub id?", SCRATCH
    if has_answers and kind.auto_class == _CAUSAL:
        where, default = "From which pretrained model: a folder or a hub id? Or from scratch?", PRETRAINED
    model = _answer(given.model, where, default, read_model, ask, tell)
    if not model and look.bytes < _HOPELESS_BYTES and has_answers:
        tell(
            f"{in_bytes(look.bytes)} of text is too little to learn a language from: the answers will be noise. Take a "
            f"pretrained model: --from FOLDER or --from {PRETRAINED}"
        )
    if given.time is not None:
        return Answers(look, name, model, read_time(given.time), read_hardware(given.hardware or ""))
    if given.hardware is not None:
        time = _answer(None, "How long?", "30min", read_time, ask, tell)
        return Answers(look, name, model, time, read_hardware(given.hardware))
    question = "How long? Such as 30min, or for another machine 2h on h100-80gb:8"
    time, hardware = _answer(None, question, "30min", read_time_and_hardware, ask, tell)
    return Answers(look, name, model, time, hardware)


def _check_flags(given: Given) -> None:
    """Raise InputError with the problems of all flags that can be judged without the text."""
    problems: list[Problem] = []
    for flag, read in ((given.model, read_model), (given.time, read_time), (given.hardware, read_hardware)):
        try:
            if flag:
                read(flag)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)


def _answer(
    flag: str | list[str] | None,
    question: str,
    default: str,
    read: Callable[[str], T],
    ask: Ask | None,
    tell: Callable[[str], object],
) -> T:
    """What the flag or an answer means. A wrong answer is asked for again; a wrong flag raises InputError."""
    if flag is not None:
        return read(shlex.join(flag) if isinstance(flag, list) else flag)
    assert ask is not None
    while True:
        try:
            return read(ask(question, default))
        except InputError as error:
            for problem in error.problems:
                tell(f"{problem.what}; {problem.fix}")


def _paths(text: str) -> list[str]:
    """The paths in a line, as a shell reads it. Raises InputError."""
    try:
        paths = shlex.split(text)
    except ValueError as error:
        raise InputError.at("--text", f"{text!r}: {error}", "close the quotation mark") from None
    if not paths or not all(path.strip() for path in paths):
        raise InputError.at("--text", "no text is named", "give a file, a glob in quotes, or a folder (. is this one)")
    return paths


def _verb(flags: list[str]) -> str:
    return "is" if len(flags) == 1 else "are"
