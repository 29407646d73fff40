"""Memory that `artel plan` predicts, beside what the run took: writes benchmarks/plan.md.

    python benchmarks/plan.py [--folder DIR] [--only NAME…]

Each case is trained for two steps on this machine. Measured is the largest sum, at one moment, over the ranks of
PSS of memory of their own (smaps_rollup of Linux, read every 50 ms; shared memory in parts), and the pages of library
files of one of them: other processes of the machine, which may share those, do not change it. Beside it stands the
highest resident size of a rank (VmHWM).

Constants are in planning/plan/rank_memory.py. Cases marked `held out` were written down before the first ones were
fitted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MIB = 2**20
GPT2 = {"model_type": "gpt2", "n_layer": 6, "n_embd": 512, "n_head": 8}
GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
LLAMA = {"model_type": "llama", "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1536}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4}
MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 384, "intermediate_size": 1024}
MOE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 48, "moe_intermediate_size": 384}
MOE |= {"num_experts": 16, "num_experts_per_tok": 2}
ROBERTA = {"model_type": "roberta", "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 2048}
ROBERTA |= {"num_attention_heads": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {"gpt2": GPT2, "llama": LLAMA, "qwen3-moe": MOE, "roberta": ROBERTA}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ddp 2": (2, {"data": "ddp"}),
    "fsdp 2": (2, {"data": "fsdp"}),
    "fsdp 4": (4, {"data": "fsdp"}),
    "tensor 2": (2, {"tensor": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
}


@dataclass(frozen=True)
class Case:
    model: str
    layout: str
    checkpointing: str
    optimizer: str
    objective: str = "causal"
    held_out: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        what = "" if self.objective in ("causal", "masked") else f", {self.objective}"
        compiled = ", compiled" if self.compiled else ""
        return f"{self.model}, {self.layout}, {self.checkpointing}, {self.optimizer}{what}{compiled}"


CASES = (
    Case("gpt2", "one process", "none", "adamw"),
    Case("gpt2", "one process", "full", "muon", held_out=True),
    Case("gpt2", "ddp 2", "none", "adamw", held_out=True),
    Case("gpt2", "ddp 2", "full", "muon"),
    Case("gpt2", "fsdp 2", "none", "adamw"),
    Case("gpt2", "fsdp 4", "full", "adamw", held_out=True),
    Case("gpt2", "tensor 2", "none", "adamw"),
    Case("gpt2", "pipeline 2", "none", "adamw", held_out=True),
    Case("llama", "one process", "none", "muon", held_out=True),
    Case("llama", "one process", "none", "lora"),
    Case("llama", "one process", "none", "lora", "chat", held_out=True),
    Case("llama", "one process", "full", "adamw", "preference"),
    Case("llama", "ddp 2", "none", "lora", "preference", held_out=True),
    Case("llama", "one process", "none", "lora on int8", held_out=True),
    Case("llama", "one process", "full", "lora on nf4", held_out=True),
    Case("llama", "fsdp 2", "full", "muon", held_out=True),
    Case("llama", "fsdp 4", "none", "adamw"),
    Case("llama", "tensor 2", "full", "adamw", held_out=True),
    Case("llama", "pipeline 2", "full", "adamw"),
    Case("qwen3-moe", "one process", "none", "adamw", held_out=True),
    Case("qwen3-moe", "ddp 2", "none", "adamw"),
    Case("qwen3-moe", "fsdp 2", "full", "adamw", held_out=True),
    Case("qwen3-moe", "tensor 2", "none", "adamw"),
    Case("qwen3-moe", "pipeline 2", "none", "adamw", held_out=True),
    Case("roberta", "one process", "none", "adamw"),
    Case("roberta", "ddp 2", "none", "muon", held_out=True),
    Case("roberta", "fsdp 2", "none", "adamw"),
    Case("roberta", "fsdp 4", "full", "muon", held_out=True),
    Case("gpt2", "one process", "none", "adamw", compiled=True),
    Case("gpt2", "ddp 2", "none", "muon", held_out=True, compiled=True),
    Case("llama", "one process", "full", "muon", held_out=True, compiled=True),
    Case("llama", "fsdp 2", "none", "adamw", compiled=True),
    Case("llama", "one process", "none", "lora", "chat", held_out=True, compiled=True),
    Case("roberta", "one process", "none", "adamw", held_out=True, compiled=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("plan-cases"), help="where the runs and measurements lie")
    parser.add_argument("--only", nargs="*", default=[], help="cases with one of these in their name")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    page = Path(__file__).resolve().with_suffix(".md")
    os.chdir(options.folder)
    write_inputs()
    file = Path("measured.json")
    measured: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    measure_cases(options.only, measured, file, measure)
    cases = [case for case in CASES if case.name in measured]
    predicted = {case.name: predict(case) for case in cases}
    table = report(cases, measured, predicted)
    print(table)
    if not options.only:
        head = page.read_text(encoding="utf-8").partition("| case |")[0]
        page.write_text(f"{head}{table}\n", encoding="utf-8")


def measure_cases(only: list[str], measured: dict[str, Any], file: Path, measure: Callable[[Case], Any]) -> None:
    """Measure the cases that are missing, of those with one of `only` in their name, and keep each in `file`."""
    for case in CASES:
        if any(part in case.name for part in only or [""]) and case.name not in measured:
            measured[case.name] = measure(case)
            file.write_text(json.dumps(measured, indent=1))
            print(case.name, measured[case.name], flush=True)


def run_file(case: Case) -> Path:
    """Write the run file of a case."""
    data: dict[str, Any] = {"sources": [{"path": "{stdlib}/*.py"}], "validation": 0, "block": 256}
    tree: dict[str, Any] = {"run": f"runs/{case.name.replace(', ', '-').replace(' ', '-')}", "data": data}
    objective = "masked" if case.model == "roberta" else case.objective
    tree["objective"] = objective
    if objective in ("chat", "preference"):
        data["sources"] = [{"path": f"{objective}.jsonl", "format": objective}]
    tree["tokenizer"] = {"train": {"vocab": 8000}}
    tree["model"] = {"config": MODELS[case.model]}
    if case.optimizer.startswith("lora") or objective in ("chat", "preference"):
        tree["model"] = {"from": "runs/base/model"}
        del tree["tokenizer"]
    if case.optimizer.startswith("lora"):
        tree["model"]["lora"] = {"rank": 16}
        tree["model"]["quantize"] = case.optimizer.partition("lora on ")[2] or "none"
    processes, parallel = LAYOUTS[case.layout]
    sharing = processes if "tensor" not in parallel and "pipeline" not in parallel else 1
    tree["parallel"] = parallel
    rows = 2 if objective == "preference" else 4
    tree["train"] = {
        "steps": 2,
        "batch": rows * 2 * sharing,
        "micro_batch": rows,
        "activation_checkpointing": case.checkpointing,
        "optimizer": "adamw" if case.optimizer.startswith("lora") else case.optimizer,
        "compile": "on" if case.compiled else "off",
        "threads": 1,
    }
    tree["validate"] = {"every": "never"}
    file = Path(f"{tree['run'].split('/')[1]}.yaml")
    file.write_text(yaml.safe_dump(tree))
    return file


def write_inputs() -> None:
    """Conversations and preferences of made-up words, and the model that adapters are put on."""
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(
            draw.choice(("def", "return", "self", "import", "class", "value", "list")) for _ in range(count)
        )

    with Path("chat.jsonl").open("w") as chat, Path("preference.jsonl").open("w") as preference:
        for _ in range(400):
            question, answers = words(draw.randint(5, 40)), [words(draw.randint(20, 90)) for _ in range(2)]
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answers[0]}]
            chat.write(json.dumps({"messages": messages}) + "\n")
            pair = {"prompt": question, "chosen": answers[0], "rejected": answers[1]}
            preference.write(json.dumps(pair) + "\n")
    if not Path("runs/base/model").is_dir():
        base = yaml.safe_load(run_file(Case("llama", "one process", "none", "adamw")).read_text())
        base |= {"run": "runs/base"}
        base["train"] |= {"steps": 1, "batch": 1, "micro_batch": 1}
        Path("base.yaml").write_text(yaml.safe_dump(base))
        subprocess.run([sys.executable, "-m", "artel", "train", "base.yaml"], check=True)


def measure(case: Case) -> dict[str, float]:
    """Train a case: the peak of all ranks together, and the largest VmHWM of one, in MiB; and the seconds."""
    file, processes = run_file(case), LAYOUTS[case.layout][0]
    artel = [sys.executable, "-m", "artel"]
    subprocess.run([*artel, "prepare", str(file)], check=True, capture_output=True)
    command = [*artel, "train", str(file), "--restart", "--nproc", str(processes)]
    started = time.monotonic()
    peak, highest = 0, 0
    with Path("train.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        while process.poll() is None:
            ranks = [process.pid] if processes == 1 else ranks_of(process.pid)
            sizes = [size for size in map(memory_of, ranks) if size is not None]
            if len(sizes) == processes:
                peak = max(peak, sum(own for own, _, _ in sizes) + max(files for _, files, _ in sizes))
                highest = max(highest, *(high for _, _, high in sizes))
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{case.name}: {Path('train.log').read_text()[-2000:]}")
    return {"peak": peak / MIB, "vmhwm": highest / MIB, "seconds": time.monotonic() - started}


def ranks_of(launcher: int) -> list[int]:
    """The processes below `launcher` that a rank was given."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    ranks, others = [], [launcher]
    for process in others:  # not below a rank: its helpers have its environment
        for child in children.get(process, []):
            (ranks if _has_rank(child) else others).append(child)
    return ranks


