"""Using a trained model: evaluate, generate, export, report."""

from artel.using.evaluate import Judged, evaluate
from artel.using.export import Exported, export, export_for_deepspeed
from artel.using.harness import run_tasks
from artel.using.open import Opened, open_model, open_untrained
from artel.using.talk import Talk, TalkSettings

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
