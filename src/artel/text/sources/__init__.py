"""Where text comes from: files, globs, folders, URLs; one small module a format."""

from artel.text.reading.lines import count_lines
from artel.text.reading.sets import check_sets
from artel.text.sources.find import all_sources, check_sources
from artel.text.sources.inputs import Part, all_inputs, cut_notes, inputs_of, parts_of, source_fingerprint, source_of
from artel.text.sources.reach import Reach, reaches_of
from artel.text.sources.read import read_part

__all__ = [
    "Part",
    "Reach",
    "all_inputs",
    "all_sources",
    "check_sets",
    "check_sources",
    "count_lines",
    "cut_notes",
    "inputs_of",
    "parts_of",
    "reaches_of",
    "read_part",
    "source_fingerprint",
    "source_of",
]
