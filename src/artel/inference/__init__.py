"""Using a trained model: evaluate, generate, export, report."""

from artel.inference.chat import ChatSession, ChatSettings
from artel.inference.corpus import evaluate_on_corpus
from artel.inference.evaluate import EvaluationResult, evaluate
from artel.inference.export.export import Exported, export, export_for_deepspeed
from artel.inference.harness import run_tasks
from artel.inference.open import OpenedModel, open_model, open_untrained

__all__ = [
    "ChatSession",
    "ChatSettings",
    "EvaluationResult",
    "Exported",
    "OpenedModel",
    "evaluate",
    "evaluate_on_corpus",
    "export",
    "export_for_deepspeed",
    "open_model",
    "open_untrained",
    "run_tasks",
]
