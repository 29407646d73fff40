"""Text + tokenizer + objective to a token store, once for the same inputs."""

from artel.preparing.claim import (
    check_claim,
    check_model_is_artels,
    check_there,
    claim,
    foreign_in_model,
    identity,
    note_model,
)
from artel.preparing.overlap import overlap_problems, refuse_overlaps
from artel.preparing.prepare import Prepared, check_from_store, check_texts, has_store, prepare, remember
from artel.preparing.run_tokenizer import tokenizer_name

__all__ = [
    "Prepared",
    "check_claim",
    "check_from_store",
    "check_model_is_artels",
    "check_texts",
    "check_there",
    "claim",
    "foreign_in_model",
    "has_store",
    "identity",
    "note_model",
    "overlap_problems",
    "prepare",
    "refuse_overlaps",
    "remember",
    "tokenizer_name",
]
