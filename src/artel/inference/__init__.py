"""Use a trained model: evaluate, chat, generate, serve, export, push."""

from artel.inference.benchmark_tasks import run_tasks
from artel.inference.chat import ChatSession, ChatSettings
from artel.inference.evaluate import EvaluationResult, evaluate
from artel.inference.export.export import ExportedModel, export, export_for_deepspeed
from artel.inference.open import OpenedModel, open_model, open_untrained
from artel.inference.retrieval import evaluate_on_corpus

__all__ = [
    "ChatSession",
    "ChatSettings",
    "EvaluationResult",
    "ExportedModel",
    "OpenedModel",
    "evaluate",
    "evaluate_on_corpus",
    "export",
    "export_for_deepspeed",
    "open_model",
    "open_untrained",
    "run_tasks",
]
