"""Checks of the teacher that a run file names, before any text is read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.tokens import Tokenizer, load_tokenizer
from artel.tokens.tokenizer.token_texts import token_texts

KEY = "distill.teacher"
_MAX_LISTED_TOKENS = 3


def teacher_model(config: RunConfig) -> str:
    """Return the folder or hub id of the teacher's model; for a run, its folder `model`."""
    name = config.distill.teacher or ""
    return str(Path(name, "model")) if Path(name, "config.yaml").is_file() else name


def teacher_problems(config: RunConfig) -> list[Problem]:
    """Return the problems of the teacher, and of settings that do not fit it."""
    distill = config.distill
    if distill.teacher is None:
        fix = "set distill: {teacher: FOLDER}, a finished run, a model folder or a hub id"
        return [Problem(KEY, "is required", fix)]
    if config.run and Path(config.run, "teacher.json").is_file():
        return []  # the teacher's outputs are cached in the run
    problems = []
    model = Path(teacher_model(config))
    if Path(distill.teacher, "config.yaml").is_file() and not model.is_dir():
        what = f"{distill.teacher} is a run that has not finished training"
        problems.append(Problem(KEY, what, f"train it first: artel train {distill.teacher}"))
    elif distill.teacher.startswith((".", "/", "~")) and not model.is_dir():
        problems.append(Problem(KEY, f"there is no folder {distill.teacher}", "use a run, a model folder or a hub id"))
    elif config.tokenizer.train is not None and distill.tokenizer == "same":
        what = "a newly trained tokenizer has a different vocabulary than the teacher"
        fix = "remove tokenizer to use the teacher's, or set distill.tokenizer: by_text"
        problems.append(Problem("tokenizer.train", what, fix))
    elif model.is_dir():
        problems += _tokenizer_problems(config, model)
    return problems


def source_problems(config: RunConfig, known: Collection[str], taught: Sequence[str]) -> list[Problem]:
    """Return a problem if sources have a `known` kind of records that the objective `distill.on` does not learn."""
    wrong = [source.yields for source in config.data.sources if source.yields in known and source.yields not in taught]
    if config.distill.on == "auto" or not wrong:
        return []
    what = f"{config.distill.on} needs {taught[0]}, but the sources contain {wrong[0]}"
    return [Problem("distill.on", what, "set auto to infer it from the sources, or change the sources")]


def layout_problems(config: RunConfig) -> list[Problem]:
    """Return problems of settings that need the teacher in memory, or cannot have it there."""
    if config.distill.top_k is not None:
        if config.distill.hidden is None or config.distill.tokenizer == "by_text":
            return []
        what = "hidden states are not cached: the teacher must be in memory with the student"
        return [Problem("distill.hidden", what, "set distill.top_k: null, too")]
    return [
        Problem(
            key,
            f"must be 1 while distill.top_k is null: the teacher needs the full {what}",
            "set it to 1, or set distill.top_k",
        )
        for key, size, what in (
            ("parallel.pipeline", config.parallel.pipeline, "model"),
            ("parallel.context", config.parallel.context, "sequence"),
        )
        if size > 1
    ]


def on_policy_problems(config: RunConfig, *, has_prompts: bool) -> list[Problem]:
    """Return problems of settings under which the student cannot write answers. `has_prompts`: conversations have."""
    distill, chat = config.distill, config.chat
    if not distill.on_policy:
        return []
    problems = []
    if not has_prompts:
        what = "texts have no prompts that the student could answer"
        problems.append(Problem("distill.on_policy", what, "use conversations, or write 0"))
    if distill.tokenizer == "by_text":
        what = "by_text needs cached outputs, but the student's answers are new in each step"
        problems.append(Problem("distill.tokenizer", what, "write same, or distill.on_policy: 0"))
    elif distill.top_k is not None:
        what = f"{distill.top_k} caches outputs before training, but the student's answers are new in each step"
        problems.append(Problem("distill.top_k", what, "write null, or distill.on_policy: 0"))
    if has_prompts and chat.train_on == "all":
        what = "all also learns the prompts, but with distill.on_policy the student writes answers only"
        problems.append(Problem("chat.train_on", what, "write assistant"))
    if has_prompts and chat.too_long == "truncate_left":
        what = "a truncated conversation may have lost the prompt that the student answers"
        problems.append(Problem("chat.too_long", what, "write skip or split"))
    return problems


