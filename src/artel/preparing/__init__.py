"""Preparing: text, tokenizer and objective become a token store, once for the same inputs."""

from artel.preparing.overlap import overlap_problems, refuse_overlaps
from artel.preparing.prepare import (
    Prepared,
    check_sources_and_outputs,
    has_store,
    is_prepared,
    prepare,
    prepare_silently,
    remember,
    settled,
)
from artel.preparing.record_decisions import with_recorded_values
from artel.preparing.run_mark import check_claim
from artel.preparing.run_tokenizer import tokenizer_name, tokenizer_place
from artel.preparing.stores import check_from_store

__all__ = [
    "Prepared",
    "check_claim",
    "check_from_store",
    "check_sources_and_outputs",
    "has_store",
    "is_prepared",
    "overlap_problems",
    "prepare",
    "prepare_silently",
    "refuse_overlaps",
    "remember",
    "settled",
    "tokenizer_name",
    "tokenizer_place",
    "with_recorded_values",
]
