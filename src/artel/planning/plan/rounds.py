"""Rounds in a plan: how many tokens the model writes in one, and the memory and time that this takes.

Before the first round, all answers are planned as long as `policy.new_tokens`. Once RUN/rollouts has a round, the
lengths of its answers are used, and the time that rewards took is that of RUN/metrics.jsonl.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.generation.answers import CONCURRENT_ANSWERS
from artel.generation.base import key_value_bytes
from artel.generation.make import planned_cache_bytes
from artel.host import usable_cores
from artel.integers import ceil_div
from artel.objectives.hooks import RoundSettings
from artel.objectives.rollouts import list_rounds, load_round
from artel.planning.operations import ATTENTION, MATMUL, MEMORY, VIEW, Operation
from artel.planning.performance import MeasuredCost
from artel.planning.plan.batches import PlannedData
from artel.planning.rates import Rates
from artel.training.answer_writer import MAX_REWARD_PROCESSES
from artel.training.run_folder import RunFolder

ANSWER_BYTES, REWARD_PROCESSES = "answers", "reward_processes"
_ANSWER_TOKEN_BYTES = 72
"""Memory of a token of an answer: its id and log-probability as objects of Python, each with its place in a list.
Measured with tracemalloc."""
_WRITTEN_TOKEN_BYTES = 160
"""Upper bound of the memory of a token while answers are written: also its JSON, and the sampler's count of it."""
_REWARD_PROCESS_BYTES = 54 * 2**20
"""Memory of a process that computes rewards, with a function that imports nothing. Measured: 54 MiB."""
_TOKEN_SECONDS, _LOGIT_SECONDS = 6.6e-5, 5e-9
"""Time to sample a token and to decode its text: a constant, plus a time for each logit. Measured on one core of a
Xeon: 69 µs with 400 logits, 100 with 8,000, 320 with 50,257."""
_METRICS_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """A round of answers."""

    settings: RoundSettings
    prompts: int
    context: int
    """Tokens of the longest prompt and answer."""
    prompt_length: float
    """Mean tokens of a prompt."""
    mean_length: float
    """Mean tokens of an answer."""
    max_length: int
    from_round: int | None
    """Number of the round that has these lengths; None if they are the maximum."""
    scoring_seconds: float | None
    """Time in which the newest round was scored. None before the first one."""

    @property
    def answers(self) -> int:
        return self.prompts * self.settings.answers

    @property
    def tokens(self) -> float:
        """Tokens of all answers."""
        return self.answers * self.mean_length

    @property
    def _max_tokens(self) -> int:
        return self.answers * self.settings.sampling.new_tokens

    def memory(self, model: PreTrainedModel, device: str, free: int) -> dict[str, int]:
        """Return the bytes that writing takes on a rank, in addition to the model and a forward pass.

        `model` is on the meta device.
        """
        engine = planned_cache_bytes(model, device, CONCURRENT_ANSWERS, self.context, free)
        return engine | {ANSWER_BYTES: self._max_tokens * _WRITTEN_TOKEN_BYTES}

    @property
    def resident_bytes(self) -> dict[str, int]:
        """Bytes that a rank holds all the time: the answers of the round, and the processes of rewards."""
        processes = min(MAX_REWARD_PROCESSES, usable_cores())
        return {
            ANSWER_BYTES: self._max_tokens * _ANSWER_TOKEN_BYTES,
            REWARD_PROCESSES: processes * _REWARD_PROCESS_BYTES,
        }

    def concurrent(self, ranks: int) -> int:
        """Return how many answers each of the ranks writes at a time."""
        return min(CONCURRENT_ANSWERS, ceil_div(self.prompts, ranks) * self.settings.answers)

    def writing_seconds(
        self,
        pass_operations: Mapping[Operation, int],
        model: PreTrainedModel,
        vocabulary: int,
        rates: Rates,
        ranks: int,
    ) -> float:
        """Return the time in which each of `ranks` ranks writes its answers, on this machine's processor.

        `pass_operations`: those of a forward pass that computes one token of `concurrent(ranks)` answers.
        """
        answers, rows = ceil_div(self.prompts, ranks) * self.settings.answers, self.concurrent(ranks)
        num_passes = max(self.max_length, answers * self.mean_length / rows)
        cost = MeasuredCost(rates)
        prompt_tokens = ceil_div(self.prompts, ranks) * self.prompt_length
        seconds = (num_passes + prompt_tokens / rows) * _pass_seconds(pass_operations, cost, rates)
        # Attention reads the keys and values of all texts, on average half of the answer and the prompt.
        cached_tokens = rows * (self.prompt_length + self.max_length / 2)
        seconds += num_passes * cost.seconds(_memory_operation(cached_tokens * key_value_bytes(model)))
        return seconds + answers * self.mean_length * (_TOKEN_SECONDS + _LOGIT_SECONDS * vocabulary)


def plan_round(config: RunConfig, data: PlannedData) -> PlannedRound | None:
    """Return the round of a run, or None if its objective has no round with rewards.

    Raise InputError if the newest round in RUN/rollouts is damaged.
    """
    settings = data.objective.rounds
    if settings is None or not settings.is_scored:
        return None
    folder, longest = RunFolder(Path(config.run)), settings.sampling.new_tokens
    mean_length, max_length, from_round = float(longest), longest, None
    numbers = list_rounds(folder.rollouts)
    if numbers and (rollouts := load_round(folder.rollouts, numbers[-1]).rollouts):
        from_round = numbers[-1]
        lengths = [min(longest, rollout.length) for rollout in rollouts]
        mean_length, max_length = sum(lengths) / len(lengths), max(lengths)
    prompt_lengths = data.prompt_lengths
    return PlannedRound(
        settings=settings,
        prompts=config.train.batch * settings.steps,
        context=int(prompt_lengths.max()) + longest,
        prompt_length=float(prompt_lengths.mean()),
        mean_length=mean_length,
        max_length=max_length,
        from_round=from_round,
        scoring_seconds=None if from_round is None else _read_scoring_seconds(folder.metrics),
    )


def _pass_seconds(operations: Mapping[Operation, int], cost: MeasuredCost, rates: Rates) -> float:
    """Return the time of a forward pass without its attention. With few rows, a matmul only reads its weights."""
    seconds, starts = 0.0, 0
    for operation, count in operations.items():
        starts += count
        if operation.kind in (ATTENTION, VIEW):
            continue
        longest = cost.seconds(operation)
        if operation.kind == MATMUL:
            longest = max(longest, cost.seconds(_memory_operation(operation.bytes)))
        seconds += count * longest
    return seconds + (rates.seconds("start", starts) if "start" in rates else 0.0)


def _memory_operation(num_bytes: float) -> Operation:
    return Operation(MEMORY, "aten.add", bytes=round(num_bytes))


def _read_scoring_seconds(metrics: Path) -> float | None:
    """Return the time of rewards in the newest line of metrics.jsonl that has one. None if none of the last has."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _METRICS_TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        if b'"seconds_scoring"' in line:
            try:
                return float(orjson.loads(line)["seconds_scoring"])
            except (ValueError, TypeError):  # a damaged line: `artel report` names it
                continue
    return None
