"""The model card of a run, which the hub shows as the page of its model: README.md."""

from artel.reports.model_card.card import model_card
from artel.reports.model_card.published import Published

__all__ = ["Published", "model_card"]
