"""A run whose model is still to be chosen: what that does not go with, and the run with a size in its place."""

from __future__ import annotations

from artel.config import ModelConfig, RunConfig
from artel.errors import Problem
from artel.objectives import objective_type
from artel.planning.budget.fits import read_fits
from artel.planning.budget.sizes import DEPTHS, Size


def auto_problems(run: RunConfig) -> list[Problem]:
    """What `model.auto` does not go with."""
    kind, problems = objective_type(run), []
    if not (kind.packs_text and kind.generates):
        what = f"true chooses among models that write text, and objective {run.objective} needs another"
        problems.append(Problem("model.auto", what, "write model: {config: {model_type: …}}, or model: {from: FOLDER}"))
    if run.parallel.deepspeed is not None:
        what = "true chooses what a DeepSpeed configuration says too"
        problems.append(Problem("model.auto", what, "leave parallel.deepspeed out, or give the model's sizes"))
    for key in ("tensor", "pipeline", "context"):
        if getattr(run.parallel, key) > 1:
            what = "which heads and layers there are to share is known only when model.auto has chosen"
            fix = "leave it out, parallel.data: fsdp shares weights too; or give the model's sizes"
            problems.append(Problem(f"parallel.{key}", what, fix))
    given, measured = run.train.model_fields_set, read_fits().rates
    if "optimizer" in given and run.train.optimizer not in measured and "learning_rate" not in given:
        what = f"no learning rate can be chosen for {run.train.optimizer}: it was not measured"
        problems.append(Problem("train.learning_rate", what, f"write one, or train.optimizer: {' or '.join(measured)}"))
    return problems


def smallest(run: RunConfig) -> RunConfig:
    """The run with the smallest model, for checks before its text is known."""
    return with_model(run, Size(DEPTHS[0]))


def with_model(run: RunConfig, size: Size) -> RunConfig:
    """The run with a model of that size in place of `model.auto`."""
    model = ModelConfig.model_validate({**run.model.model_dump(by_alias=True), "auto": False, "config": size.config()})
    return run.model_copy(update={"model": model})
