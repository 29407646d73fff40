"""The four questions of `artel new`, and how their answers are read. Flags can answer them too."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from artel.config.schema.quantities import read_seconds
from artel.errors import InputError, Problem
from artel.messages import logger
from artel.objectives import Objective
from artel.planning.hardware import find_hardware
from artel.planning.new.text_summary import TextSummary, summarize_text
from artel.printable import format_bytes
from artel.registry import OBJECTIVES

SCRATCH = "scratch"
"""The answer for a model trained from scratch."""

_MIN_SCRATCH_BYTES = 1_000_000
"""Bytes of conversations or pairs below which a model from scratch does not learn to write."""

PRETRAINED, _CAUSAL = "Qwen/Qwen3-0.6B", "AutoModelForCausalLM"
"""The default model for chat, and the class of models it applies to."""

T = TypeVar("T")
Ask = Callable[[str, str], str]
"""(question, default) -> the typed answer, or the default."""


@dataclass(frozen=True, slots=True)
class PresetAnswers:
    """Answers given by flags; None for missing flags."""

    text: list[str] | None = None
    learn: str | None = None
    model: str | None = None
    time: str | None = None
    hardware: str | None = None

    @property
    def missing(self) -> list[str]:
        """Missing flags. `artel new` asks for their values."""
        flags = {"--text": self.text, "--learn": self.learn, "--from": self.model, "--time": self.time}
        return [flag for flag, value in flags.items() if not value]


@dataclass(frozen=True, slots=True)
class Answers:
    text: TextSummary
    objective: str
    """The `objective` of the run file."""
    model: str
    """A folder or a hub id; empty for training from scratch."""
    time: str
    """As the user wrote it: `30min`."""
    hardware: str
    """Name for `artel plan --hardware`; empty for this machine."""


def objectives_for(text: TextSummary) -> dict[str, type[Objective]]:
    """Return the objectives that can learn from this text, by name."""
    offered = {name: OBJECTIVES[name] for name in OBJECTIVES.names if OBJECTIVES[name].presentation.is_offered}
    return {
        name: objective_class
        for name, objective_class in offered.items()
        if set(objective_class.learns_from) & text.record_kinds
    }


def read_objective(answer: str, text: TextSummary) -> str:
    """Return the objective for an answer, its name or its verb. Raise InputError if this text cannot teach it."""
    objectives = objectives_for(text)
    names = {
        known_name: name
        for name, objective in objectives.items()
        for known_name in (name, objective.presentation.verb)
        if known_name
    }
    if answer in names:
        return names[answer]
    if answer in OBJECTIVES and not OBJECTIVES[answer].presentation.is_offered:
        what = f"{answer} needs more than texts, so artel new does not support it"
        raise InputError.at("--learn", what, f"start with a recipe: artel recipes ls lists those of objective {answer}")
    tasks = ", ".join(objective.presentation.verb or name for name, objective in objectives.items())
    all_names = {known_name for name in OBJECTIVES.names for known_name in (name, OBJECTIVES[name].presentation.verb)}
    near = difflib.get_close_matches(answer, names, 1)
    what = f"Unknown task {answer!r}" + (f"; did you mean {near[0]}?" if near else "")
    if answer in all_names:
        what = f"{answer!r} cannot be learned from {' or '.join(sorted(text.record_kinds))}"
    raise InputError.at("--learn", what, f"this text fits: {tasks}")


def read_model(answer: str) -> str:
    """Return a folder or a hub id; empty for `scratch`. Raise InputError for a path that is not a folder."""
    if answer == SCRATCH:
        return ""
    is_path = answer.startswith((".", "/", "~")) or answer.isdigit()  # a number is not an answer to this question
    if not answer or (is_path and not Path(answer).expanduser().is_dir()):
        raise InputError.at("--from", f"{answer!r} is not a folder", f"use {SCRATCH}, a model's folder or a hub id")
    return os.path.expanduser(answer)  # noqa: PTH111 - a hub id stays as it is


def read_time(answer: str) -> str:
    """Return the answer unchanged. Raise InputError if it is not a time."""
    try:
        read_seconds(answer)
    except ValueError as error:
        raise InputError.at("--time", str(error).partition(";")[0], "use, for example, 30min or 2h") from None
    return answer


def read_hardware(answer: str) -> str:
    """Return the answer unchanged. Raise InputError for unknown hardware, with the nearest names."""
    find_hardware(answer)
    return answer


def read_time_and_hardware(answer: str) -> tuple[str, str]:
    """Split `30min`, or `2h on h100-80gb:8`. Raise InputError if either part is wrong."""
    time, _, hardware = answer.partition(" on ")
    return read_time(time.strip()), read_hardware(hardware.strip())


def answer_questions(preset: PresetAnswers, ask: Ask | None) -> Answers:
    """Take answers from the flags, and ask for missing ones. Without `ask` raise InputError if a flag is missing."""
    if ask is None and preset.missing:
        verb = "is" if len(preset.missing) == 1 else "are"
        what = f"no terminal for questions, and {' and '.join(preset.missing)} {verb} missing"
        example = "artel new run.yaml --text novel.txt --learn write --from scratch --time 30min"
        raise InputError.at("artel new", what, f"use all of them: {example}")
    _check_flags(preset)
    text = _read_or_ask(
        preset.text, "Which text? Files, globs or folders", "", lambda answer: summarize_text(_split_paths(answer)), ask
    )
    logger.info(text.describe())
    objectives = objectives_for(text)
    if preset.learn is None:
        for name, objective in objectives.items():
            logger.info("  %s%s", f"{objective.presentation.verb or name:<10}", objective.presentation.does)
    first_name = next(iter(objectives))
    default = objectives[first_name].presentation.verb or first_name
    name = _read_or_ask(
        preset.learn, "What is to be learned?", default, lambda answer: read_objective(answer, text), ask
    )
    objective_class = objectives[name]
    has_answers = objective_class.generates and not objective_class.packs_text
    model_question, default = "From scratch, or from which model: a folder or a hub id?", SCRATCH
    if has_answers and objective_class.auto_class == _CAUSAL:
        model_question, default = "From which pretrained model: a folder or a hub id? Or from scratch?", PRETRAINED
    model = _read_or_ask(preset.model, model_question, default, read_model, ask)
    if not model and text.num_bytes < _MIN_SCRATCH_BYTES and has_answers:
        logger.info(
            "%s of text is too little to learn a language from: the answers will be noise. Use a pretrained "
            "model: --from FOLDER or --from %s",
            format_bytes(text.num_bytes),
            PRETRAINED,
        )
    if preset.time is not None:
        return Answers(text, name, model, read_time(preset.time), read_hardware(preset.hardware or ""))
    if preset.hardware is not None:
        time = _read_or_ask(None, "How long?", "30min", read_time, ask)
        return Answers(text, name, model, time, read_hardware(preset.hardware))
    question = "How long? Such as 30min, or for another machine 2h on h100-80gb:8"
    time, hardware = _read_or_ask(None, question, "30min", read_time_and_hardware, ask)
    return Answers(text, name, model, time, hardware)


def _check_flags(preset: PresetAnswers) -> None:
    """Raise InputError with the problems of all flags that can be checked without the text."""
    problems: list[Problem] = []
    for flag, read in ((preset.model, read_model), (preset.time, read_time), (preset.hardware, read_hardware)):
        try:
            if flag:
                read(flag)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)


def _read_or_ask(
    flag: str | list[str] | None, question: str, default: str, read: Callable[[str], T], ask: Ask | None
) -> T:
    """Read a flag, or ask. Repeat the question after a wrong answer; raise InputError for a wrong flag."""
    if flag is not None:
        return read(shlex.join(flag) if isinstance(flag, list) else flag)
    assert ask is not None
    while True:
        try:
            return read(ask(question, default))
        except InputError as error:
            for problem in error.problems:
                logger.info("%s; %s", problem.what, problem.fix)


def _split_paths(text: str) -> list[str]:
    """Split a line into paths as a shell does. Raise InputError if a quote is open or there is no path."""
    try:
        paths = shlex.split(text)
    except ValueError as error:
        raise InputError.at("--text", f"{text!r}: {error}", "close the quotation mark") from None
    if not paths or not all(path.strip() for path in paths):
        raise InputError.at("--text", "no text is given", "use a file, a quoted glob, or a folder (. is this one)")
    return paths
