"""Sources, cleaning, duplicates, split: raw text to documents, each accounted for. Knows no tokens."""

from artel.text.html import html_to_text
from artel.text.ledger import Ledger
from artel.text.near import NearDuplicates
from artel.text.pipeline import read_documents, source_fingerprint
from artel.text.records import (
    AnswerClass,
    Conversation,
    Document,
    Dropped,
    Message,
    Pair,
    Preference,
    Question,
    Record,
    Rejected,
)
from artel.text.sources import check_sources

__all__ = [
    "AnswerClass",
    "Conversation",
    "Document",
    "Dropped",
    "Ledger",
    "Message",
    "NearDuplicates",
    "Pair",
    "Preference",
    "Question",
    "Record",
    "Rejected",
    "check_sources",
    "html_to_text",
    "read_documents",
    "source_fingerprint",
]
