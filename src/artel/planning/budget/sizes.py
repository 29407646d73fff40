"""Models that `model: {auto: true}` chooses from: one per depth, like nanochat, with a width of 64 times the depth.

The architecture is karpathy/nanochat's (scripts/base_train.py; `nanochat` in transformers): rotary positions,
norms without weights, also of embeddings, queries and keys, squared ReLU, no biases, an untied head. The cap on its
logits is omitted, so that artel can compute head and loss together. It learned fastest of the tried families
(benchmarks/budget_fits.md). Heads are 64 wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from artel.config import ModelConfig, RunConfig
from artel.errors import Problem
from artel.objectives import objective_type
from artel.planning.budget.fits import read_fits

_HEAD = 64
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""The largest has 1.6 billion parameters in its layers."""


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of the model with a given depth."""

    depth: int

    @property
    def width(self) -> int:
        return _HEAD * self.depth

    @property
    def layers(self) -> int:
        """At least two: a single layer cannot find what followed a token earlier (Olsson et al. 2022)."""
        return max(2, self.depth)

    @property
    def layer_parameters(self) -> int:
        """Parameters in the layers' matrices, without embeddings and head."""
        return 12 * self.layers * self.width**2

    def parameters(self, vocabulary: int) -> int:
        """Return the number of all parameters."""
        return self.layer_parameters + 2 * vocabulary * self.width

    def flops_per_token(self, vocabulary: int, block: int) -> float:
        """Return the training FLOPs per token (models/flops.py): matmuls of layers and head, and causal attention."""
        return 6 * (self.layer_parameters + vocabulary * self.width) + 6 * self.layers * self.width * block

    def config(self) -> dict[str, Any]:
        """Return the `model.config` of a run file."""
        return {
            "model_type": "nanochat",
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.depth,
            "num_key_value_heads": self.depth,
            "intermediate_size": 4 * self.width,
            "final_logit_softcapping": None,
        }


def auto_problems(config: RunConfig) -> list[Problem]:
    """Return a problem for each setting that cannot be combined with `model.auto`."""
    objective_class = objective_type(config)
    problems = []
    if not (objective_class.packs_text and objective_class.generates):
        what = f"true chooses among causal models, but objective {config.objective} needs another architecture"
        problems.append(Problem("model.auto", what, "write model: {config: {model_type: …}}, or model: {from: FOLDER}"))
    if config.parallel.deepspeed is not None:
        what = "true also chooses what a DeepSpeed configuration sets"
        problems.append(Problem("model.auto", what, "remove parallel.deepspeed, or set the model's sizes"))
    for key in ("tensor", "pipeline", "context"):
        if getattr(config.parallel, key) > 1:
            what = "cannot be combined with model.auto, which chooses the number of heads and layers"
            fix = "remove it (parallel.data: fsdp shards weights too), or set the model's sizes"
            problems.append(Problem(f"parallel.{key}", what, fix))
    user_keys = config.train.model_fields_set
    rates = read_fits().rates
    if "optimizer" in user_keys and config.train.optimizer not in rates and "learning_rate" not in user_keys:
        what = f"must be set: learning rates of {config.train.optimizer} were not measured"
        problems.append(Problem("train.learning_rate", what, f"set it, or train.optimizer: {' or '.join(rates)}"))
    return problems


def with_smallest_model(config: RunConfig) -> RunConfig:
    """Return the run with the smallest model, to check it before its text is known."""
    return with_model_size(config, Size(DEPTHS[0]))


def with_model_size(config: RunConfig, size: Size) -> RunConfig:
    """Return the run with a model of this size in place of `model.auto`."""
    values = {**config.model.model_dump(by_alias=True), "auto": False, "config": size.config()}
    model = ModelConfig.model_validate(values)
    return config.model_copy(update={"model": model})
