"""Speeds that others published beside what `artel plan` computes: writes benchmarks/plan_published_speed.md.

    python benchmarks/plan_published_speed.py [--out FILE]

Nothing is measured here. What the table of accelerators gives for a run stands beside what torchtitan and nanotron
measured. A step of one process is traced with two and with four layers of its share of the model, and drawn out to all
of them. What processes exchange is added by arithmetic: FSDP gathers each layer twice in bf16 and reduces its gradients
in float32; tensor parallelism reduces activations four times a layer.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import TrainConfig
from artel.models import loss
from artel.models.activation_checkpointing import Recompute, recompute
from artel.models.attention_switch import use_artel_attention
from artel.models.compile import _COMPILED, repeated_layers
from artel.models.loading.heads import model_class
from artel.models.output_head import trust_output_head
from artel.parallel.base import local_norm
from artel.planning.hardware import find_hardware
from artel.planning.operations import COLLECTIVE, PRODUCT, Operation, OperationRecorder
from artel.planning.performance import StepTime, extended, pipeline_bubble, step_time
from artel.training.optim.optimizer import Optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    options.out.write_text(page(list(published())))


class Trace(NamedTuple):
    passes: dict[Operation, int]
    optimizer: dict[Operation, int]
    parameters: int
    of_a_layer: int


def traced(config: dict[str, Any], shape: tuple[int, int], *, compiled: bool, recomputed: Recompute = "none") -> Trace:
    """The operations of one step of one process."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    described = CONFIG_MAPPING[config["model_type"]](use_cache=False, **values)
    with torch.device("meta"):
        model = model_class(described, "AutoModelForCausalLM", {})._from_config(described)
    use_artel_attention(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        trust_output_head(model)  # `output_head` compares numbers, of which there are none
        if compiled:
            _COMPILED.add(model)
        recompute(model, recomputed)
        model.train()
        ids = torch.zeros(shape, dtype=torch.int64)
        optimizer = Optimizer(model, TrainConfig())
        for _ in range(2):  # the first makes the optimizer's state
            with OperationRecorder(model, compiled=compiled, on_gpu=True) as passes:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    summed, _ = loss.model_losses(model, {"input_ids": ids}, ids)
                summed.backward()
            with OperationRecorder(model, on_gpu=True) as step:
                norm = local_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
                optimizer.step(1.0, norm)
    layer = sum(parameter.numel() for parameter in repeated_layers(model)[0].parameters())
    return Trace(passes.operations, step.operations, sum(p.numel() for p in model.parameters()), layer)


def drawn_out(config: dict[str, Any], layers: int, shape: tuple[int, int], **options: Any) -> Trace:
    """The same for `layers` layers, from two and four of them."""
    two, four = (traced(config | {"num_hidden_layers": count}, shape, **options) for count in (2, 4))
    times = (layers - 4) / 2
    parameters = round(four.parameters + times * (four.parameters - two.parameters))
    passes, optimizer = extended(two.passes, four.passes, times), extended(two.optimizer, four.optimizer, times)
    return Trace(passes, optimizer, parameters, four.of_a_layer)


def collective(name: str, size: int, ranks: range) -> Operation:
    return Operation(COLLECTIVE, name, bytes=size, ranks=tuple(ranks))


class Published(NamedTuple):
    name: str
    tokens_per_second: float
    """Of a GPU, as published."""
    step: StepTime
    tokens: int
    """Of a step and a GPU."""

    @property
    def predicted(self) -> float:
        return self.tokens / self.step.seconds.mid

    @property
    def error(self) -> float:
        return self.tokens_per_second / self.predicted - 1


LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192}  # fmt: skip
# The sweep's files name it "1B": the shape of Llama 3.2 1B is assumed.
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128_256}  # fmt: skip


