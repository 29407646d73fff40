"""What is learned: record to samples, batch to loss, and the figures that judge the model."""

from artel.config import RunConfig
from artel.objectives.base import Batch, Made, Objective
from artel.objectives.causal import Causal
from artel.objectives.chat import Chat
from artel.objectives.filling import Filled, fill_masks
from artel.objectives.masked import Masked
from artel.objectives.preference import Preferring
from artel.objectives.restoring import Restoring
from artel.objectives.span_qa import SpanQA
from artel.tokens import Tokenizer


def objective_type(run: RunConfig) -> type[Objective]:
    """The objective that a run names; a masked model on pairs restores what they lack."""
    if run.objective == "masked" and any(source.yields == "pairs" for source in run.data.sources):
        return Restoring
    kinds: dict[str, type[Objective]] = {
        "causal": Causal, "masked": Masked, "span_qa": SpanQA, "chat": Chat, "preference": Preferring
    }  # fmt: skip
    return kinds[run.objective]


def objective_of(run: RunConfig, tokenizer: Tokenizer) -> Objective:
    """The run's objective with its tokenizer. Raises InputError when they do not go together."""
    return objective_type(run)(run, tokenizer)


__all__ = [
    "Batch",
    "Causal",
    "Chat",
    "Filled",
    "Made",
    "Masked",
    "Objective",
    "Preferring",
    "Restoring",
    "SpanQA",
    "fill_masks",
    "objective_of",
    "objective_type",
]
