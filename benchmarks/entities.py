"""Names in Russian news (factRuEval-2016's devset, 122 texts): artel beside transformers' Trainer, and plain baselines.

    python benchmarks/entities.py DATA.jsonl MINILM_FOLDER [--seeds 0 1 2] [--results RESULTS.jsonl]

Each run is a line of RESULTS; the same command again goes on with what is missing. Writes benchmarks/entities.md.

The texts are split by documents, 98 to learn from and 24 to judge by, the same ones for everybody. Both contestants
begin with the same weights, read the same windows with the same labels (the Trainer those of artel's store), see as
many of them in as many steps, with the same optimizer and learning rate, and are judged by `artel evaluate`: f1 of
whole names over whole documents. The learning rate is the one with which the Trainer has the highest f1 on the last 20
of the texts to learn from, having learned the other 78 (seed 0). From scratch a small BERT with a tokenizer of these
texts, else all-MiniLM-L6-v2 (English, so that it spells Russian words letter by letter). Each run is a process with one
thread; speed is windows learned for each second of the processor, which other programs on the machine change little,
without the first five steps. The Trainer is run as it comes (float32), and for the first seed with bf16=True too.

Baselines: the commonest tag of a word, and logistic regression over the word, its ends and shape and those of its
neighbours (a CRF without the chain), both on artel's words.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contestants import StepClock, once, write_page

CONTESTANTS = ("artel", "Trainer", "Trainer, bf16")
BERT = {"model_type": "bert", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 512}  # fmt: skip
BEGINNINGS: dict[str, dict[str, Any]] = {
    "from scratch": {"steps": 600, "batch": 16, "rates": (5e-4, 1e-3, 2e-3)},
    "MiniLM": {"steps": 100, "batch": 16, "rates": (3e-4, 1e-3)},
}
_BLOCK = 128
_HELD_OUT, _CHOOSING = 24, 20


def run_file(folder: Path, beginning: str, minilm: str, seed: int, rate: float) -> dict[str, Any]:
    given = BEGINNINGS[beginning]
    is_scratch = beginning == "from scratch"
    source = {"path": str(folder / "train.jsonl"), "format": "entities"}
    return {
        "run": str(folder / f"run-{beginning.replace(' ', '-')}-{seed}-{rate}"),
        "seed": seed,
        "data": {"sources": [source], "validation": str(folder / "validation.jsonl"), "block": _BLOCK},
        "tokenizer": {"train": {"vocab": 4000}} if is_scratch else {},
        "model": {"config": BERT} if is_scratch else {"from": minilm},
        "objective": "tokens",
        "train": {
            "steps": given["steps"],
            "batch": given["batch"],
            "learning_rate": rate,
            "threads": 1,
            "schedule": "linear",
            "warmup": 0.1,
            "weight_decay": 0.01,
            "betas": [0.9, 0.999],
        },
        "validate": {"every": "never"},
        "checkpoint": {"every": "never"},
    }


def train_artel(run: dict[str, Any]) -> tuple[Path, StepClock]:
    import artel

    clock = StepClock()
    trained = artel.train(run, callbacks=[clock.note], tell=lambda *_: None)
    return trained.folder / "model", clock


def train_with_trainer(run: dict[str, Any], *, bf16: bool) -> tuple[Path, StepClock]:
    import torch
    from transformers import (
        AutoModelForTokenClassification,
        DataCollatorForTokenClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    import artel

    torch.set_num_threads(1)
    prepared = artel.prepare(run, tell=lambda *_: None)
    tokenizer, part = prepared.tokenizer(), prepared.open().train
    folder = Path(run["run"]).with_name(f"trainer-{Path(run['run']).name}-{'bf16' if bf16 else 'fp32'}")
    begin_model(run, folder / "begin")
    model = AutoModelForTokenClassification.from_pretrained(folder / "begin")
    rows = []
    for number in range(part.samples):
        sample = part.sample(number)
        labels = sample.flags.astype(int) - 1  # -1: no first token of a word
        rows.append({"input_ids": sample.ids.tolist(), "labels": [-100 if label < 0 else label for label in labels]})
    clock, train = StepClock(), run["train"]

    class Noted(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.note()

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=train["steps"], per_device_train_batch_size=train["batch"],
        learning_rate=train["learning_rate"], lr_scheduler_type="linear", warmup_steps=train["steps"] // 10,
        weight_decay=train["weight_decay"], adam_beta2=0.999, max_grad_norm=1.0, seed=run["seed"], bf16=bf16,
        use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    collator = DataCollatorForTokenClassification(tokenizer.hf)
    Trainer(model, arguments, train_dataset=rows, data_collator=collator, callbacks=[Noted()]).train()
    model.save_pretrained(folder / "model")
    tokenizer.save(folder / "model")
    return folder / "model", clock


def begin_model(run: dict[str, Any], folder: Path) -> None:
    """Write the model of artel's run before its first step."""
    from artel.config import load_run
    from artel.inference import open_untrained

    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    open_untrained(load_run(str(folder / "run.json")), lambda _: None).model.save_pretrained(folder)


