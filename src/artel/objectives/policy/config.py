"""The section of a run file for learning from rewards, and the loss presets."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from artel.config import Count, Number, RewardTerm, Section
from artel.config.schema.engine import EngineConfig
from artel.config.schema.quantities import Bytes, Length, Seconds
from artel.config.schema.rewards import REWARD_BYTES, REWARD_SECONDS
from artel.rewards.function import check_name

if TYPE_CHECKING:
    import torch

Advantage = Literal["mean", "deviation", "leave_one_out", "best"]
Ratio = Literal["token", "sequence", "product", "none"]
Divisor = Literal["tokens", "answers", "longest"]
Preset = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "raft", "online_dpo"]
_Sum = TypeVar("_Sum", int, "torch.Tensor")


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Loss settings, all resolved. Fields have the names of the keys of `PolicyConfig`."""

    advantage: Advantage
    ratio: Ratio
    clip_low: float
    clip_high: float
    divide_by: Divisor
    resample: int = 0
    clips_weight: bool = False
    """True: the clipped ratio weights the log-probability and has no gradient (CISPO). False: the loss is clipped, and
    the gradient flows through the ratio (PPO). Not a key of the run file."""
    learns_pairs: bool = False
    """True: DPO's loss of the best and the worst answer of each prompt. Advantage, ratio, bounds and divisor do not
    apply. Not a key of the run file."""
    beta: float = 0.0
    kl: float = 0.0
    new_tokens: int = 1

    @property
    def learned_answers(self) -> int | None:
        """Number of answers to a prompt that are learned if their rewards differ; None if all are."""
        if self.learns_pairs:
            return 2
        return 1 if self.advantage == "best" else None

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with the model before training."""
        return self.learns_pairs or self.kl > 0

    def targets(self, *, tokens: _Sum, answers: _Sum) -> _Sum:
        """Return the loss denominator, which adds up over micro-batches. Pass the counts of learned answers only."""
        if self.learns_pairs:
            return answers // 2
        if self.divide_by == "tokens":
            return tokens
        return answers if self.divide_by == "answers" else answers * self.new_tokens


PRESETS: dict[Preset, PolicySettings] = {
    #                         advantage        ratio       low   high  divide_by
    "grpo": PolicySettings("deviation", "token", 0.2, 0.2, "answers"),
    "dr_grpo": PolicySettings("mean", "token", 0.2, 0.2, "longest"),
    "dapo": PolicySettings("deviation", "token", 0.2, 0.28, "tokens", resample=10),
    "gspo": PolicySettings("deviation", "sequence", 3e-4, 4e-4, "answers"),
    "cispo": PolicySettings("deviation", "token", 1.0, 4.0, "tokens", clips_weight=True),
    "rloo": PolicySettings("leave_one_out", "product", 0.2, 0.2, "answers"),
    "raft": PolicySettings("best", "none", 1.0, math.inf, "tokens"),
    "online_dpo": PolicySettings("best", "none", 1.0, math.inf, "answers", learns_pairs=True, beta=0.1),
}
"""The loss of each paper:

- `grpo`: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300.
- `dr_grpo`: Liu et al. 2025 (Understanding R1-Zero-Like Training), arXiv:2503.20783.
- `dapo`: Yu et al. 2025, arXiv:2503.14476. `resample` is the limit of verl's recipe; the paper has none.
- `gspo`: Zheng et al. 2025, arXiv:2507.18071.
- `cispo`: Chen et al. 2025 (MiniMax-M1), arXiv:2506.13585: no lower bound. Upper bound 5 = 1 + 4 of Khatri et al. 2025
  (ScaleRL), arXiv:2510.13786, as MiniMax published none.
- `rloo`: Ahmadian et al. 2024 (Back to Basics), arXiv:2402.14740: an answer is one action. The clipping is TRL's.
- `raft`: Dong et al. 2023, arXiv:2304.06767: cross-entropy of the best answer to each prompt (best of N); of equal
  ones, the first. The paper also learns an answer if all rewards are equal. Here such a prompt teaches nothing, since
  its best answer would be random.
