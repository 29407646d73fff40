"""Preparation: build a token store from text, a tokenizer and an objective, once for the same inputs."""

from artel.preparing.overlap import check_overlaps, overlap_problems
from artel.preparing.prepare import (
    PreparedText,
    check_sources_and_outputs,
    has_store,
    is_prepared,
    prepare,
    prepare_silently,
    record_prepared,
    resolve_from_records,
)
from artel.preparing.record_decisions import with_recorded_values
from artel.preparing.run_mark import check_claim
from artel.preparing.run_tokenizer import tokenizer_location, tokenizer_name
from artel.preparing.stores import check_from_store

__all__ = [
    "PreparedText",
    "check_claim",
    "check_from_store",
    "check_overlaps",
    "check_sources_and_outputs",
    "has_store",
    "is_prepared",
    "overlap_problems",
    "prepare",
    "prepare_silently",
    "record_prepared",
    "resolve_from_records",
    "tokenizer_location",
    "tokenizer_name",
    "with_recorded_values",
]