def published() -> Iterator[Published]:
    """What torchtitan and nanotron measured (tokens/s of a GPU), beside what the table of accelerators gives."""
    loss._CHUNK_BYTES["cpu"] = loss._CHUNK_BYTES["cuda"]  # the trace is on a CPU, what it stands for on a GPU
    for name, compiled, nodes, measured in (
        ("torchtitan, Llama 8B, FSDP 8", False, 1, 5762),
        ("torchtitan, Llama 8B, FSDP 8, compiled", True, 1, 6667),
        ("torchtitan, Llama 8B, FSDP 8, compiled, float8", True, 1, 8532),
        ("torchtitan, Llama 8B, FSDP 128, compiled", True, 16, 6514),
    ):
        hardware = find_hardware("h100-96gb:8", nodes=nodes)
        trace = drawn_out(LLAMA_8B, 32, (2, 8192), compiled=compiled, recomputed="selective")
        passes = {in_float8(each) if "float8" in name else each: count for each, count in trace.passes.items()}
        size = hardware.world_size
        step = {replace(each, bytes=each.bytes // size): count for each, count in trace.optimizer.items()}
        step[collective("c10d._allgather_base_", 2 * trace.of_a_layer, range(size))] = 2 * 32
        step[collective("c10d._reduce_scatter_base_", 4 * trace.of_a_layer, range(size))] = 32
        yield Published(name, measured, step_time(Counter(passes) + Counter(step), hardware), 2 * 8192)
    for data, tensor, pipeline, rows, measured in ((4, 2, 1, 8, 33_100), (1, 8, 1, 8, 17_700), (2, 1, 4, 4, 23_800)):
        config = {key: value // tensor if key != "hidden_size" else value for key, value in LLAMA_1B.items()}
        config |= {"model_type": "llama", "head_dim": 64, "tie_word_embeddings": True}
        trace = drawn_out(config, 16 // pipeline, (rows, 4096), compiled=False)
        count = 1024 // (data * rows)  # micro-batches of a step
        operations = Counter({each: often * count for each, often in trace.passes.items()}) + Counter(trace.optimizer)
        if tensor > 1:
            activations = collective("_c10d_functional.all_reduce", 2 * rows * 4096 * 2048, range(tensor))
            operations[activations] = 4 * 16 * count
        if data > 1:
            operations[collective("c10d.allreduce_", 4 * trace.parameters, range(0, 8, 8 // data))] = 1
        step_of = step_time(operations, find_hardware("h100-80gb:8"), bubble=pipeline_bubble("1f1b", pipeline, count))
        name = f"nanotron, Llama 1B, dp {data} tp {tensor} pp {pipeline}"
        yield Published(name, measured, step_of, 1024 * 4096 // 8)


def in_float8(operation: Operation) -> Operation:
    """The layers' products in float8; the head's stay in bf16: its matrix alone is over 1 GB."""
    return replace(operation, dtype="fp8") if operation.kind == PRODUCT and operation.bytes < 10**9 else operation


def page(runs: list[Published]) -> str:
    lines = [
        "# Speeds that others published",
        "",
        "Made by `python benchmarks/plan_published_speed.py`. tokens/s of a GPU, predicted from data sheets and the "
        "shares of them that `artel/planning/performance.py` names; nothing is fitted to these figures.",
        "",
        "| run | predicted | published | difference | products, attention, memory, exchange, waiting: % of the step |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        kinds, total = run.step.by_kind, run.step.seconds.mid
        memory = kinds.get("memory", 0) + kinds.get("fused", 0)
        parts = (kinds["product"], kinds["attention"], memory, kinds["collective"], kinds["waiting"])
        shares = ", ".join(f"{100 * part / total:.0f}" for part in parts)
        lines.append(
            f"| {run.name} | {run.predicted:,.0f} | {run.tokens_per_second:,.0f} | {run.error:+.0%} | {shares} |"
        )
    return "\n".join([*lines, *REASONS, ""])


REASONS = """
Reasons: torchtitan's GPUs are held at 500 W of 700, and how much that costs is unknown; its products ran beside the
gathering of weights, which takes some of the multiprocessors; its float8 scales tensors in passes that the trace does
not have, and its loss writes the logits whole. nanotron's run with tensor parallelism 8 was faster than predicted: the
trace normalizes all positions on each process, which nanotron shares out by sequence. The runs of Qwen3-30B-A3B are not
compared: which experts a token goes to is unknown without numbers.""".split("\n")


if __name__ == "__main__":
    main()
