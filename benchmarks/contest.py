"""A contest: artel beside a peer on the same data, weights, steps and seeds. Each objective's script fills in its part.

Each training is a process of its own with one thread, timed by the processor step by step. It is one line in a file of
results, so the same command continues with what is missing; remove the file to measure again. The page is made of these
lines: means over the seeds, and the range.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_UNCOUNTED = 5
"""First steps, which are not timed."""
Metrics = dict[str, Any]


@dataclass
class Training:
    """The training of one contestant, in a process of its own."""

    options: argparse.Namespace
    name: str
    """The name of the case."""
    case: dict[str, Any]
    seed: int
    data: Path
    """The folder that `prepare` filled; shared by all trainings."""
    folder: Path
    """A folder for this training only."""
    times: list[float] = field(default_factory=list)

    def note(self, *_: Any) -> None:
        """Callback of artel's loop: note the processor time at the end of each step."""
        self.times.append(time.process_time())

    def rate(self, per_step: int) -> float:
        """Items of which a step has `per_step`, per second of the processor."""
        times = self.times[_UNCOUNTED:]
        return per_step * (len(times) - 1) / (times[-1] - times[0])

    def artel(self, run: dict[str, Any]) -> Path:
        """Train a run file with artel. Return the folder of the run."""
        import artel

        return artel.train(self.complete(run), callbacks=[self.note]).folder

    def complete(self, run: dict[str, Any]) -> dict[str, Any]:
        """Add what all run files have in common: one thread, a linear schedule, AdamW as Trainer has it."""
        train = {"threads": 1, "schedule": "linear", "warmup": 0.1, "weight_decay": 0.01, "betas": [0.9, 0.999]}
        common = {"run": str(self.folder / "run"), "seed": self.seed, "validate": {"every": "never"},
                  "checkpoint": {"every": "never"}, "track": ["jsonl"]}  # fmt: skip
        data = {"store": str(self.data / "stores"), **run["data"]}
        return common | run | {"data": data, "train": train | run["train"]}

    def untrained(self, run: dict[str, Any]) -> Path:
        """Write the model and tokenizer of artel's run before its first step. Return their folder."""
        from artel.config import load_run
        from artel.inference import open_untrained
        from artel.objectives import build_objective

        place = self.folder / "untrained"
        place.mkdir()
        (place / "run.json").write_text(json.dumps(self.complete(run)), encoding="utf-8")
        config = load_run(str(place / "run.json"))
        opened = open_untrained(config)
        opened.model.save_pretrained(place)
        opened.tokenizer.save(place)
        for name, content in build_objective(config, opened.tokenizer).model_files(opened.model).items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        return place

    def trainer_callback(self) -> Any:
        """`note` as a callback of a Trainer of transformers, trl or sentence-transformers."""
        import torch
        from transformers import TrainerCallback

        torch.set_num_threads(1)
        note = self.note

        class StepEnds(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                note()

        return StepEnds()

    def trainer_arguments(self, kind: Callable[..., Any], *, steps: int, batch: int, rate: float, **more: Any) -> Any:
        """TrainingArguments (or `kind`, a subclass) with artel's schedule; nothing is saved or reported."""
        settings = {
            "output_dir": str(self.folder / "trainer"), "seed": self.seed, "max_steps": steps, "learning_rate": rate,
            "per_device_train_batch_size": batch, "lr_scheduler_type": "linear", "warmup_steps": round(0.1 * steps),
            "weight_decay": 0.01, "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
            "logging_strategy": "no",
        }  # fmt: skip
        return kind(**settings | more)


@dataclass(frozen=True)
class Contest:
    """The part of an objective."""

    script: str
    """Its `__file__`."""
    title: str
    about: str
    """Its docstring."""
    metrics: dict[str, str]
    """Columns of the table: title by metric."""
    unit: str
    """The items of a batch, in the plural: texts, pairs."""
    contestants: dict[str, Callable[[Training], Metrics]]
    """Return metrics, with `speed`. artel is the first."""
    prepare: Callable[[argparse.Namespace, Path], str]
    """Write the data into a folder. Return what the page says of them."""
    cases: Callable[[argparse.Namespace], dict[str, dict[str, Any]]]
    baselines: Callable[[argparse.Namespace, Path, dict[str, Any]], dict[str, Metrics]] = lambda *_: {}
    first_seed_only: tuple[str, ...] = ()
    same_precision: dict[str, str] = field(default_factory=dict)
    """The contestant of artel that computes in the precision of a peer's, where that is not "artel"."""
    arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: parser
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass
class Session:
    """A contest in progress."""

    contest: Contest
    options: argparse.Namespace
    data: Path

    def train(self, contestant: str, name: str, case: dict[str, Any], seed: int) -> Metrics:
        """Return the metrics of one training, from the file of results if it is there."""
        key = {"contestant": contestant, "case": name, "settings": case, "seed": seed}
        results: Path = self.options.results
        lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
        for done in map(json.loads, lines):
            if key.items() <= done.items():
                return dict(done)
        with tempfile.TemporaryDirectory(dir=self.data) as folder:
            words = json.dumps(key | {"data": str(self.data), "folder": folder})
            command = [sys.executable, self.contest.script, *sys.argv[1:], "--one", words]
            environment = os.environ | _ENVIRONMENT | {"ARTEL_CACHE": str(self.data / "cache")}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"{contestant}, {name} failed:\n{done.stderr[-4000:]}")
        result = key | json.loads(done.stdout.splitlines()[-1]) | {"load": round(os.getloadavg()[1], 1)}
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
        print(result, file=sys.stderr, flush=True)
        return result

    def rows(self, name: str, case: dict[str, Any]) -> list[str]:
        """The rows of a case: baselines, then the contestants with all seeds, in turns."""
        contest, runs = self.contest, {}
        for seed in self.options.seeds:
            for contestant in contest.contestants:
                if seed == self.options.seeds[0] or contestant not in contest.first_seed_only:
                    runs.setdefault(contestant, []).append(self.train(contestant, name, case, seed))
        baselines = contest.baselines(self.options, self.data, case)
        rows = [self._row(name, baseline, [metrics]) for baseline, metrics in baselines.items()]
        speeds = {contestant: statistics.mean(run["speed"] for run in found) for contestant, found in runs.items()}
        own = next(iter(speeds))
        for contestant, speed in speeds.items():
            shown = f"{speed:.1f}"
            if not contestant.startswith(own):
                shown += f"; artel {speeds[own] / speed:.2f} ×"
                if same := contest.same_precision.get(contestant):
                    shown += f", in the same precision {speeds[same] / speed:.2f} ×"
            rows.append(self._row(name, contestant, runs[contestant], shown))
        return rows

    def _row(self, name: str, contestant: str, runs: list[Metrics], speed: str = "") -> str:
        cells = []
        for metric in self.contest.metrics:
            values = [run[metric] for run in runs]
            spread = f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.4f}{spread}")
        return f"| {name} | {contestant} | {' | '.join([*cells, str(len(runs)), speed])} |"

    def write_page(self, about: str, lines: list[str]) -> None:
        """Write the page: how it was made, `about`, then `lines`. What is below its heading "Notes" stays."""
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        done = map(json.loads, self.options.results.read_text(encoding="utf-8").splitlines())
        loads = [line["load"] for line in done if "load" in line]
        command = " ".join(["python", f"benchmarks/{Path(self.contest.script).name}", *sys.argv[1:]])
        made = (
            f"`{command}` on {datetime.date.today():%d %B %Y}, at {commit}; a process with one thread for each run, on "
            f"{os.cpu_count()} cores with a load of {min(loads):g} to {max(loads):g}, other work included. Means over "
            f"the seeds, and the range. {about}"
        )
        text = "\n".join([f"# {self.contest.title}", "", textwrap.fill(made, 119), *lines])
        page: Path = self.options.out
        before = page.read_text(encoding="utf-8") if page.is_file() else ""
        _, heading, notes = before.partition("\n## Notes\n")
        page.write_text(text + "\n" + heading + notes, encoding="utf-8")


