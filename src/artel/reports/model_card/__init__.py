"""The model card of a run: README.md, which the hub shows as the model's page."""

from artel.reports.model_card.card import model_card
from artel.reports.model_card.metadata import MAIN, PublishedModel

__all__ = ["MAIN", "PublishedModel", "model_card"]