def _has_rank(process: int) -> bool:
    try:
        return b"\0RANK=" in Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return False


def memory_of(process: int) -> tuple[int, int, int] | None:
    """Bytes: PSS of memory of its own and shared between processes; of files' pages; the peak of all."""
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    numbers = {name: int(number) * 1024 for name, number in re.findall(r"(\w+):\s+(\d+) kB", rollup + status)}
    if "Pss_Anon" not in numbers or "RssFile" not in numbers:
        return None
    return numbers["Pss_Anon"] + numbers["Pss_Shmem"], numbers["RssFile"], numbers["VmHWM"]


def predict(case: Case) -> float:
    """What `artel plan` says of host memory, in MiB."""
    command = [sys.executable, "-m", "artel", "plan", str(run_file(case)), "--json"]
    command += ["--nproc", str(LAYOUTS[case.layout][0])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout)["host_gib"]) * 1024


def report(cases: list[Case], measured: dict[str, Any], predicted: dict[str, float]) -> str:
    """The table of all cases, and what became of the errors."""
    lines = ["| case | predicted, MiB | measured, MiB | error | VmHWM of a rank, MiB |", "|---|---|---|---|---|"]
    errors: dict[bool, list[float]] = {False: [], True: []}
    for case in cases:
        peak = measured[case.name]["peak"]
        error = predicted[case.name] / peak - 1
        errors[case.held_out].append(abs(error))
        name = case.name + (" (held out)" if case.held_out else "")
        row = [
            name,
            f"{predicted[case.name]:,.0f}",
            f"{peak:,.0f}",
            f"{error:+.1%}",
            f"{measured[case.name]['vmhwm']:,.0f}",
        ]
        lines.append("| " + " | ".join(row) + " |")
    lines.append("")
    lines += [summary(what, errors[held_out]) for held_out, what in ((False, "fitted to"), (True, "held out"))]
    return "\n".join(lines)


def summary(what: str, errors: list[float]) -> str:
    """A line about the relative errors of these cases, each 0 or more."""
    if not errors:
        return f"{what}: no cases"
    return f"{what}: {len(errors)} cases, mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}"


if __name__ == "__main__":
    main()
