"""Decodes samples to text, either as the model reads them or as the token store holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from artel.config import RunConfig
from artel.models import IGNORED
from artel.objectives import build_objective
from artel.objectives.conversation.template_check import learned_turns
from artel.objectives.types import TokenView
from artel.printable import escape_lines
from artel.tokens import StoreSplit, Tokenizer, TokenStore, micro_batches


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Consecutive tokens of one kind, as text."""

    text: str
    is_learned: bool
    """True if the tokens have targets."""
    target: str = ""
    """The targets if they differ from the input: the word under a mask, the label of a name."""

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "learned": self.is_learned} | ({"target": self.target} if self.target else {})


@dataclass(frozen=True, slots=True)
class SampleText:
    """A sample as text, in spans."""

    index: int
    origin: str
    num_tokens: int
    num_learned: int
    """Number of tokens with a target."""
    spans: list[TextSpan]
    name: str = ""
    """The view of the sample: chosen, rejected, the class of an answer."""
    turns: list[tuple[int, str]] | None = None
    """The learned turns of a conversation: (tokens, its end, "" if the end is not learned)."""
    goal: str = ""
    """The target of the sample as a whole, if no token is predicted."""

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"number": self.index, "origin": self.origin, "tokens": self.num_tokens}
        if self.turns is not None:
            turns = [{"tokens": num_tokens, "end": end or None} for num_tokens, end in self.turns]
            data |= {"learned": self.num_learned, "turns": turns}
        data |= {key: value for key, value in (("name", self.name), ("goal", self.goal)) if value}
        return {**data, "pieces": [span.to_json() for span in self.spans]}

    def describe_learned(self) -> str:
        """Describe the learned tokens, with the turns of a conversation and their ends; or the goal."""
        if self.goal:
            return f"{self.num_tokens:,} tokens, learned: {self.goal}"
        summary = f"{self.num_tokens:,} tokens, {self.num_learned:,} of them learned"
        if not self.turns:
            return summary
        ends = sorted({escape_lines(end) for _, end in self.turns if end})
        turn_count = "1 turn" if len(self.turns) == 1 else f"{len(self.turns):,} turns"
        num_without_end = sum(not end for _, end in self.turns)
        description = f"each with its end {' or '.join(ends)}" if ends and not num_without_end else ""
        if num_without_end:
            description = (
                "without the end of a turn" if not ends else f"{num_without_end:,} without the end {' or '.join(ends)}"
            )
        return f"{summary}: {turn_count}, {description.removeprefix('each ') if len(self.turns) == 1 else description}"


def stored_sample_text(split: StoreSplit, index: int, tokenizer: Tokenizer) -> SampleText:
    """Return sample `index` of a split, as it is stored."""
    ids = split.sample(index).ids
    return _sample_text(TokenView(ids, np.full(len(ids), IGNORED)), index, [split.origin(index)], tokenizer)


class SampleViews:
    """The samples of a run as the model reads them in the first epoch."""

    def __init__(self, config: RunConfig, store: TokenStore, split: StoreSplit, tokenizer: Tokenizer) -> None:
        self._objective = build_objective(config, tokenizer)
        self._samples = self._objective.dataset(split)
        self._tokenizer = tokenizer
        self._ends = self._objective.decoding.turn_end()
        self._epoch = 0 if split is store.train else -1

    def __len__(self) -> int:
        return len(self._samples)

    def views(self, sample_index: int) -> Iterator[SampleText]:
        """Yield the views of a sample: one, or one for each answer."""
        indices, epochs = np.array([sample_index]), np.array([self._epoch])
        (rows,) = micro_batches(self._samples, indices, epochs, rank=0, world_size=1, batch_size=1, max_rows=1)
        token_views, origins = self._objective.token_views(rows), self._samples.origins(sample_index)
        # Samples that share a block have one view and one origin each.
        has_own_origin = len(token_views) == len(origins)
        for view_index, view in enumerate(token_views):
            view_origins = [origins[view_index]] if has_own_origin else origins
            sample_text = _sample_text(view, sample_index, view_origins, self._tokenizer)
            if self._ends is not None:
                turns = learned_turns(view.ids, view.targets != IGNORED, self._ends, self._tokenizer)
                sample_text = replace(sample_text, turns=turns)
            yield sample_text


def _sample_text(view: TokenView, index: int, origins: list[str], tokenizer: Tokenizer) -> SampleText:
    suffix = f" and {len(origins) - 1} more" if len(origins) > 1 else ""
    ids, targets = view.ids.tolist(), view.targets.tolist()
    num_learned = sum(target != IGNORED for target in targets)
    if view.labels is not None:
        labeled = groupby(zip(ids, view.labels, strict=True), key=lambda pair: pair[1])
        spans = [
            TextSpan(tokenizer.decode([token for token, _ in group]), bool(label), label) for label, group in labeled
        ]
        return SampleText(index, f"{origins[0]}{suffix}", len(ids), num_learned, spans, view.name)
    # Decode tokens of a kind at once: a character may be several tokens.
    kinds = groupby(
        zip(ids, targets, strict=True), key=lambda pair: "" if pair[1] == IGNORED else ("=", ">")[pair[0] != pair[1]]
    )
    spans = []
    for kind, group in kinds:
        input_ids, target_ids = zip(*group, strict=True)
        target = tokenizer.decode(target_ids) if kind == ">" else ""
        spans.append(TextSpan(tokenizer.decode(input_ids), bool(kind), target))
    return SampleText(index, f"{origins[0]}{suffix}", len(ids), num_learned, spans, view.name, goal=view.goal)