def one(options: argparse.Namespace) -> dict[str, Any]:
    """One run of a contestant: its figures on the held-out texts, and its speed."""
    import artel

    folder = Path(options.folder)
    run = run_file(folder, options.beginning, options.minilm, options.seed, options.rate)
    if options.one == CONTESTANTS[0]:
        model, clock = train_artel(run)
    else:
        model, clock = train_with_trainer(run, bf16=options.one == CONTESTANTS[2])
    judged = artel.open(model).evaluate(
        folder / "validation.jsonl", {"data.block": _BLOCK, "data.sources.0.format": "entities"}, tell=lambda *_: None
    )
    return {"metrics": judged.metrics, "speed": clock.rate(BEGINNINGS[options.beginning]["batch"])}


# Baselines ---------------------------------------------------------------------------------


def tagged_words(folder: Path, name: str) -> Iterator[tuple[list[str], list[str], Any]]:
    """(words, tags in BIO, (gold spans, starts, ends)) of each text."""
    import artel
    from artel.config import RunConfig
    from artel.objectives import objective_of
    from artel.text import Document, Record, Tagged

    run = run_file(folder, "from scratch", "", 0, 1e-3)
    prepared = artel.prepare(run, tell=lambda *_: None)
    objective = objective_of(prepared.config or RunConfig(), prepared.tokenizer())
    for line in (folder / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        spans = tuple((span["start"], span["end"], span["label"]) for span in row["entities"])
        document = Document(Record(row["text"], "", "", Tagged(row["text"], spans)), "validation")
        (made,) = objective.samples([document])
        source = made.source
        words = [row["text"][start:end] for start, end in zip(source["starts"], source["ends"], strict=True)]
        tags = ["O"] * len(words)
        for start, end, label in source["spans"]:
            inside = [
                at
                for at, (a, b) in enumerate(zip(source["starts"], source["ends"], strict=True))
                if a < end and b > start
            ]
            for at in inside:
                tags[at] = f"{'B' if at == inside[0] else 'I'}-{label}"
        yield words, tags, (source["spans"], source["starts"], source["ends"])


def baselines(folder: Path) -> dict[str, dict[str, float]]:
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    train, held_out = list(tagged_words(folder, "train.jsonl")), list(tagged_words(folder, "validation.jsonl"))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for words, tags, _ in train:
        for word, tag in zip(words, tags, strict=True):
            counts[word][tag] += 1
    common = {word: count.most_common(1)[0][0] for word, count in counts.items()}
    model = make_pipeline(DictVectorizer(), LogisticRegression(max_iter=200, C=3.0))
    model.fit(
        [each for words, _, _ in train for each in features(words)], [tag for _, tags, _ in train for tag in tags]
    )
    return {
        "commonest tag of a word": judged(
            held_out, [[common.get(word, "O") for word in words] for words, _, _ in held_out]
        ),
        "logistic regression": judged(held_out, [list(model.predict(features(words))) for words, _, _ in held_out]),
    }


def features(words: list[str]) -> list[dict[str, Any]]:
    rows = []
    for at in range(len(words)):
        row: dict[str, Any] = {}
        for by in (-2, -1, 0, 1, 2):
            word = words[at + by] if 0 <= at + by < len(words) else ""
            row |= {f"{by} word {word.lower()}": 1, f"{by} end {word[-3:]}": 1, f"{by} title {word.istitle()}": 1,
                    f"{by} upper {word.isupper()}": 1, f"{by} mark {word.isalnum()}": 1}  # fmt: skip
        rows.append(row)
    return rows


def judged(texts: list[Any], tags: list[list[str]]) -> dict[str, float]:
    from artel.objectives.tokens.entities import Scores, entity_words

    scores = Scores()
    for (_, _, (spans, starts, ends)), own in zip(texts, tags, strict=True):
        found = [(starts[a], ends[b - 1], label) for a, b, label in entity_words(own, starts, ends, of_words=False)]
        scores.add(spans, found)
    return {**scores.micro(), "macro_f1": scores.macro_f1()}


# The whole ---------------------------------------------------------------------------------


def split(data: Path, folder: Path) -> None:
    """contest/ and choice/, each with train.jsonl and validation.jsonl; the choice is made among the texts to learn."""
    lines = data.read_text(encoding="utf-8").splitlines()
    random.Random(0).shuffle(lines)
    held_out, learned = lines[:_HELD_OUT], lines[_HELD_OUT:]
    write_parts(folder / "contest", learned, held_out)
    write_parts(folder / "choice", learned[:-_CHOOSING], learned[-_CHOOSING:])


def write_parts(folder: Path, train: list[str], validation: list[str]) -> None:
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(train) + "\n", encoding="utf-8")
    (folder / "validation.jsonl").write_text("\n".join(validation) + "\n", encoding="utf-8")