def hold(contest: Contest) -> None:
    """The command line of a contest; in a contestant's process, its training."""
    parser = argparse.ArgumentParser(description=contest.about, formatter_class=argparse.RawDescriptionHelpFormatter)
    name = Path(contest.script).stem
    parser.add_argument("--seeds", type=int, nargs="+", default=contest.seeds)
    parser.add_argument("--results", type=Path, default=Path(f"runs/{name}.jsonl"))
    parser.add_argument("--out", type=Path, default=Path(contest.script).with_suffix(".md"), help="the page")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    contest.arguments(parser)
    options = parser.parse_args()
    if options.one:
        one = json.loads(options.one)
        places = (Path(one["data"]), Path(one["folder"]))
        training = Training(options, one["case"], one["settings"], one["seed"], *places)
        print("\n" + json.dumps(contest.contestants[one["contestant"]](training)))
        return
    with tempfile.TemporaryDirectory() as folder:
        session = Session(contest, options, Path(folder))
        os.environ["ARTEL_CACHE"] = f"{folder}/cache"
        about = contest.prepare(options, Path(folder))
        titles = ["", "", *contest.metrics.values(), "seeds", f"{contest.unit}/s of the processor"]
        lines = ["", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        for case_name, case in contest.cases(options).items():
            lines += session.rows(case_name, case)
        session.write_page(about, lines)


def write_json_lines(file: Path, rows: Any) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
