"""The section of a run file for learning from rewards, and the loss presets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field, model_validator

from artel.config import Count, Number, RewardTerm, Section
from artel.config.schema.quantities import Bytes, Length, Seconds
from artel.config.schema.rewards import REWARD_BYTES, REWARD_SECONDS

if TYPE_CHECKING:
    import torch

Advantage = Literal["mean", "deviation", "leave_one_out"]
Ratio = Literal["token", "sequence", "product"]
Divisor = Literal["tokens", "answers", "longest"]
Preset = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
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
    kl: float = 0.0
    new_tokens: int = 1

    def targets(self, *, tokens: _Sum, answers: _Sum) -> _Sum:
        """Return the loss denominator, which adds up over micro-batches. Pass the counts of learned answers only."""
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
}
"""The loss of each paper:

- `grpo`: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300.
- `dr_grpo`: Liu et al. 2025 (Understanding R1-Zero-Like Training), arXiv:2503.20783.
- `dapo`: Yu et al. 2025, arXiv:2503.14476. `resample` is the limit of verl's recipe; the paper has none.
- `gspo`: Zheng et al. 2025, arXiv:2507.18071.
- `cispo`: Chen et al. 2025 (MiniMax-M1), arXiv:2506.13585: no lower bound. Upper bound 5 = 1 + 4 of Khatri et al. 2025
  (ScaleRL), arXiv:2510.13786, as MiniMax published none.
- `rloo`: Ahmadian et al. 2024 (Back to Basics), arXiv:2402.14740: an answer is one action. The clipping is TRL's.
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
        default=REWARD_SECONDS, gt=0, description="Time limit of a reward function for an answer."
    )
    reward_memory: Bytes = Field(
        default=REWARD_BYTES, gt=0, description="Memory limit of a process that computes rewards."
    )
    preset: Preset = Field(default="dr_grpo", description="Loss of that name. The keys that are null follow it.")
    answers: Count = Field(default=8, ge=2, description="Answers per prompt. Their rewards are compared.")
    steps: Count = Field(default=1, ge=1, description="Optimizer steps per round, each over a part of its answers.")
    new_tokens: Length = Field(default=256, description="Maximum length of an answer in tokens.")
    temperature: Number = Field(default=1.0, gt=0, description="Sampling temperature of the answers.")
    top_p: Number = Field(
        default=1.0, gt=0, le=1, description="Sample from the most likely tokens whose probabilities add up to this."
    )
    top_k: Count = Field(default=0, ge=0, description="Sample from this many most likely tokens; 0 for all.")
    advantage: Advantage | None = Field(
        default=None,
        description="Advantage of an answer. mean: its reward minus the mean of its prompt's answers; deviation: also "
        "divided by their standard deviation; leave_one_out: its reward minus the mean of the other answers.",
    )
    ratio: Ratio | None = Field(
        default=None,
        description="Probability under the new policy divided by that under the old one. token: of each token; "
        "sequence: geometric mean over the answer's tokens; product: of the answer.",
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

    def resolve(self) -> PolicySettings:
        """Return the loss settings: those of the preset, except for keys that are set."""
        names = [field.name for field in fields(PolicySettings) if field.name in type(self).model_fields]
        values = {name: getattr(self, name) for name in names}
        return replace(PRESETS[self.preset], **{name: value for name, value in values.items() if value is not None})

    @property
    def penalty_tokens(self) -> int:
        """Number of final tokens over which `overlong: punish` raises the penalty from 0 to 1."""
        return self.overlong_tokens or max(1, self.new_tokens // 5)
