"""The answers to the questions of `artel new`, and what their words mean."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from artel.config.model_name import check_model_name
from artel.config.schema.quantities import read_seconds
from artel.errors import InputError
from artel.objectives import Objective
from artel.planning.hardware import find_hardware
from artel.planning.new.look import Look
from artel.registry import OBJECTIVES

SCRATCH = "scratch"
"""The answer for a model that is begun from nothing."""


@dataclass(frozen=True, slots=True)
class Answers:
    look: Look
    objective: str
    """As `objective` of a run file."""
    model: str
    """A folder or a hub id; empty: from scratch."""
    time: str
    """As the user wrote it: 30min."""
    hardware: str
    """As `artel plan --hardware` takes it; empty: this machine."""


def objectives_for(look: Look) -> dict[str, type[Objective]]:
    """The objectives that learn from what the text holds, by name."""
    kinds = {name: OBJECTIVES[name] for name in OBJECTIVES.names if OBJECTIVES[name].is_offered}
    return {name: kind for name, kind in kinds.items() if set(kind.learns_from) & look.kinds}


def read_objective(answer: str, look: Look) -> str:
    """The objective of an answer: its name, or the word that it is described by. Raises InputError."""
    fitting = objectives_for(look)
    words = {word: name for name, objective in fitting.items() for word in (name, objective.verb) if word}
    if answer in words:
        return words[answer]
    if answer in OBJECTIVES and not OBJECTIVES[answer].is_offered:
        what = f"{answer} needs more than texts, and is not asked about here"
        raise InputError.at("--learn", what, f"begin with a recipe: artel recipes ls lists those of objective {answer}")
    shown = ", ".join(objective.verb or name for name, objective in fitting.items())
    known = {word for name in OBJECTIVES.names for word in (name, OBJECTIVES[name].verb)}
    near = difflib.get_close_matches(answer, words, 1)
    what = f"Unknown task {answer!r}" + (f"; did you mean {near[0]}?" if near else "")
    if answer in known:
        what = f"{answer!r} cannot be learned from {' or '.join(sorted(look.kinds))}"
    raise InputError.at("--learn", what, f"this text fits: {shown}")


def read_model(answer: str) -> str:
    """A folder or a hub id; empty for `scratch`. Raises InputError for a path where no folder is."""
    if answer == SCRATCH:
        return ""
    is_path = answer.startswith((".", "/", "~")) or answer.isdigit()  # a number answers no question here
    if not answer or (is_path and not Path(answer).expanduser().is_dir()):
        raise InputError.at("--from", f"{answer!r} is no folder", f"write {SCRATCH}, a model's folder or a hub id")
    name = os.path.expanduser(answer)  # noqa: PTH111 - a hub id stays as it is
    check_model_name(name)
    return name


def read_time(answer: str) -> str:
    """Raises InputError for what is no time."""
    try:
        read_seconds(answer)
    except ValueError as error:
        raise InputError.at("--time", str(error).partition(";")[0], "write it like 30min or 2h") from None
    return answer


def read_hardware(answer: str) -> str:
    """Raises InputError for hardware that is not known, with the nearest names."""
    find_hardware(answer)
    return answer


def read_time_and_hardware(answer: str) -> tuple[str, str]:
    """`30min`, or `2h on h100-80gb:8`. Raises InputError."""
    time, _, hardware = answer.partition(" on ")
    return read_time(time.strip()), read_hardware(hardware.strip())
