"""Which teacher a run file names, and what of it does not fit the run: known before any text is read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.tokens import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEY = "distill.teacher"
_SHOWN = 3


def teacher_model(run: RunConfig) -> str:
    """The folder or hub id of the teacher's model: of a run that is trained, its folder `model`."""
    name = run.distill.teacher or ""
    return str(Path(name, "model")) if Path(name, "config.yaml").is_file() else name


def teacher_problems(run: RunConfig) -> list[Problem]:
    """What is wrong with the teacher, or does not go with it."""
    config = run.distill
    if config.teacher is None:
        fix = "write distill: {teacher: FOLDER}, a run that is trained, a model folder or a hub id"
        return [Problem(KEY, "is not given, and a student learns from a teacher", fix)]
    if run.run and Path(run.run, "teacher.json").is_file():
        return []  # the run has what its teacher said
    problems = []
    model = Path(teacher_model(run))
    if Path(config.teacher, "config.yaml").is_file() and not model.is_dir():
        what = f"{config.teacher} is a run whose model is not finished"
        problems.append(Problem(KEY, what, f"train it first: artel train {config.teacher}"))
    elif config.teacher.startswith((".", "/", "~")) and not model.is_dir():
        problems.append(Problem(KEY, f"there is no folder {config.teacher}", "give a run, a model folder or a hub id"))
    elif run.tokenizer.train is not None:
        what = "a tokenizer trained anew has other tokens than the teacher, whose distributions are over its own"
        problems.append(Problem("tokenizer.train", what, "leave tokenizer out: the teacher's own is taken"))
    elif model.is_dir():
        problems += _tokenizer_problems(run, model)
    return problems


def source_problems(run: RunConfig, known: Collection[str], taught: Sequence[str]) -> list[Problem]:
    """Sources of a kind that distillation knows (`known`), and the objective that `distill.on` names does not learn."""
    wrong = [source.yields for source in run.data.sources if source.yields in known and source.yields not in taught]
    if run.distill.on == "auto" or not wrong:
        return []
    what = f"{run.distill.on} learns from {taught[0]}, and the sources yield {wrong[0]}"
    return [Problem("distill.on", what, "write auto, which goes by the sources; or give other sources")]


def layout_problems(run: RunConfig) -> list[Problem]:
    """What needs the teacher in memory beside the student, or cannot have it there."""
    if run.distill.top_k is not None:
        if run.distill.hidden is None:
            return []
        what = "hidden states are not kept: the teacher must be in memory beside the student"
        return [Problem("distill.hidden", what, "write distill.top_k: null with it")]
    return [
        Problem(key, f"{what}, and with distill.top_k null the teacher needs it whole", "write 1, or a top_k")
        for key, size, what in (
            ("parallel.pipeline", run.parallel.pipeline, "no stage has the model"),
            ("parallel.context", run.parallel.context, "no process has the sequence"),
        )
        if size > 1
    ]


def _tokenizer_problems(run: RunConfig, model: Path) -> list[Problem]:
    """The student's own tokenizer, where the run names one that is here, held against the teacher's."""
    key, name = ("tokenizer.from", run.tokenizer.from_) if run.tokenizer.from_ else ("model.from", run.model.from_)
    if name is None or run.data.from_store or not Path(name).is_dir() or Path(name).resolve() == model.resolve():
        return []
    try:
        student, teacher = load_tokenizer(name, key), load_tokenizer(str(model), KEY)
    except InputError as error:
        return list(error.problems)
    return tokenizer_problems(student, teacher, key)


def tokenizer_problems(student: Tokenizer, teacher: Tokenizer, key: str) -> list[Problem]:
    """Why a teacher cannot teach a student: their tokens differ, and how."""
    if student.fingerprint == teacher.fingerprint:
        return []
    differs = _difference(student, teacher)
    fix = (
        "take the teacher's tokenizer (leave tokenizer and model.from out), or a teacher that has the student's; "
        "across tokenizers a student learns the teacher's texts: artel generate TEACHER --prompts FILE writes them"
    )
    return [Problem(key, f"the student's tokenizer is not the teacher's: {differs}", fix)]


def check_widths(teacher: PreTrainedConfig, student: PreTrainedConfig) -> None:
    """Raise InputError where the hidden states of two models cannot be compared."""
    widths = [config.get_text_config().hidden_size for config in (teacher, student)]
    if widths[0] != widths[1]:
        what = f"the teacher's hidden states have {widths[0]:,} numbers, the student's {widths[1]:,}"
        raise InputError.at("distill.hidden", what, "give the student the teacher's width, or leave hidden out")


def _difference(student: Tokenizer, teacher: Tokenizer) -> str:
    """In words, for people."""
    own, other = student.hf.get_vocab(), teacher.hf.get_vocab()
    moved = [token for token, number in own.items() if other.get(token, number) != number]
    missing = [(whose, sorted(set(one) - set(two), key=one.__getitem__)) for whose, one, two in
               (("the teacher lacks", own, other), ("the student lacks", other, own))]  # fmt: skip
    said = [f"{whose} {len(tokens):,} tokens ({_some(tokens)})" for whose, tokens in missing if tokens]
    if moved:
        numbers = f"{moved[0]!r} is {own[moved[0]]:,} and {other[moved[0]]:,}"
        said.append(f"{len(moved):,} tokens have other numbers ({numbers})")
    return "; ".join(said) or "they have the same tokens and cut texts otherwise"


def _some(tokens: list[str]) -> str:
    return ", ".join(map(repr, tokens[:_SHOWN])) + (" …" if len(tokens) > _SHOWN else "")
