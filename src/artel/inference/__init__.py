"""Using a trained model: evaluate, generate, export, report."""

from artel.inference.chat import Talk, TalkSettings
from artel.inference.evaluate import Judged, evaluate
from artel.inference.export.export import Exported, export, export_for_deepspeed
from artel.inference.harness import run_tasks
from artel.inference.open import Opened, open_model, open_untrained

__all__ = [
    "Exported",
    "Judged",
    "Opened",
    "Talk",
    "TalkSettings",
    "evaluate",
    "export",
    "export_for_deepspeed",
    "open_model",
    "open_untrained",
    "run_tasks",
]
