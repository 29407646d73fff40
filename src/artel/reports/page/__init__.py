"""The report of one or more runs as one HTML page that needs no network."""

from artel.reports.page.language import LANGUAGES, Language
from artel.reports.page.page import Page, check_plotly

__all__ = ["LANGUAGES", "Language", "Page", "check_plotly"]
