"""The predicted time of a step beside the measured one, on this machine: writes benchmarks/plan_time.md.

    python benchmarks/plan_time.py [--cases gpt2,llama-ddp-2] [--steps 10] [--keep-rates] [--out FILE]

First `artel bench hardware` measures the machine. Then each case trains a small model by artel's own loop, one process
with two threads or two processes with one each. Both are compared by processor time, which other programs do not
lengthen: of the training thread in one process, of the whole process where gloo's threads communicate. A step takes the
median of all but the first two. Beside it stands what the clock showed, which is longer on a machine that is shared.

Then what others published is set beside what the table of accelerators gives for it, without any measurement here. A
step of one process is traced with two and with four layers of its share of the model, and drawn out to all of them.
What processes exchange is added by arithmetic: FSDP gathers each layer twice in bf16 and reduces its gradients in
float32; tensor parallelism reduces activations four times a layer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import RunConfig, TrainConfig, run_from
from artel.diagnostics.bench.figures import about_machine
from artel.diagnostics.bench.hardware import measure_hardware
from artel.diagnostics.bench.texts import documents
from artel.models import loss
from artel.models.activation_checkpointing import Recompute, recompute
from artel.models.attention_switch import use_for_training
from artel.models.compile import _COMPILED, repeated_layers
from artel.models.loading.heads import model_class
from artel.models.output_head import trust_output_head
from artel.parallel import join_world
from artel.parallel.grad_norm import norm_here
from artel.planning.hardware import find_hardware
from artel.planning.operations import COLLECTIVE, PRODUCT, Operation, OperationRecorder
from artel.planning.performance import StepTime, extended, pipeline_bubble, step_time
from artel.planning.rates import read_rates
from artel.preparing import prepare
from artel.training import loop
from artel.training.optim.optimizer import Optimizer

VOCABULARY = 16_384
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
MODELS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "gpt2": ("causal", {"model_type": "gpt2", "n_layer": 6, "n_embd": 384, "n_head": 6, "attn_pdrop": 0,
                        "resid_pdrop": 0, "embd_pdrop": 0}, 8, 256),
    "llama": ("causal", {"model_type": "llama", "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1408,
                         "num_attention_heads": 8, "num_key_value_heads": 4}, 4, 512),
    "roberta": ("masked", {"model_type": "roberta", "num_hidden_layers": 6, "hidden_size": 384,
                           "num_attention_heads": 6, "intermediate_size": 1536, **NO_DROPOUT}, 8, 256),
}  # fmt: skip
HEADS = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM"}


class Case(NamedTuple):
    model: str
    processes: int
    compiled: bool

    @property
    def name(self) -> str:
        how = "" if self.compiled else "-eager"
        return self.model + how + (f"-ddp-{self.processes}" if self.processes > 1 else "")


CASES = {case.name: case for case in (Case(model, processes, compiled) for compiled in (True, False)
                                      for processes in (1, 2) for model in MODELS)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help=f"Some of {', '.join(CASES)}.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--keep-rates", action="store_true", help="Use what artel bench hardware measured before.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("plan_time.md"))
    parser.add_argument("--rank", nargs=2, metavar=("RUN", "TIMES"), help="One process of a case.")
    options = parser.parse_args()
    if options.rank:
        train(*map(Path, options.rank))
        return
    if not options.keep_rates:
        measure_hardware(print)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("\n\n".join(documents(4_000_000)))
        rows = [compare(CASES[case], folder, options.steps) for case in options.cases.split(",")]
    options.out.write_text(page(rows, list(published())))


class Row(NamedTuple):
    case: Case
    tokens: int
    predicted: StepTime
    measured: float
    clock: float

    @property
    def error(self) -> float:
        return self.measured / self.predicted.seconds.mid - 1


def compare(case: Case, folder: Path, steps: int) -> Row:
    predicted = predict(case)
    rows, length = MODELS[case.model][2:]
    measured, clock = measure(case, folder, steps)
    row = Row(case, rows * length, predicted, measured, clock)
    print(f"{case.name}: {1000 * predicted.seconds.mid:.0f} ms predicted, {1000 * measured:.0f} measured", flush=True)
    return row


def predict(case: Case) -> StepTime:
    """From a trace of one process's step, without memory; and the gradients of all, reduced once."""
    objective, config, rows, length = MODELS[case.model]
    tokens = rows // case.processes * length
    targets = int(tokens * 0.15) if objective == "masked" else None
    trace = traced(config | {"vocab_size": VOCABULARY}, HEADS[objective], (rows // case.processes, length),
                   targets=targets, compiled=case.compiled)  # fmt: skip
    operations = Counter(trace.passes) + Counter(trace.optimizer)
    if case.processes > 1:
        operations[collective("c10d.allreduce_", 4 * trace.parameters, range(case.processes))] = 1
    rates = read_rates(case.processes, torch.device("cpu"))
    assert rates is not None, "artel bench hardware has not measured this machine"
    return step_time(operations, find_hardware(f"cpu:{case.processes}"), rates)


class Trace(NamedTuple):
    passes: dict[Operation, int]
    optimizer: dict[Operation, int]
    parameters: int
    of_a_layer: int


def traced(
    config: dict[str, Any],
    head: str,
    shape: tuple[int, int],
    *,
    targets: int | None = None,
    compiled: bool,
    recomputed: Recompute = "none",
) -> Trace:
    """The operations of one step of one process; `targets` are the positions that have one, where most have none."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    described = CONFIG_MAPPING[config["model_type"]](use_cache=False, **values)
    with torch.device("meta"):
        model = model_class(described, head, {})._from_config(described)
    use_for_training(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        trust_output_head(model)  # `output_head` compares numbers, of which there are none
        if compiled:
            _COMPILED.add(model)
        recompute(model, recomputed)
        model.train()
        ids = torch.zeros(shape, dtype=torch.int64)
        places = None if targets is None else torch.zeros(targets, dtype=torch.int64)
        optimizer = Optimizer(model, TrainConfig())
        for _ in range(2):  # the first makes the optimizer's state
            with OperationRecorder(model, compiled=compiled) as passes:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    summed, _ = loss.model_losses(model, {"input_ids": ids}, ids, places)
                summed.backward()
            with OperationRecorder(model) as step:
                norm = norm_here([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
                optimizer.step(1.0, norm)
    layer = sum(parameter.numel() for parameter in repeated_layers(model)[0].parameters())
    return Trace(passes.operations, step.operations, sum(p.numel() for p in model.parameters()), layer)


def drawn_out(config: dict[str, Any], layers: int, shape: tuple[int, int], **options: Any) -> Trace:
    """The same for `layers` layers, from two and four of them."""
    two, four = (traced(config | {"num_hidden_layers": count}, HEADS["causal"], shape, **options) for count in (2, 4))
    times = (layers - 4) / 2
    parameters = round(four.parameters + times * (four.parameters - two.parameters))
    passes, optimizer = extended(two.passes, four.passes, times), extended(two.optimizer, four.optimizer, times)
    return Trace(passes, optimizer, parameters, four.of_a_layer)


def collective(name: str, size: int, ranks: range) -> Operation:
    return Operation(COLLECTIVE, name, bytes=size, ranks=tuple(ranks))


def measure(case: Case, folder: Path, steps: int) -> tuple[float, float]:
    """Seconds of a step of rank 0: by processor time, and by the clock."""
    objective, config, rows, length = MODELS[case.model]
    run = {
        "run": str(folder / case.name),
        "data": {"sources": [{"path": str(folder / "text.txt")}], "store": str(folder / "stores"), "block": length,
                 "validation": 0},
        "tokenizer": {"train": {"vocab": VOCABULARY}},
        "model": {"config": config},
        "objective": objective,
        "train": {"steps": steps, "batch": rows, "micro_batch": rows // case.processes, "precision": "bf16",
                  "learning_rate": 1e-4, "compile": "on" if case.compiled else "off", "threads": 2 // case.processes},
        "validate": {"every": "never"},
        "checkpoint": {"every": "never", "best": None},
        "log": {"every": steps},
        "track": ["jsonl"],
    }  # fmt: skip
    file = folder / f"{case.name}.yaml"
    file.write_text(yaml.safe_dump(run))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # A thread that waits for another one sleeps: its processor time is what it did.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(case.processes),
                   "LOCAL_WORLD_SIZE": str(case.processes)}  # fmt: skip
    times = [folder / f"{case.name}-{rank}.json" for rank in range(case.processes)]
    processes = [
        subprocess.Popen([sys.executable, __file__, "--rank", str(file), str(path)],
                         env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.DEVNULL)
        for rank, path in enumerate(times)
    ]  # fmt: skip
    failed = [process.wait() for process in processes]
    if any(failed):
        raise SystemExit(f"{case.name} failed; run it by hand: {file}")
    marks = json.loads(times[0].read_text())
    kind = 1 if case.processes == 1 else 2
    seconds = [after[kind] - before[kind] for before, after in pairwise(marks[1:])]
    clock = [after[0] - before[0] for before, after in pairwise(marks[1:])]
    return statistics.median(seconds), statistics.median(clock)


def train(file: Path, times: Path) -> None:
    """One process: artel's loop, with the clocks after each step."""
    config: RunConfig = run_from(yaml.safe_load(file.read_text()), {}, {(): str(file)})
    marks: list[tuple[float, float, float]] = []
    with join_world(config.train.threads) as world:
        prepared = prepare(config) if world.first else None
        world.barrier()
        after_step = lambda _: marks.append((time.perf_counter(), time.thread_time(), time.process_time()))  # noqa: E731
        loop.train(config, prepared or prepare(config), world, lambda _: None, callbacks=[after_step])
    times.write_text(json.dumps(marks))


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


def page(rows: list[Row], others: list[Published]) -> str:
    machine = about_machine("torch")
    errors = [abs(row.error) for row in rows]
    lines = [
        "# Predicted and measured time of a step",
        "",
        f"Made by `python benchmarks/plan_time.py` on {machine['processor']}, {machine['cores']} cores, torch "
        f"{machine['torch']}, {machine['measured']}. Largest difference {max(errors):.0%}, mean "
        f"{sum(errors) / len(errors):.0%}.",
        "",
        "Milliseconds of a step by processor time, which other programs do not lengthen; by the clock, the machine was "
        "shared. tokens/s are those of a machine that does nothing else.",
        "",
        "| case | predicted, ms | measured, ms | difference | clock, ms | tokens/s predicted | measured |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        predicted = row.predicted.tokens_per_second(row.tokens).mid
        lines.append(
            f"| {row.case.name} | {1000 * row.predicted.seconds.mid:,.0f} | {1000 * row.measured:,.0f} | "
            f"{row.error:+.1%} | {1000 * row.clock:,.0f} | {predicted:,.0f} | {row.tokens / row.measured:,.0f} |"
        )
    lines += [
        "",
        "## What others published",
        "",
        "tokens/s of a GPU, predicted from data sheets and the shares of them that `artel/planning/performance.py` "
        "names; nothing is fitted to these figures.",
        "",
        "| run | predicted | published | difference | products, attention, memory, exchange, waiting: % of the step |",
        "|---|---|---|---|---|",
    ]
    for run in others:
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