def by_text_problems(config: RunConfig) -> list[Problem]:
    """Return problems of settings that a teacher with another tokenizer does not support."""
    distill = config.distill
    if distill.tokenizer == "same":
        return []
    problems = []
    if distill.on == "masked":
        what = "masked hides the student's tokens, which a teacher with another tokenizer does not have"
        problems.append(Problem("distill.on", what, "set distill.tokenizer: same, or distill.on: causal or chat"))
    elif distill.top_k is None:
        what = "null runs the teacher in training, but distill.tokenizer: by_text needs cached outputs"
        problems.append(Problem("distill.top_k", what, "set it to 64, or set distill.tokenizer: same"))
    if distill.hidden is not None:
        what = "hidden states of other tokens cannot be compared"
        problems.append(Problem("distill.hidden", what, "remove it, or set distill.tokenizer: same"))
    if config.tokenizer.train is not None and config.tokenizer.train.pattern == "whitespace":
        what = "with whitespace, tokens cannot be joined back to the text, but distill.tokenizer: by_text requires that"
        problems.append(Problem("tokenizer.train.pattern", what, "set gpt2 or gpt4"))
    return problems


def _tokenizer_problems(config: RunConfig, model: Path) -> list[Problem]:
    """Compare the student's tokenizer, if it is in a folder here, with the teacher's."""
    key, name = (
        ("tokenizer.from", config.tokenizer.from_) if config.tokenizer.from_ else ("model.from", config.model.from_)
    )
    if config.distill.tokenizer == "by_text":
        tokenizers = [(KEY, str(model)), *([(key, name)] if name is not None and Path(name).is_dir() else [])]
        return [problem for key, name in tokenizers for problem in _text_problems(key, name)]
    if name is None or config.data.from_store or not Path(name).is_dir() or Path(name).resolve() == model.resolve():
        return []
    try:
        student, teacher = load_tokenizer(name, key), load_tokenizer(str(model), KEY)
    except InputError as error:
        return list(error.problems)
    return tokenizer_problems(student, teacher, key)


def _text_problems(key: str, name: str) -> list[Problem]:
    """Return the problems of a tokenizer whose tokens cannot be compared by their text."""
    try:
        token_texts(load_tokenizer(name, key), key)
    except InputError as error:
        return list(error.problems)
    return []


def tokenizer_problems(student: Tokenizer, teacher: Tokenizer, key: str) -> list[Problem]:
    """Return a problem that describes how the tokens of teacher and student differ; [] if they are the same."""
    if student.fingerprint == teacher.fingerprint:
        return []
    difference = _describe_difference(student, teacher)
    fix = (
        "use the teacher's tokenizer (remove tokenizer and model.from), or a teacher with the student's tokenizer; or "
        "set distill.tokenizer: by_text, which trains on tokens that both have; or let the student learn the "
        "teacher's texts: artel generate TEACHER --prompts FILE writes them"
    )
    return [Problem(key, f"the student's tokenizer is not the teacher's: {difference}", fix)]


def _describe_difference(student: Tokenizer, teacher: Tokenizer) -> str:
    """Describe the difference between two vocabularies."""
    student_ids, teacher_ids = student.hf.get_vocab(), teacher.hf.get_vocab()
    moved = [token for token, token_id in student_ids.items() if teacher_ids.get(token, token_id) != token_id]
    directions = (("the teacher lacks", student_ids, teacher_ids), ("the student lacks", teacher_ids, student_ids))
    missing = [(what, sorted(set(owner) - set(other), key=owner.__getitem__)) for what, owner, other in directions]
    clauses = [f"{what} {len(tokens):,} tokens ({_list_tokens(tokens)})" for what, tokens in missing if tokens]
    if moved:
        example = f"{moved[0]!r} is {student_ids[moved[0]]:,} and {teacher_ids[moved[0]]:,}"
        clauses.append(f"{len(moved):,} tokens have different ids ({example})")
    return "; ".join(clauses) or "they have the same vocabulary, but split texts differently"


def _list_tokens(tokens: list[str]) -> str:
    return ", ".join(map(repr, tokens[:_MAX_LISTED_TOKENS])) + (" …" if len(tokens) > _MAX_LISTED_TOKENS else "")
