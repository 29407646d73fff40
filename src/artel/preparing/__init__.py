"""Text + tokenizer + objective to a token store, once for the same inputs."""

from artel.preparing.overlap import overlap_problems, refuse_overlaps
from artel.preparing.prepare import Prepared, check_texts, prepare, remember

__all__ = ["Prepared", "check_texts", "overlap_problems", "prepare", "refuse_overlaps", "remember"]
