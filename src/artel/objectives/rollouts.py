"""The file of a round: every answer with its ids, their log-probabilities and its rewards.

`RUN/rollouts/000012.jsonl.zst` has a line of JSON per answer. The policy learns from it, people read the answers in it,
and it records which prompts were used, and when. It is written when the round is complete. zstd's checksum protects it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from artel.errors import InputError
from artel.storage import write_file

MIN_SPREAD = 1e-8
"""Rewards of a group that differ by less are equal: sums of the same terms in another order differ by rounding."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A text as the model read and wrote it: a prompt, then replies and the messages between them."""

    prompt_ids: list[int]
    ids: list[int]
    """Token ids after the prompt."""
    log_probs: list[float | None]
    """Log-probability of each of `ids` under the policy that wrote it, in nats. None: the model did not write it."""
    engine_log_probs: list[float] = field(default_factory=list)
    """With `policy.engine`: the server's log-probabilities of the ids that it wrote."""

    def with_log_probs(self, written: list[float]) -> Segment:
        """Return a copy with the log-probabilities of the model in training; the current ones are the engine's."""
        values = iter(written)
        log_probs = [None if log_prob is None else next(values) for log_prob in self.log_probs]
        return Segment(self.prompt_ids, self.ids, log_probs, self.written)

    @property
    def written(self) -> list[float]:
        """The log-probabilities of the ids that the model wrote."""
        return [log_prob for log_prob in self.log_probs if log_prob is not None]


@dataclass(frozen=True, slots=True)
class Rollout:
    """An answer of a round."""

    number: int
    """Running number of its prompt in the run: step x batch + position in the batch."""
    index: int
    """Index of its prompt in the training split."""
    epoch: int
    answer: int
    """Index among the answers to its prompt."""
    attempt: int
    """Number of times that the answers to this prompt were replaced because they had no signal."""
    seed: int
    prompt_ids: list[int]
    ids: list[int]
    """Token ids of the answer, including end tokens that the model wrote. In an answer with several replies, also those
    of the messages between them."""
    log_probs: list[float | None]
    """Log-probability of each id under the policy that wrote it, in nats. None: the model did not write it."""
    text: str
    """The last reply."""
    cut_off: bool
    """True if it reached the maximum length."""
    rewards: dict[str, float | None]
    """Unweighted reward of each function. None: no reward for this answer."""
    reward: float | None
    """Weighted sum of the rewards; None if there are none."""
    failures: dict[str, str]
    """The reason of each function that failed on this answer."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Replies, results of tools and messages of the environment; empty without tools and environment."""
    prompt: str = ""
    """Text of `prompt_ids`, for people."""
    engine_log_probs: list[float] = field(default_factory=list)
    """With `policy.engine`: the server's log-probabilities of the ids that it wrote. `log_probs` are then computed by
    the model in training."""
    restarts: list[Segment] = field(default_factory=list)
    """The rest of the answer, if the chat template does not continue the earlier ids: each segment has a new prompt."""

    @classmethod
    def from_json(cls, line: bytes) -> Rollout:
        """Return the rollout in a line of a file. Raise ValueError or TypeError if it is not one."""
        fields = orjson.loads(line)
        return cls(**fields | {"restarts": [Segment(**segment) for segment in fields.get("restarts", [])]})

    @property
    def segments(self) -> list[Segment]:
        """The answer as the model read and wrote it: one segment, or several if there are `restarts`."""
        first = Segment(self.prompt_ids, self.ids, self.log_probs, self.engine_log_probs)
        return [first, *self.restarts] if self.ids else self.restarts or [first]

    @property
    def written(self) -> list[float]:
        """The log-probabilities of the ids that the model wrote, in all segments."""
        return [log_prob for segment in self.segments for log_prob in segment.written]

    @property
    def engine_written(self) -> list[float]:
        """The server's log-probabilities, in all segments; empty without a server."""
        return [log_prob for segment in self.segments for log_prob in segment.engine_log_probs]

    @property
    def length(self) -> int:
        """Number of tokens that the model wrote."""
        return len(self.written)


@dataclass(frozen=True, slots=True)
class Round:
    """All answers of a round, in the order of prompts and answers."""

    number: int
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> np.ndarray:
        """Rewards, float64 (prompts, answers). NaN: no reward."""
        rewards = [math.nan if rollout.reward is None else rollout.reward for rollout in self.rollouts]
        answers = 1 + max(rollout.answer for rollout in self.rollouts)
        return np.array(rewards).reshape(-1, answers)

    def groups(self) -> dict[tuple[int, int], list[Rollout]]:
        """Return the answers to each prompt, by (index, epoch)."""
        groups = defaultdict(list)
        for rollout in self.rollouts:
            groups[rollout.index, rollout.epoch].append(rollout)
        return dict(groups)

    def write(self, folder: Path) -> None:
        """Write the round's file atomically."""
        lines = b"".join(orjson.dumps(asdict(rollout)) + b"\n" for rollout in self.rollouts)
        write_file(round_file(folder, self.number), zstandard.ZstdCompressor(write_checksum=True).compress(lines))


def round_file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.jsonl.zst"


def list_rounds(folder: Path) -> list[int]:
    """Return the numbers of the rounds that are written, in order."""
    names = (re.fullmatch(r"(\d{6,})\.jsonl\.zst", file.name) for file in folder.glob("*.zst"))
    return sorted(int(name[1]) for name in names if name)


def load_round(folder: Path, number: int) -> Round:
    """Return a round that is written. Raise InputError if its file is damaged, OSError if it cannot be read."""
    file = round_file(folder, number)
    try:
        lines = zstandard.ZstdDecompressor().decompress(file.read_bytes(), allow_extra_data=False).splitlines()
        return Round(number, tuple(map(Rollout.from_json, lines)))
    except (zstandard.ZstdError, ValueError, TypeError) as error:
        raise InputError.at(str(file), f"is damaged: {error}", "restore a copy of it") from None


def read_round(folder: Path, number: int, prompts: Mapping[int, Sequence[int]]) -> Round | None:
    """Return a round, or None if it is not written yet. Raise InputError if its file is damaged or from another run.

    `prompts`: the token ids of its prompts by running number, in order.
    """
    file = round_file(folder, number)
    if not file.is_file():
        return None
    round_ = load_round(folder, number)
    rollouts = round_.rollouts
    if [(rollout.number, rollout.prompt_ids) for rollout in rollouts if rollout.answer == 0] != list(prompts.items()):
        what = "has other prompts than this run has in this round"
        raise InputError.at(str(file), what, "restore the file that this run has written, or start over with --restart")
    return round_
