"""Text + tokenizer + objective to a token store, once for the same inputs."""

from artel.preparing.claim import check_claim
from artel.preparing.from_store import check_from_store
from artel.preparing.overlap import overlap_problems, refuse_overlaps
from artel.preparing.prepare import Prepared, check_texts, has_store, is_prepared, prepare, remember, settled
from artel.preparing.run_tokenizer import tokenizer_name, tokenizer_place
from artel.preparing.settle import as_begun

__all__ = [
    "Prepared",
    "as_begun",
    "check_claim",
    "check_from_store",
    "check_texts",
    "has_store",
    "is_prepared",
    "overlap_problems",
    "prepare",
    "refuse_overlaps",
    "remember",
    "settled",
    "tokenizer_name",
    "tokenizer_place",
]
