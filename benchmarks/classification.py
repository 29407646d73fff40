"""Whose paragraph is it? Six authors, their books' last chapters held out: artel, transformers' Trainer, and tf-idf.

    python benchmarks/classification.py --data ../shared/data/literature --minilm FOLDER [--seeds 3]

Of each book every paragraph of 40 characters or more is a text and its author the label; at most --most of each author,
evenly spread. The first 85 % of a book is learned, the rest is held out. Two models are trained: a small one from
scratch with a tokenizer of its own, and all-MiniLM-L6-v2 (an English encoder, which sees Russian letter by letter).
artel and Trainer get the same paragraphs, tokens, steps, batch, optimizer and weights to begin with; each has its own
order of batches. Examples/s are of processor time (`time.process_time`) in training steps, the first ones left
out, so that a busy machine does not show. Everything is written below --work; each training is a line of its
results.jsonl, and the same command goes on with what is missing. Writes benchmarks/classification.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from contestants import StepClock, once, write_page

BOOKS = {"Толстой": "anna_karenina", "Достоевский": "crime_and_punishment", "Пушкин": "eugene_onegin",
         "Тургенев": "fathers_and_sons", "Лермонтов": "a_hero_of_our_time", "Гончаров": "oblomov"}  # fmt: skip
SHORTEST, HELD_OUT = 40, 0.15
SCRATCH = {"model_type": "bert", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 512}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    name: str
    model: dict
    tokenizer: dict
    block: int
    steps: int
    rate: float
    batch: int = 32


@dataclass(frozen=True)
class Result:
    accuracy: float
    macro_f1: float
    examples_per_second: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of books, a paragraph a line")
    parser.add_argument("--minilm", type=Path, help="all-MiniLM-L6-v2; without it from scratch alone")
    parser.add_argument("--work", type=Path, default=Path("runs/classification"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=600, help="paragraphs of each author")
    parser.add_argument("--one", nargs=3, metavar=("CASE", "CONTESTANT", "SEED"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    cases = [Case("from scratch", {"config": SCRATCH}, {"train": {"vocab": 8192}}, 128, 150, 1e-3)]
    if asked.minilm:
        cases.append(Case("MiniLM", {"from": str(asked.minilm)}, {}, 96, 100, 3e-4, batch=16))
    if asked.one:
        name, contestant, seed = asked.one
        result = CONTESTANTS[contestant](next(case for case in cases if case.name == name), asked.work, int(seed))
        print(json.dumps(asdict(result)))
        return
    asked.work.mkdir(parents=True, exist_ok=True)
    counts = write_paragraphs(asked.data, asked.work, asked.most)
    lines = [
        f"{counts['train']:,} paragraphs of six authors are learned, {counts['heldout']:,} of last chapters held out.",
        *(f"{case.name}: {case.steps} steps of {case.batch}, block {case.block}." for case in cases),
        "The mean over the seeds ± the standard deviation, and how many seeds.",
        "",
        "| model | contestant | accuracy | macro F1 | seeds | examples/s of a processor |",
        "|---|---|---|---|---|---|",
        table_row("none", "the commonest author", [commonest(asked.work)]),
        table_row("none", "tf-idf and logistic regression", [baseline(asked.work)]),
    ]
    results = asked.work / "results.jsonl"
    for case in cases:
        found: dict[str, list[Result]] = {name: [] for name in CONTESTANTS}
        for seed, name in itertools.product(range(asked.seeds), CONTESTANTS):
            if seed and name in FOR_SPEED:
                continue
            key = {"case": case.name, "steps": case.steps, "batch": case.batch, "contestant": name, "seed": seed}
            done = once(results, key, lambda case=case, name=name, seed=seed: in_process(case, name, seed))
            found[name].append(Result(*(done[each] for each in Result.__annotations__)))
        speeds = {name: statistics.mean(result.examples_per_second for result in found[name]) for name in found}
        lines += [table_row(case.name, name, found[name], speeds["artel"]) for name in found]
    title = "Classification beside transformers' Trainer and tf-idf"
    command = "benchmarks/classification.py --data ../shared/data/literature --minilm FOLDER"
    write_page(Path(__file__).with_suffix(".md"), title, command, results, lines)


def in_process(case: Case, contestant: str, seed: int) -> dict[str, float]:
    """Each training in a process of its own, with one thread: nothing of one is left for the next."""
    command = [sys.executable, *sys.argv, "--one", case.name, contestant, str(seed)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def table_row(model: str, contestant: str, results: list[Result], artel: float | None = None) -> str:
    def figure(name: str) -> str:
        values = [getattr(result, name) for result in results]
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.3f}{spread}"

    speed = statistics.mean(result.examples_per_second for result in results)
    ratio = f" (artel: {artel / speed:.2f} times)" if artel and speed and contestant != "artel" else ""
    shown = f"{speed:.1f}{ratio}" if speed else ""
    return f"| {model} | {contestant} | {figure('accuracy')} | {figure('macro_f1')} | {len(results)} | {shown} |"


def write_paragraphs(data: Path, work: Path, most: int) -> dict[str, int]:
    """Write train/AUTHOR/BOOK.txt and heldout/AUTHOR/BOOK.txt, a paragraph a line; returns how many."""
    counts = {"train": 0, "heldout": 0}
    for part in counts:
        shutil.rmtree(work / part, ignore_errors=True)
    for author, book in BOOKS.items():
        lines = (data / f"{book}.txt").read_text(encoding="utf-8").splitlines()
        paragraphs = [line.strip() for line in lines if len(line.strip()) >= SHORTEST]
        cut = round(len(paragraphs) * (1 - HELD_OUT))
        for part, chosen in (("train", paragraphs[:cut]), ("heldout", paragraphs[cut:])):
            wanted = min(len(chosen), round(most * (HELD_OUT if part == "heldout" else 1 - HELD_OUT)))
            spread = [chosen[number * len(chosen) // wanted] for number in range(wanted)]
            file = work / part / author / f"{book}.txt"
            file.parent.mkdir(parents=True)
            file.write_text("\n".join(spread), encoding="utf-8")
            counts[part] += wanted
    return counts


def paragraphs_of(work: Path, part: str) -> tuple[list[str], list[str]]:
    """(texts, authors)."""
    files = sorted((work / part).rglob("*.txt"))
    rows = [(line, file.parent.name) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [text for text, _ in rows], [author for _, author in rows]


def scores(gold: list[str], predicted: list[str]) -> tuple[float, float]:
    from sklearn.metrics import accuracy_score, f1_score

    return float(accuracy_score(gold, predicted)), float(f1_score(gold, predicted, average="macro"))


def commonest(work: Path) -> Result:
    """The author with most paragraphs to learn, for each."""
    _, learned = paragraphs_of(work, "train")
    _, gold = paragraphs_of(work, "heldout")
    return Result(*scores(gold, [max(sorted(set(learned)), key=learned.count)] * len(gold)), 0.0)


def baseline(work: Path) -> Result:
    """Words and pairs of words, weighed by tf-idf, and logistic regression with scikit-learn's defaults."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LogisticRegression(max_iter=1000))
    model.fit(*paragraphs_of(work, "train"))
    texts, gold = paragraphs_of(work, "heldout")
    return Result(*scores(gold, list(model.predict(texts))), 0.0)


