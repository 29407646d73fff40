"""Text + tokenizer + objective to a token store, once for the same inputs."""

from artel.preparing.claim import check_claim
from artel.preparing.from_store import check_from_store
from artel.preparing.overlap import overlap_problems, refuse_overlaps
from artel.preparing.prepare import Prepared, check_texts, has_store, is_prepared, prepare, remember
from artel.preparing.run_tokenizer import tokenizer_name

__all__ = [
    "Prepared",
    "check_claim",
    "check_from_store",
    "check_texts",
    "has_store",
    "is_prepared",
    "overlap_problems",
    "prepare",
    "refuse_overlaps",
    "remember",
    "tokenizer_name",
]
