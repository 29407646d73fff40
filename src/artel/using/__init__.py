"""Using a trained model: generate, report."""

from artel.using.open import Opened, open_model, open_untrained

__all__ = ["Opened", "open_model", "open_untrained"]
