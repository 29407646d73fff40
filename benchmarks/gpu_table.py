"""Training on one GPU, artel beside its peers, in one command for a card that is lent for half an hour.

    python benchmarks/gpu_table.py [--only PART ...] [--minutes 25] [--retry] [--show]
    python benchmarks/gpu_table.py --tiny --out build/tiny.jsonl

gpu_table.yaml lists the cases, gpu_table.md says what is measured. Each row runs in a process of its own under a time
limit, and its line is written when it ends, so a session that was cut continues with the next row. A row that fails,
or whose library is not installed, says so and ends nothing. `--tiny` runs every row with a tiny model on any machine;
its numbers mean nothing. Peers may be installed elsewhere: PYTHONPATH=FOLDER.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FOLDER = Path(__file__).parent
SMOKE = "smoke: kernels beside references"
SMOKE_TESTS = ("-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py", "-k", "kernel or loss or attention")
SMOKE_SECONDS = 60
STEPS = 20
PATIENCE = 3
"""A row may take this many times its estimate, and always two minutes."""
TINY = {"n_layer": 2, "n_embd": 32, "n_head": 2, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 320}  # fmt: skip
FIGURES = {"tokens/s": ",.0f", "samples/s": ",.2f", "ms a step": ",.1f", "MFU": ".1%", "peak GiB": ".2f",
           "reserved GiB": ".2f", "first step s": ".1f", "compiling s": ".1f", "first loss": ".4f",
           "loss": ".4f"}  # fmt: skip


class Row(NamedTuple):
    name: str
    case: dict[str, Any]
    contestant: dict[str, Any]
    seconds: float

    @property
    def slug(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.case["name"].lower())


def read_rows(*, tiny: bool) -> list[Row]:
    table = yaml.safe_load((FOLDER / "gpu_table.yaml").read_text(encoding="utf-8"))
    rows = []
    for key in ("contestants", "later"):
        for case in table["cases"]:
            about = {"weights": "float32", "steps": STEPS} | case | {"model": table["models"][case["model"]]}
            for name in case.get(key, ()):
                contestant = table["contestants"][name]
                seconds = contestant["seconds"] + case["seconds"]
                rows.append(Row(f"{case['name']}: {name}", make_tiny(about) if tiny else about, contestant, seconds))
    return rows


def make_tiny(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case of the same kind that a CPU runs in seconds."""
    model = {name: TINY.get(name, value) for name, value in case["model"].items()}
    model |= {name: TINY[name] for name in ("n_layer", "n_embd", "n_head") if model["model_type"] == "gpt2"}
    small = {"batch": 4, "length": 64} | ({"answers": 2, "new_tokens": 8} if "answers" in case["work"] else {})
    return case | {"model": model, "steps": 2, "work": case["work"] | small}


