"""Checks across several sections of a run file."""

from __future__ import annotations

from artel.config.schema.run import RunConfig
from artel.errors import Problem
from artel.registry import FORMATS, OBJECTIVES


def section_problems(run: RunConfig, *, knows_objective: bool = True) -> list[Problem]:
    """Problems of sections that do not fit together; `where` is a dotted key.

    Without `knows_objective` the objective was written wrongly, and that of the run is only the default.
    """
    of_sources = _source_problems(run, knows_objective=knows_objective)
    return of_sources + _tokenizer_problems(run) + _auto_problems(run) + _base_problems(run)


def _auto_problems(run: RunConfig) -> list[Problem]:
    """A model that is chosen for a time, where no time is given."""
    if not run.model.auto or run.train.budget is not None:
        return []
    what = "is missing: model.auto needs a time limit (epochs, steps and tokens replace train.budget)"
    fix = "write train: {budget: 30min} instead of epochs, steps or tokens; or the model's sizes: model: {config: {…}}"
    return [Problem("train.budget", what, fix)]


def _base_problems(run: RunConfig) -> list[Problem]:
    """Conflicts of model.lora.base with other keys that set the dtype of the base."""
    base = "auto" if run.model.lora is None else run.model.lora.base
    if base == "fp32" and run.train.weights == "bf16":
        what = "fp32 beside train.weights: bf16, which holds all weights in bf16"
    elif base == "bf16" and run.train.precision == "fp8":
        what = "bf16 beside train.precision: fp8, which multiplies copies of float32 weights"
    else:
        return []
    return [Problem("model.lora.base", what, "remove it")]


def _tokenizer_problems(run: RunConfig) -> list[Problem]:
    """Problems of a pretrained model with another tokenizer than its own."""
    trains, pretrained = run.tokenizer.train is not None, run.model.from_
    if trains and pretrained is not None and not run.tokenizer.replace:
        what = f"a tokenizer trained anew has other tokens than {pretrained} knows, whose embeddings would be of no use"
        fix = "leave tokenizer out (tokenizer.train=null): the model's own is taken; or write tokenizer.replace: true"
        return [Problem("tokenizer.train", what, fix)]
    if run.tokenizer.replace and not (trains and pretrained is not None):
        what = "true has no meaning without both tokenizer.train and model.from"
        return [Problem("tokenizer.replace", what, "remove it")]
    return []


def _source_problems(run: RunConfig, *, knows_objective: bool) -> list[Problem]:
    """Missing text, or text of a kind that the objective cannot use."""
    if run.data.from_store:
        return []
    if not run.data.sources:
        return [Problem("data.sources", "the run names no text", "write data: {sources: [{path: texts/*.txt}]}")]
    kinds = [source.yields for source in run.data.sources]
    learned = OBJECTIVES[run.objective].learns_from
    problems = [
        Problem(
            f"data.sources.{number}",
            f"yields {kind}, and objective {run.objective} learns from {' or '.join(learned)}",
            _remedy(kind, learned),
        )
        for number, kind in enumerate(kinds)
        if knows_objective and kind not in learned
    ]
    if not problems and len(set(kinds)) > 1:
        problems.append(Problem("data.sources", f"yield both {' and '.join(sorted(set(kinds)))}", "keep to one kind"))
    return problems


def _remedy(kind: str, learned: tuple[str, ...]) -> str:
    """The objectives that learn from records of this kind, and the formats whose records this objective takes."""
    objectives = [name for name in OBJECTIVES.names if kind in OBJECTIVES[name].learns_from]
    formats = [name for name in FORMATS.names if set(learned) & set(FORMATS[name].yields)]
    fitting = f"write objective: {' or '.join(objectives)}" if objectives else f"no objective learns from {kind}"
    return f"{fitting}; or give a source of another format: {', '.join(formats)}"