def run_of(case: Case, work: Path, seed: int) -> dict:
    return {
        "run": str(work / f"artel-{case.name.replace(' ', '-')}-{seed}"),
        "seed": seed,
        "data": {"sources": [{"path": str(work / "train"), "format": "labels", "document": "line"}],
                 "validation": str(work / "heldout"), "block": case.block, "store": str(work / "stores")},
        "tokenizer": case.tokenizer, "model": case.model, "objective": "classification",
        "train": {"steps": case.steps, "batch": case.batch, "learning_rate": case.rate, "schedule": "linear",
                  "warmup": 0.1, "weight_decay": 0.01, "betas": [0.9, 0.999], "threads": 1},
        "validate": {"every": "never"}, "checkpoint": {"every": "never"}, "track": ["jsonl"],
    }  # fmt: skip


def train_artel(case: Case, work: Path, seed: int) -> Result:
    import artel

    clock = StepClock()
    shutil.rmtree(run_of(case, work, seed)["run"], ignore_errors=True)  # of a run that was broken off
    run = artel.train(run_of(case, work, seed), callbacks=[clock.note], tell=lambda text: None)
    texts, gold = paragraphs_of(work, "heldout")
    answers = artel.open(run.folder).classify(texts)
    return Result(*scores(gold, [answer["label"] for answer in answers]), clock.rate(case.batch))


def train_trainer(case: Case, work: Path, seed: int, *, bf16: bool) -> Result:
    """As transformers' guide to text classification has it: rows padded to the longest of their batch."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    torch.set_num_threads(1)
    # artel's untrained model and tokenizer: the same weights to begin with.
    begin = work / f"begin-{case.name.replace(' ', '-')}-{seed}"
    begin_model(case, work, seed, begin)
    model, tokenizer = (kind.from_pretrained(begin) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    numbers = model.config.label2id
    clock = StepClock()

    def rows(part: str) -> list[dict]:
        texts, authors = paragraphs_of(work, part)
        encoded = tokenizer(texts, truncation=True, max_length=case.block)
        return [
            {**{name: values[row] for name, values in encoded.items()}, "labels": numbers[author]}
            for row, author in enumerate(authors)
        ]

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            clock.note()

    arguments = TrainingArguments(
        output_dir=str(work / "trainer"), seed=seed, max_steps=case.steps, per_device_train_batch_size=case.batch,
        per_device_eval_batch_size=case.batch, learning_rate=case.rate, lr_scheduler_type="linear",
        warmup_steps=round(0.1 * case.steps), weight_decay=0.01, use_cpu=True, bf16=bf16, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    collator = DataCollatorWithPadding(tokenizer)
    trainer = Trainer(model, arguments, collator, train_dataset=rows("train"), callbacks=[Steps()])
    trainer.train()
    predicted = trainer.predict(rows("heldout")).predictions.argmax(axis=1)
    _, gold = paragraphs_of(work, "heldout")
    return Result(*scores(gold, [model.config.id2label[int(number)] for number in predicted]),
                  clock.rate(case.batch))  # fmt: skip


def begin_model(case: Case, work: Path, seed: int, folder: Path) -> None:
    """Write the model of artel's run before its first step."""
    from artel.config import load_run
    from artel.inference import open_untrained

    file = work / f"begin-{seed}.json"
    file.write_text(json.dumps(run_of(case, work, seed)), encoding="utf-8")
    opened = open_untrained(load_run(str(file)), lambda text: None)
    opened.model.save_pretrained(folder)
    opened.tokenizer.save(folder)


CONTESTANTS = {
    "artel": train_artel,
    "Trainer": lambda *case: train_trainer(*case, bf16=False),
    "Trainer, bf16": lambda *case: train_trainer(*case, bf16=True),
}
FOR_SPEED = ("Trainer, bf16",)
"""Trained once, to be timed."""

if __name__ == "__main__":
    main()