- `online_dpo`: Guo et al. 2024, arXiv:2402.04792: DPO on the best and the worst answer to each prompt. `beta` is TRL's.
"""


class PolicyConfig(Section):
    """Answers of a round, and the loss."""

    form: Literal["auto", "text", "conversation"] = Field(
        default="auto", description="Form of the prompts: plain texts to continue, or conversations; auto: by the data."
    )
    rewards: list[RewardTerm] = Field(
        default=[], description="What scores an answer: the sum of these rewards, each times its weight."
    )
    reward_timeout: Seconds = Field(
        default=REWARD_SECONDS,
        gt=0,
        description="Time limit of a reward function for an answer, of a tool, and of an environment's step.",
    )
    reward_memory: Bytes = Field(
        default=REWARD_BYTES, gt=0, description="Memory limit of a process that runs rewards, tools and environments."
    )
    tools: str | None = Field(
        default=None, description="Python file with functions that the model may call in its answers."
    )
    environment: str | None = Field(
        default=None,
        description="Your class that answers each reply of the model: FILE.py:CLASS or MODULE:CLASS, with "
        "reset(row), step(reply) and optionally reward().",
    )
    turns: Count | None = Field(
        default=None,
        ge=1,
        description="Maximum number of replies in an answer, with tools or an environment (null: 5).",
    )
    preset: Preset = Field(default="dr_grpo", description="Loss of that name. The keys that are null follow it.")
    answers: Count = Field(default=8, ge=2, description="Answers per prompt. Their rewards are compared.")
    steps: Count = Field(default=1, ge=1, description="Optimizer steps per round, each over a part of its answers.")
    new_tokens: Length = Field(
        default=256, description="Maximum length of an answer in tokens, with the results of tools in it."
    )
    temperature: Number = Field(default=1.0, gt=0, description="Sampling temperature of the answers.")
    top_p: Number = Field(
        default=1.0, gt=0, le=1, description="Sample from the most likely tokens whose probabilities add up to this."
    )
    top_k: Count = Field(default=0, ge=0, description="Sample from this many most likely tokens; 0 for all.")
    engine: EngineConfig | None = Field(
        default=None, description="Server that writes the answers (null: the training processes do)."
    )
    advantage: Advantage | None = Field(
        default=None,
        description="Advantage of an answer. mean: its reward minus the mean of its prompt's answers; deviation: also "
        "divided by their standard deviation; leave_one_out: its reward minus the mean of the other answers; best: 1 "
        "for the best answer to a prompt, and no other is learned.",
    )
    ratio: Ratio | None = Field(
        default=None,
        description="Probability under the new policy divided by that under the old one. token: of each token; "
        "sequence: geometric mean over the answer's tokens; product: of the answer; none: the loss is the "
        "log-probability of each token times the advantage.",
    )
    clip_low: Number | None = Field(
        default=None, gt=0, le=1, description="The ratio is clipped below 1 - clip_low; 1.0: no lower bound."
    )
    clip_high: Number | None = Field(default=None, gt=0, description="The ratio is clipped above 1 + clip_high.")
    divide_by: Divisor | None = Field(
        default=None,
        description="Denominator of the loss. tokens: the tokens of the global batch; answers: the mean over answers "
        "of the mean over their tokens; longest: answers times new_tokens.",
    )
    resample: Count | None = Field(
        default=None,
        ge=0,
        description="Maximum number of times that a prompt's answers are written anew because all have the same reward "
        "(dapo: 10, other presets: 0).",
    )
    beta: Number | None = Field(
        default=None, gt=0, description="online_dpo: weight of the log-ratios to the model before training (0.1)."
    )
    kl: Number = Field(
        default=0.0, ge=0, description="Weight of the KL divergence from the model before training (k3 estimator)."
    )
    overlong: Literal["cut", "mask", "punish"] = Field(
        default="cut",
        description="Answers that reach new_tokens. cut: learn from them like from others; mask: do not learn from "
        "them; punish: lower the rewards of long answers (DAPO), by up to 1.",
    )
    overlong_tokens: Length | None = Field(
        default=None,
        description="punish: the penalty grows over the last this many of new_tokens (null: a fifth of new_tokens).",
    )

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, name: str | None) -> str | None:
        return None if name is None else check_name(name, "class")

    @model_validator(mode="after")
    def _check_overlong(self) -> PolicyConfig:
        if self.overlong_tokens is None:
            return self
        if self.overlong != "punish":
            raise ValueError(f"overlong: {self.overlong} has no overlong_tokens; remove it or write overlong: punish")
        if self.overlong_tokens > self.new_tokens:
            raise ValueError(
                f"overlong_tokens {self.overlong_tokens:,} is over new_tokens {self.new_tokens:,}; "
                f"write e.g. {max(1, self.new_tokens // 5):,}"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> PolicyConfig:
        """Refuse a temperature at which the log-probabilities of the server are those of another distribution."""
        if self.engine is not None and self.temperature != 1:
            raise ValueError(
                f"a server gives log-probabilities at temperature 1, but temperature is {self.temperature:g}; "
                "write temperature: 1, or remove engine"
            )
        return self

    @model_validator(mode="after")
    def _check_loss_keys(self) -> PolicyConfig:
        """Refuse keys that the loss does not have."""
        settings = self.resolve()
        absent = [] if settings.learns_pairs else ["beta"]
        if settings.learns_pairs:
            absent = ["advantage", "ratio", "clip_low", "clip_high", "divide_by", "kl"]
        elif settings.ratio == "none":
            absent += ["clip_low", "clip_high"]
        if written := [name for name in absent if getattr(self, name)]:
            loss = self.preset if settings.learns_pairs or settings.ratio != "none" else "ratio: none"
            verb, pronoun = ("has", "it") if len(written) == 1 else ("have", "them")
            raise ValueError(f"{', '.join(written)} {verb} no effect with {loss}; remove {pronoun}")
        return self

    def resolve(self) -> PolicySettings:
        """Return the loss settings: those of the preset, except for keys that are set."""
        names = [field.name for field in fields(PolicySettings) if field.name in type(self).model_fields]
        values = {name: getattr(self, name) for name in names}
        return replace(PRESETS[self.preset], **{name: value for name, value in values.items() if value is not None})

    @property
    def has_turns(self) -> bool:
        """True if an answer may have several replies."""
        return self.tools is not None or self.environment is not None

    def overlong_penalty(self, length: int) -> float:
        """Return the penalty that `overlong: punish` adds to a reward: 0 to -1 (DAPO, equation 13).

        `length`: tokens of the answer, at most `new_tokens`. The penalty grows over the last `overlong_tokens` of them.
        """
        last = self.overlong_tokens or max(1, self.new_tokens // 5)
        return max(-1.0, min(0.0, (self.new_tokens - last - length) / last))
