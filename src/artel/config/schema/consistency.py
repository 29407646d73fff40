"""Checks across several sections of a run file."""

from __future__ import annotations

from artel.config.schema.run import RunConfig
from artel.errors import Problem
from artel.registry import FORMATS, OBJECTIVES


def section_problems(run: RunConfig, *, knows_objective: bool = True) -> list[Problem]:
    """Return the conflicts between sections. Their `where` is a dotted key.

    `knows_objective`: False if the objective is invalid, so that the run has only the default one.
    """
    problems = _source_problems(run, knows_objective=knows_objective)
    return problems + _tokenizer_problems(run) + _auto_problems(run) + _lora_base_problems(run)


def _auto_problems(run: RunConfig) -> list[Problem]:
    """Return a problem if model.auto is set without a time budget."""
    if not run.model.auto or run.train.budget is not None:
        return []
    what = "is missing, but model.auto needs it (epochs, steps and tokens replace train.budget)"
    fix = "write train: {budget: 30min} instead of epochs, steps or tokens; or the model's sizes: model: {config: {…}}"
    return [Problem("train.budget", what, fix)]


def _lora_base_problems(run: RunConfig) -> list[Problem]:
    """Return the conflicts of model.lora.base with other keys that set the dtype of the base."""
    base = "auto" if run.model.lora is None else run.model.lora.base
    if base == "fp32" and run.train.weights == "bf16":
        what = "fp32 conflicts with train.weights: bf16, which stores all weights in bf16"
    elif base == "bf16" and run.train.precision == "fp8":
        what = "bf16 conflicts with train.precision: fp8, which multiplies copies of float32 weights"
    else:
        return []
    return [Problem("model.lora.base", what, "remove it")]


def _tokenizer_problems(run: RunConfig) -> list[Problem]:
    """Return the problems of a pretrained model with a newly trained tokenizer."""
    trains = run.tokenizer.train is not None
    pretrained = run.model.from_
    if trains and pretrained is not None and not run.tokenizer.replace:
        what = f"a newly trained tokenizer has other tokens than {pretrained}, whose embeddings would be lost"
        fix = "remove tokenizer (tokenizer.train=null) to use the model's own, or set tokenizer.replace: true"
        return [Problem("tokenizer.train", what, fix)]
    if run.tokenizer.replace and not (trains and pretrained is not None):
        what = "requires both tokenizer.train and model.from"
        return [Problem("tokenizer.replace", what, "remove it")]
    return []


def _source_problems(run: RunConfig, *, knows_objective: bool) -> list[Problem]:
    """Return a problem if there is no text, or problems of text that the objective cannot use."""
    if run.data.from_store:
        return []
    if not run.data.sources:
        return [Problem("data.sources", "the run has no text", "write data: {sources: [{path: texts/*.txt}]}")]
    kinds = [source.yields for source in run.data.sources]
    learned = OBJECTIVES[run.objective].learns_from
    problems = [
        Problem(
            f"data.sources.{index}",
            f"yields {kind}, but objective {run.objective} learns from {' or '.join(learned)}",
            _suggest_fix(kind, learned),
        )
        for index, kind in enumerate(kinds)
        if knows_objective and kind not in learned
    ]
    if not problems and len(set(kinds)) > 1:
        problems.append(
            Problem("data.sources", f"yield both {' and '.join(sorted(set(kinds)))}", "use sources of one kind")
        )
    return problems


def _suggest_fix(kind: str, learned: tuple[str, ...]) -> str:
    """Return a fix that lists the objectives for records of this kind and the formats for this objective."""
    objectives = [name for name in OBJECTIVES.names if kind in OBJECTIVES[name].learns_from]
    formats = [name for name in FORMATS.names if set(learned) & set(FORMATS[name].yields)]
    objective_fix = f"write objective: {' or '.join(objectives)}" if objectives else f"no objective learns from {kind}"
    return f"{objective_fix}; or use a source of another format: {', '.join(formats)}"
