"""Text generation: sampling, and engines that generate many answers concurrently.

`make` chooses an engine: `slots` on a CPU (with `slot_model`), `paged` on a GPU, or a sequential one. `write` turns its
tokens into text. `generate` continues one text without an engine. Import everything else from its module: preparing
text needs none of them, and importing PyTorch takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from artel.tokens.tokenizer.chat_template import TurnEnd


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    """The ids that a model continues, and the ends of its output."""

    ids: list[int]
    end: TurnEnd
    special_tokens: bool = False
    """True if special tokens are part of the output text."""