class Session:
    """Runs rows until the time is over."""

    def __init__(self, out: Path, minutes: float, *, tiny: bool) -> None:
        self.out, self.scratch = out, out.with_suffix("")
        self.deadline = time.monotonic() + 60 * minutes
        self._patience = 100 if tiny else PATIENCE  # a busy laptop may take minutes to import
        self._environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        source = str(FOLDER.parent / "src")
        self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        # Trainer would split a batch over all GPUs that it sees.
        self._environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        if tiny:
            self._environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        self.scratch.mkdir(parents=True, exist_ok=True)

    def smoke(self) -> dict[str, Any]:
        failure = self._run([*SMOKE_TESTS], self.scratch / "smoke.log", SMOKE_SECONDS)
        last = last_line(self.scratch / "smoke.log")
        return {"not run": f"{failure}: {last}"} if failure else {"result": last}

    def measure(self, row: Row) -> dict[str, Any]:
        folder, name = self.scratch / row.slug, row.name.rpartition(": ")[2].replace(" ", "-")
        if not (folder / "work.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            case = self.scratch / f"{row.slug}.json"
            case.write_text(json.dumps(row.case), encoding="utf-8")
            log = self.scratch / f"{row.slug}.log"
            failure = self._run([str(FOLDER / "gpu_table_inputs.py"), str(case), str(folder)], log, row.case["inputs"])
            if failure:
                return {"not run": f"its model and data: {failure}: {last_line(log)}"}
        result, log = folder / f"{name}.json", folder / f"{name}.log"
        result.unlink(missing_ok=True)
        shutil.rmtree(folder / "artel", ignore_errors=True)  # the run of an earlier row
        contestant = str(FOLDER / "peers" / row.contestant["function"])
        command = [str(FOLDER / "peers/measured.py"), str(folder), contestant, str(result), str(time.time())]
        precision = ["--precision", row.contestant["precision"]] if "precision" in row.contestant else []
        failure = self._run([*command, "--steps", str(row.case["steps"]), *precision], log, row.seconds)
        if not result.exists():
            return {"not run": f"{failure}: {last_line(log)}"}
        figures: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return figures

    def _run(self, words: list[str], log: Path, seconds: float) -> str:
        """Run Python with `words`, and end whatever it started. Return why it failed, or an empty text."""
        limit = max(0.0, min(max(120, self._patience * seconds), self.deadline - time.monotonic()))
        with log.open("w", encoding="utf-8") as stream:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=FOLDER.parent,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                return f"stopped after {limit:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # workers of a data loader may have stayed
                process.wait()
        return f"exit status {process.returncode}" if process.returncode else ""


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")[-300:]


def read_records(out: Path) -> dict[str, dict[str, Any]]:
    """Return the last record of each row."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {record["row"]: record for record in map(json.loads, lines)}


def table_lines(records: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield two tables in Markdown: the figures of all rows, and their profiles."""
    yield f"| row | {' | '.join(FIGURES)} |"
    yield "|---" * (len(FIGURES) + 1) + "|"
    for name, record in records.items():
        reason = record.get("not run") or record.get("result")
        figures = [format_figure(record.get(figure), layout) for figure, layout in FIGURES.items()]
        yield f"| {name} | {('not run: ' * ('not run' in record) + reason) if reason else ' | '.join(figures)} |"
    profiles = {name: record["profile"] for name, record in records.items() if "profile" in record}
    groups = list(dict.fromkeys(group for profile in profiles.values() for group in profile))
    if groups:
        yield f"\n| ms a step | {' | '.join(groups)} |"
        yield "|---" * (len(groups) + 1) + "|"
    for name, profile in profiles.items():
        yield f"| {name} | {' | '.join(f'{profile[group]:,.2f}' if group in profile else '' for group in groups)} |"


def format_figure(value: float | None, layout: str) -> str:
    return "" if value is None else format(value, layout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER.parent / "build/gpu_table.jsonl")
    parser.add_argument("--only", nargs="+", help="parts of the names of rows")
    parser.add_argument("--minutes", type=float, default=25, help="after this time the remaining rows are left out")
    parser.add_argument("--retry", action="store_true", help="run the rows again that could not be measured")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on the CPU")
    parser.add_argument("--show", action="store_true", help="only print the tables of --out")
    asked = parser.parse_args()
    if not asked.show:
        run(asked)
    print("\n".join(table_lines(read_records(asked.out))))


def run(asked: argparse.Namespace) -> None:
    session = Session(asked.out.resolve(), asked.minutes, tiny=asked.tiny)
    known = read_records(session.out)
    done = {name for name, record in known.items() if not (asked.retry and "not run" in record)}
    rows = {row.name: row for row in read_rows(tiny=asked.tiny)}
    names = [
        name
        for name in (SMOKE, *rows)
        if name not in done and (not asked.only or any(part in name for part in asked.only))
    ]
    estimates = {name: rows[name].seconds if name in rows else SMOKE_SECONDS for name in names}
    cases = {rows[name].slug: rows[name].case["inputs"] for name in names if name in rows}
    for name, seconds in estimates.items():
        say(f"{seconds:5.0f} s  {name}")
    total = sum(estimates.values()) + sum(cases.values())
    say(f"{total:5.0f} s  in all on an H200 (estimated, with the models and data of {len(cases)} cases)")
    if done:
        say(f"{len(done)} rows are in {session.out} already")
    for at, name in enumerate(names):
        if session.deadline - time.monotonic() < 10:
            say(f"{asked.minutes:g} minutes are over; left out: {', '.join(names[at:])}. Run the same command again.")
            return
        say(name)
        began = time.monotonic()
        record = session.smoke() if name == SMOKE else session.measure(rows[name])
        if "not run" in record and session.deadline <= time.monotonic():
            continue  # cut by the end of the session: the next one measures it
        record = {"row": name, "seconds": round(time.monotonic() - began, 1), **record}
        with session.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        say("    " + (record.get("not run") or record.get("result") or f"{record['tokens/s']:,.0f} tokens/s"))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
