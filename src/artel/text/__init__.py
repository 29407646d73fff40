"""Sources, cleaning, duplicates, split: raw text to documents, each accounted for. Knows no tokens."""

from artel.text.cleaning.html import html_to_text
from artel.text.ledger import Counts, Ledger, in_words
from artel.text.pipeline import Cleaned, check_text, clean_part, judge, more_documents, read_documents
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
from artel.text.sources import (
    Part,
    Reach,
    check_sets,
    check_sources,
    count_lines,
    parts_of,
    reaches_of,
    source_fingerprint,
    source_of,
)

__all__ = [
    "AnswerClass",
    "Cleaned",
    "Conversation",
    "Counts",
    "Document",
    "Dropped",
    "Ledger",
    "Message",
    "Pair",
    "Part",
    "Preference",
    "Question",
    "Reach",
    "Record",
    "Rejected",
    "check_sets",
    "check_sources",
    "check_text",
    "clean_part",
    "count_lines",
    "html_to_text",
    "in_words",
    "judge",
    "more_documents",
    "parts_of",
    "reaches_of",
    "read_documents",
    "source_fingerprint",
    "source_of",
]
