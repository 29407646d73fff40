"""Objectives: record to samples, batch to loss, totals to metrics.

An objective is imported on first use: a run loads only its own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from artel.config import RunConfig
from artel.objectives.base import Objective
from artel.objectives.types import Batch, DocumentSamples, Reply
from artel.registry import OBJECTIVES
from artel.tokens import Tokenizer

if TYPE_CHECKING:
    from artel.objectives.causal import Causal
    from artel.objectives.chat import Chat
    from artel.objectives.insertion_tagging import InsertionTagging
    from artel.objectives.masked import Masked
    from artel.objectives.preference import PreferenceOptimization
    from artel.objectives.span_qa.span_qa_objective import SpanQA
    from artel.objectives.tokens.tokens_objective import Tokens

_MODULES = {
    "Causal": "causal",
    "Chat": "chat",
    "InsertionTagging": "insertion_tagging",
    "Masked": "masked",
    "PreferenceOptimization": "preference",
    "SpanQA": "span_qa.span_qa_objective",
    "Tokens": "tokens.tokens_objective",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def objective_type(config: RunConfig) -> type[Objective]:
    """Return the class of a run's objective."""
    objective: type[Objective] = OBJECTIVES[config.objective].for_run(config)
    return objective


def splits_by_label(config: RunConfig) -> bool:
    """True if validation holds out a fraction of the texts per label."""
    return config.data.may_split_by_label and objective_type(config).has_classes(config)


def build_objective(config: RunConfig, tokenizer: Tokenizer) -> Objective:
    """Return the run's objective with its tokenizer. Raise InputError if they do not fit each other."""
    return objective_type(config)(config, tokenizer)


__all__ = [
    "Batch",
    "Causal",
    "Chat",
    "DocumentSamples",
    "InsertionTagging",
    "Masked",
    "Objective",
    "PreferenceOptimization",
    "Reply",
    "SpanQA",
    "Tokens",
    "build_objective",
    "objective_type",
    "splits_by_label",
]
