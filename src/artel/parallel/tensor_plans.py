"""Tensor-parallel plans: how each layer of a model is split.

transformers has a plan for most decoders (`base_model_tp_plan`). The table here covers architectures without one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from torch import nn
from transformers import PreTrainedModel


class Split(Enum):
    """Split of one layer. Columns of a matrix compute its outputs, rows take its inputs."""

    COLUMNS = "columns"
    """Each process computes some outputs from all inputs."""
    GATHERED_COLUMNS = "gathered columns"
    """Columns whose outputs are gathered, because the next layer needs all of them."""
    ROWS = "rows"
    """Each process computes a summand of the outputs from its own shard of the inputs."""
    ROWS_OF_FULL_INPUT = "rows of full input"
    """Rows whose inputs are complete on each process."""
    FUSED = "fused"
    """Several concatenated matrices, each split by columns."""
    SUMMED = "summed"
    """Replicated, but each process sees some of the heads: the gradient is the sum over processes."""
    EXPERTS = "experts"
    """A mixture of experts: each process computes some of the experts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Splits of a model's layers, by their names in the model."""

    splits: dict[str, Split] = field(default_factory=dict)
    fused_counts: dict[str, int] = field(default_factory=dict)
    """Fused layers -> number of matrices in each."""
    divided: tuple[tuple[str, str], ...] = ()
    """(module, attribute) of numbers in the model's code that must be divided by the number of processes."""
    unknown: tuple[str, ...] = ()
    """Styles in transformers' plan that artel does not know."""


_STYLES = {
    "colwise": Split.COLUMNS,
    "rowwise": Split.ROWS,
    "colwise_gather_output": Split.GATHERED_COLUMNS,
    "colwise_rep": Split.GATHERED_COLUMNS,
    "rowwise_split_input": Split.ROWS_OF_FULL_INPUT,
    "rowwise_rep": Split.ROWS_OF_FULL_INPUT,
    "packed_colwise": Split.FUSED,
    "replicated_with_grad_allreduce": Split.SUMMED,
    "moe_tp_experts": Split.EXPERTS,
}
_REPLICATED = {"replicate", "embedding_rowwise"}  # embeddings are always split by vocabulary, whatever the plan says
_FUSED_MATRICES = 2  # gate and up


@dataclass(frozen=True, slots=True)
class _ArchitecturePlan:
    splits: dict[str, Split]
    fused_counts: dict[str, int] = field(default_factory=dict)
    divided: tuple[tuple[str, str], ...] = ()


_BERT = _ArchitecturePlan(
    {
        "encoder.layer.*.attention.self.query": Split.COLUMNS,
        "encoder.layer.*.attention.self.key": Split.COLUMNS,
        "encoder.layer.*.attention.self.value": Split.COLUMNS,
        "encoder.layer.*.attention.output.dense": Split.ROWS,
        "encoder.layer.*.intermediate.dense": Split.COLUMNS,
        "encoder.layer.*.output.dense": Split.ROWS,
    }
)
# By model type. Names are relative to the base model. `*` matches the index of a layer.
_TABLE = {
    "gpt2": _ArchitecturePlan(
        {
            "h.*.attn.c_attn": Split.FUSED,
            "h.*.attn.c_proj": Split.ROWS,
            "h.*.mlp.c_fc": Split.COLUMNS,
            "h.*.mlp.c_proj": Split.ROWS,
        },
        fused_counts={"h.*.attn.c_attn": 3},  # queries, keys, values
        divided=(("h.*.attn", "split_size"),),
    ),
    "opt": _ArchitecturePlan(
        {
            "decoder.layers.*.self_attn.q_proj": Split.COLUMNS,
            "decoder.layers.*.self_attn.k_proj": Split.COLUMNS,
            "decoder.layers.*.self_attn.v_proj": Split.COLUMNS,
            "decoder.layers.*.self_attn.out_proj": Split.ROWS,
            "decoder.layers.*.fc1": Split.COLUMNS,
            "decoder.layers.*.fc2": Split.ROWS,
        },
        divided=(("decoder.layers.*.self_attn", "num_heads"),),
    ),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _BERT),
}


def read_plan(model: PreTrainedModel) -> Plan:
    """Return the plan of a model, which may be on the meta device. No splits if its architecture has no plan."""
    entry = _TABLE.get(model.config.model_type)
    modules = dict(model.named_modules())
    if entry is None:
        return _transformers_plan(model, modules)
    base_names = {id(module): name for name, module in model.base_model.named_modules()}
    patterns = {name: wildcards(base_names[id(module)]) for name, module in modules.items() if id(module) in base_names}
    splits = {name: entry.splits[pattern] for name, pattern in patterns.items() if pattern in entry.splits}
    counts = {name: entry.fused_counts[pattern] for name, pattern in patterns.items() if pattern in entry.fused_counts}
    divided = tuple(
        (name, key) for name, pattern in patterns.items() for target, key in entry.divided if pattern == target
    )
    return Plan(splits, counts, divided)


def _transformers_plan(model: PreTrainedModel, modules: dict[str, nn.Module]) -> Plan:
    styles = dict(model._tp_plan or {})
    splits: dict[str, Split] = {}
    unknown = set()
    for name, module in modules.items():
        style = styles.get(wildcards(name))
        if style is None or style in _REPLICATED or module is model.get_output_embeddings():
            continue
        if style in _STYLES:
            splits[name] = _STYLES[style]
        else:
            unknown.add(style)
    counts = {name: _FUSED_MATRICES for name, split in splits.items() if split is Split.FUSED}
    return Plan(splits, counts, unknown=tuple(sorted(unknown)))


def wildcards(name: str) -> str:
    """Replace indices in a name: `layers.0.mlp` -> `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
