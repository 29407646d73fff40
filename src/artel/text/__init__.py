"""Turn raw text into documents: sources, formats, cleaning, deduplication, split, and a ledger of all documents."""

from artel.text.cleaning.html import html_to_text
from artel.text.decontamination import BenchmarkIndex, write_index
from artel.text.formats.text import frame_notes
from artel.text.ledger import Counts, Ledger, count_drops, describe_drops
from artel.text.pipeline import (
    CleanedRecord,
    check_ledger,
    check_text,
    clean_shard,
    read_documents,
    suggest_more_documents,
)
from artel.text.reading.lines import count_lines
from artel.text.reading.subsets import check_sets
from artel.text.records import (
    AnswerClass,
    ContaminatedDocument,
    Conversation,
    Document,
    DroppedRecord,
    LabeledText,
    Match,
    Message,
    Pair,
    Preference,
    Prompt,
    Question,
    Record,
    Rejected,
    TaggedText,
    ToolCall,
    Tools,
)
from artel.text.sources.find import check_sources, unread_files, unread_notes
from artel.text.sources.inputs import (
    InputShard,
    SourcePath,
    cut_notes,
    find_source,
    input_shards,
    list_all_inputs,
    source_fingerprint,
    source_paths,
)

__all__ = [
    "AnswerClass",
    "BenchmarkIndex",
    "CleanedRecord",
    "ContaminatedDocument",
    "Conversation",
    "Counts",
    "Document",
    "DroppedRecord",
    "InputShard",
    "LabeledText",
    "Ledger",
    "Match",
    "Message",
    "Pair",
    "Preference",
    "Prompt",
    "Question",
    "Record",
    "Rejected",
    "SourcePath",
    "TaggedText",
    "ToolCall",
    "Tools",
    "check_ledger",
    "check_sets",
    "check_sources",
    "check_text",
    "clean_shard",
    "count_drops",
    "count_lines",
    "cut_notes",
    "describe_drops",
    "find_source",
    "frame_notes",
    "html_to_text",
    "input_shards",
    "list_all_inputs",
    "read_documents",
    "source_fingerprint",
    "source_paths",
    "suggest_more_documents",
    "unread_files",
    "unread_notes",
    "write_index",
]