def started(
    options: argparse.Namespace, folder: Path, contestant: str, beginning: str, seed: int, rate: float
) -> dict[str, Any]:
    """A run in a process of its own, unless its line is there."""
    given = BEGINNINGS[beginning]
    key = {"part": folder.name, "beginning": beginning, "contestant": contestant, "seed": seed, "learning_rate": rate,
           "steps": given["steps"], "batch": given["batch"]}  # fmt: skip
    command = [sys.executable, __file__, str(options.data), str(options.minilm), "--one", contestant, "--beginning",
               beginning, "--seed", str(seed), "--rate", str(rate), "--folder", str(folder)]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ARTEL_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}

    def run() -> dict[str, Any]:
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if ran.returncode:
            raise SystemExit(ran.stderr[-3000:])
        result: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
        return result

    return once(options.results, key, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("minilm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=Path("runs/entities.jsonl"))
    for name in ("one", "beginning", "folder"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options)))
        return
    with tempfile.TemporaryDirectory() as name:
        split(options.data, Path(name))
        folder = Path(name) / "contest"
        os.environ["ARTEL_CACHE"] = str(folder / "cache")
        texts = len(options.data.read_text(encoding="utf-8").splitlines())
        chosen: list[str] = []
        lines = [
            f"{texts - _HELD_OUT} texts of factRuEval-2016's devset are learned, {_HELD_OUT} held out, in windows of",
            f"{_BLOCK} tokens.",
            "The mean over the seeds, in brackets the least and the largest f1.",
            "",
            "| | | precision | recall | f1 | macro f1 | windows/s of processor time |",
            "|---|---|---|---|---|---|---|",
        ]
        for baseline, figures in baselines(folder).items():
            lines.append(row("", baseline, [figures], []))
        for beginning, settings in BEGINNINGS.items():
            tried = {
                rate: started(options, Path(name) / "choice", CONTESTANTS[1], beginning, 0, rate)["metrics"]["f1"]
                for rate in settings["rates"]
            }
            rate = max(tried, key=lambda each: tried[each])
            reached = ", ".join(f"{f1:.3f} at {each:g}" for each, f1 in tried.items())
            chosen += [
                "",
                f"{beginning}: {settings['steps']} steps of {settings['batch']} at the learning rate {rate:g}. On the",
                f"texts that choose it the Trainer's f1 is {reached}.",
            ]
            results: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
            for seed in options.seeds:  # in turns, so that a busy minute meets all
                for contestant in CONTESTANTS[: None if seed == options.seeds[0] else 2]:
                    results[contestant].append(started(options, folder, contestant, beginning, seed, rate))
            for contestant, runs in results.items():
                own = results[CONTESTANTS[0]]
                ratios = [ours["speed"] / run["speed"] for ours, run in zip(own, runs, strict=False)]
                lines.append(row(beginning, contestant, [run["metrics"] for run in runs], ratios, runs))
    command = "benchmarks/entities.py ../shared/data/encoders/factrueval_dev.jsonl all-MiniLM-L6-v2"
    title = "Names in Russian news, beside the Trainer and plain baselines"
    write_page(Path(__file__).with_suffix(".md"), title, command, options.results, lines + chosen)


def row(beginning: str, name: str, figures: list[dict[str, float]], ratios: list[float], runs: Any = ()) -> str:
    """A row of the table: means over the seeds, and the spread of f1."""
    cells = [
        f"{statistics.mean(each[key] for each in figures):.4f}" for key in ("precision", "recall", "f1", "macro_f1")
    ]
    if len(figures) > 1:
        cells[2] += f" ({min(each['f1'] for each in figures):.4f} to {max(each['f1'] for each in figures):.4f})"
    speed = ""
    if ratios:
        speed = f"{statistics.mean(run['speed'] for run in runs):.2f}"
        speed += f"; artel {statistics.median(ratios):.2f} ×" if name != CONTESTANTS[0] else ""
    return f"| {beginning} | {name} | {' | '.join(cells)} | {speed} |"


if __name__ == "__main__":
    main()
