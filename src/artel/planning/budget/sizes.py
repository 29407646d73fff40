"""The models that are chosen from: one for each depth, in the shape of nanochat, whose width is 64 times its layers.

That is karpathy/nanochat (scripts/base_train.py; `nanochat` in transformers): rotary positions, norms without weights,
also of embeddings, queries and keys, squared ReLU, no biases, a head of its own. The bound on its logits is left out:
then artel computes head and loss together. Of the families that were tried it learned fastest
(benchmarks/budget_fits.md). Heads are 64 wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_HEAD = 64
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""The largest has 1.6 billion parameters in its layers."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model of one depth."""

    depth: int

    @property
    def width(self) -> int:
        return _HEAD * self.depth

    @property
    def layers(self) -> int:
        """Two at least: one layer alone cannot look up what followed a token before (Olsson et al. 2022)."""
        return max(2, self.depth)

    @property
    def layer_parameters(self) -> int:
        """Of the layers' matrices: neither embeddings nor the head."""
        return 12 * self.layers * self.width**2

    def parameters(self, vocabulary: int) -> int:
        """All of them."""
        return self.layer_parameters + 2 * vocabulary * self.width

    def flops_per_token(self, vocabulary: int, block: int) -> float:
        """FLOPs of training on a token (models/flops.py): products of layers and head, and causal attention."""
        return 6 * (self.layer_parameters + vocabulary * self.width) + 6 * self.layers * self.width * block

    def config(self) -> dict[str, Any]:
        """`model.config` of a run file."""
        return {
            "model_type": "nanochat",
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.depth,
            "num_key_value_heads": self.depth,
            "intermediate_size": 4 * self.width,
            "final_logit_softcapping": None,
        }
