"""Sources, cleaning, duplicates, split: raw text to documents, each accounted for. Knows no tokens."""

from artel.text.html import html_to_text
from artel.text.ledger import Ledger
from artel.text.pipeline import read_documents, source_fingerprint
from artel.text.records import AnswerClass, Document, Dropped, Pair, Question, Record, Rejected
from artel.text.sources import check_sources

__all__ = [
    "AnswerClass",
    "Document",
    "Dropped",
    "Ledger",
    "Pair",
    "Question",
    "Record",
    "Rejected",
    "check_sources",
    "html_to_text",
    "read_documents",
    "source_fingerprint",
]
