"""Which of a model's layers are split over processes that share each matrix, and how: transformers' plan, or our table.

transformers says it of most decoders (`base_model_tp_plan`). The table is for architectures it says nothing of.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from torch import nn
from transformers import PreTrainedModel


class Cut(Enum):
    """How a layer is split. A matrix is spoken of as the one that outputs are a product with: columns make outputs."""

    COLUMNS = "columns"
    """Each process computes some of the outputs, from all inputs."""
    GATHERED = "gathered"
    """The same, and outputs are gathered: what follows needs them all."""
    ROWS = "rows"
    """Each process computes a summand of the outputs, from the inputs that it has computed itself."""
    CHOSEN = "chosen"
    """The same, from inputs that each process has all of."""
    FUSED = "fused"
    """Several matrices lie side by side in one, and each of them is split by columns."""
    SUMMED = "summed"
    """Whole, but each process sees some of the heads: its gradient is the sum over processes."""
    EXPERTS = "experts"
    """A mixture of experts: each process computes some of the experts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model's layers are split, by their names in the model."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    """Of fused layers: how many matrices lie in them."""
    divided: tuple[tuple[str, str], ...] = ()
    """Numbers that the model's code keeps for itself and that each process has a share of: module, attribute."""
    unknown: tuple[str, ...] = ()
    """What transformers' plan asks for and is not known here."""


_STYLES = {
    "colwise": Cut.COLUMNS,
    "rowwise": Cut.ROWS,
    "colwise_gather_output": Cut.GATHERED,
    "colwise_rep": Cut.GATHERED,
    "rowwise_split_input": Cut.CHOSEN,
    "rowwise_rep": Cut.CHOSEN,
    "packed_colwise": Cut.FUSED,
    "replicated_with_grad_allreduce": Cut.SUMMED,
    "moe_tp_experts": Cut.EXPERTS,
}
_WHOLE = {"replicate", "embedding_rowwise"}  # embeddings are split by vocabulary, whatever the plan says of them
_PACKED = 2  # gate and up


@dataclass(frozen=True, slots=True)
class _Entry:
    cuts: dict[str, Cut]
    parts: dict[str, int] = field(default_factory=dict)
    divided: tuple[tuple[str, str], ...] = ()


_BERT = _Entry(
    {
        "encoder.layer.*.attention.self.query": Cut.COLUMNS,
        "encoder.layer.*.attention.self.key": Cut.COLUMNS,
        "encoder.layer.*.attention.self.value": Cut.COLUMNS,
        "encoder.layer.*.attention.output.dense": Cut.ROWS,
        "encoder.layer.*.intermediate.dense": Cut.COLUMNS,
        "encoder.layer.*.output.dense": Cut.ROWS,
    }
)
# By model type; names from the body of the model on, `*` for the number of a layer.
_TABLE = {
    "gpt2": _Entry(
        {
            "h.*.attn.c_attn": Cut.FUSED,
            "h.*.attn.c_proj": Cut.ROWS,
            "h.*.mlp.c_fc": Cut.COLUMNS,
            "h.*.mlp.c_proj": Cut.ROWS,
        },
        parts={"h.*.attn.c_attn": 3},  # queries, keys, values
        divided=(("h.*.attn", "split_size"),),
    ),
    "opt": _Entry(
        {
            "decoder.layers.*.self_attn.q_proj": Cut.COLUMNS,
            "decoder.layers.*.self_attn.k_proj": Cut.COLUMNS,
            "decoder.layers.*.self_attn.v_proj": Cut.COLUMNS,
            "decoder.layers.*.self_attn.out_proj": Cut.ROWS,
            "decoder.layers.*.fc1": Cut.COLUMNS,
            "decoder.layers.*.fc2": Cut.ROWS,
        },
        divided=(("decoder.layers.*.self_attn", "num_heads"),),
    ),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _BERT),
}


def read_plan(model: PreTrainedModel) -> Plan:
    """The plan of a model, which may be on the meta device; without cuts where there is none for its architecture."""
    entry = _TABLE.get(model.config.model_type)
    modules = dict(model.named_modules())
    if entry is None:
        return _of_transformers(model, modules)
    inside = {id(module): name for name, module in model.base_model.named_modules()}
    generic = {name: wildcards(inside[id(module)]) for name, module in modules.items() if id(module) in inside}
    cuts = {name: entry.cuts[known] for name, known in generic.items() if known in entry.cuts}
    parts = {name: entry.parts[known] for name, known in generic.items() if known in entry.parts}
    divided = tuple((name, key) for name, known in generic.items() for where, key in entry.divided if known == where)
    return Plan(cuts, parts, divided)


def _of_transformers(model: PreTrainedModel, modules: dict[str, nn.Module]) -> Plan:
    styles = dict(model._tp_plan or {})
    cuts: dict[str, Cut] = {}
    unknown = set()
    for name, module in modules.items():
        style = styles.get(wildcards(name))
        if style is None or style in _WHOLE or module is model.get_output_embeddings():
            continue
        if style in _STYLES:
            cuts[name] = _STYLES[style]
        else:
            unknown.add(style)
    parts = {name: _PACKED for name, cut in cuts.items() if cut is Cut.FUSED}
    return Plan(cuts, parts, unknown=tuple(sorted(unknown)))


def wildcards(name: str) -> str:
    """`layers.0.mlp` -> `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
