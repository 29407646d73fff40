"""Using a trained model: evaluate, generate, report."""

from artel.using.evaluate import Judged, evaluate
from artel.using.harness import run_tasks
from artel.using.open import Opened, open_model, open_untrained

__all__ = ["Judged", "Opened", "evaluate", "open_model", "open_untrained", "run_tasks"]
