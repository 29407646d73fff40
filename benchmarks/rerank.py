"""Rerankers on questions and paragraphs: order of held-out paragraphs beside plain baselines and sentence-transformers.

    python benchmarks/rerank.py --encoder FOLDER [--data ../shared/data] [--language ru] [--results FILE.jsonl]

Articles of xquad are learned or held out whole. A held-out question has ten candidates: its paragraph and nine others,
of its own article first, which are the hard ones; the same for everybody. Paragraphs are cut short, so that minutes of
one core suffice. Both train with the same pairs (a paragraph that matches and two that do not), batch, rate, schedule
and steps, in a process of its own with one thread, as they come: artel in bf16 where the processor has it,
sentence-transformers in float32; for the first seed each in the other precision too. Speed is pairs for each second of
the processor from the end of the sixth step to that of the last. Each run is a line of the results, and the same
command goes on with what is missing. Writes benchmarks/rerank.md, for Russian rerank.ru.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from contestants import StepClock, once, run_alone, write_page

HERE = Path(__file__).parent
BLOCK, BATCH, NEGATIVES, RATE, STEPS = 96, 8, 2, 5e-5, 60
CANDIDATES, HELD, CHARACTERS = 10, 100, 250


def split(data: Path, language: str, folder: Path) -> list[dict[str, Any]]:
    """Writes train.jsonl and held.jsonl (query, positive, negatives) into `folder`; returns the held-out rows."""
    articles = json.loads((data / f"qa/xquad.{language}.first36.json").read_text(encoding="utf-8"))["data"]
    chance = random.Random(0)
    chance.shuffle(articles)
    cut = 2 * len(articles) // 3
    parts = {"train": articles[:cut], "held": articles[cut:]}
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, part in parts.items():
        texts = [[paragraph["context"][:CHARACTERS] for paragraph in article["paragraphs"]] for article in part]
        rows[name] = []
        for number, article in enumerate(part):
            others = [text for at, own in enumerate(texts) for text in own if at != number]
            for paragraph in article["paragraphs"]:
                mine = paragraph["context"][:CHARACTERS]
                near = [text for text in texts[number] if text != mine]
                for question in paragraph["qas"]:
                    count = CANDIDATES - 1 if name == "held" else NEGATIVES
                    chosen = chance.sample(near, min(len(near), count))
                    chosen += chance.sample(others, count - len(chosen))
                    rows[name].append({"query": question["question"], "positive": mine, "negatives": chosen})
        chance.shuffle(rows[name])
    rows["held"] = rows["held"][:HELD]
    for name, lines in rows.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return rows["held"]


def figures(scores: list[np.ndarray]) -> tuple[float, float]:
    """(MRR, share whose paragraph is first) of the candidates' scores of each question, its own paragraph first."""
    places = np.array([1 + (one[1:] >= one[0]).sum() for one in scores])
    return float((1 / places).mean()), float((places == 1).mean())


def by_words(held: list[dict[str, Any]]) -> tuple[float, float]:
    from sklearn.feature_extraction.text import TfidfVectorizer

    documents = [[row["positive"], *row["negatives"]] for row in held]
    vectors = TfidfVectorizer(sublinear_tf=True).fit(sorted({text for own in documents for text in own}))
    asked = vectors.transform([row["query"] for row in held])
    return figures([(vectors.transform(own) @ asked[number].T).toarray()[:, 0] for number, own in enumerate(documents)])


def by_vectors(held: list[dict[str, Any]], encoder: str) -> tuple[float, float]:
    """The encoder as it is: cosines of question and paragraph."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(encoder, device="cpu")
    scores = []
    for row in held:
        query, *documents = model.encode([row["query"], row["positive"], *row["negatives"]], normalize_embeddings=True)
        scores.append(np.array(documents) @ query)
    return figures(scores)


# Contestants, each in a process of its own --------------------------------------------


def artel_run(options: argparse.Namespace, clock: StepClock, *, fp32: bool) -> tuple[float, float]:
    import artel

    def matches(name: str) -> dict[str, Any]:
        return {"path": f"{name}.jsonl", "format": "matches"}

    run = {
        "run": "artel", "seed": options.seed, "objective": "rerank", "model": {"from": options.model},
        "rerank": {"negatives": NEGATIVES, "candidates": CANDIDATES},
        "data": {"sources": [matches("train")], "validation": "held.jsonl", "block": BLOCK},
        "train": {"steps": STEPS, "batch": BATCH, "learning_rate": RATE, "weight_decay": 0,
                  "betas": [0.9, 0.999], "schedule": "linear", "warmup": 0.1, "threads": 1,
                  "precision": "fp32" if fp32 else "auto"},
        "validate": {"every": 10_000}, "checkpoint": {"every": "never"}, "track": ["jsonl"],
    }  # fmt: skip
    trained = artel.train(run, callbacks=[clock.note], tell=lambda _: None)
    result = json.loads((trained.folder / "result.json").read_bytes())["validation"]
    return result["mrr"], result["accuracy"]


def sentence_transformers_run(options: argparse.Namespace, clock: StepClock, *, fp32: bool) -> tuple[float, float]:
    import torch
    from datasets import Dataset
    from sentence_transformers.cross_encoder import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    texts = (Path(f"{name}.jsonl").read_text(encoding="utf-8") for name in ("train", "held"))
    rows, held = ([json.loads(line) for line in text.splitlines()] for text in texts)
    pairs = [(row["query"], text, float(text == row["positive"]))
             for row in rows for text in (row["positive"], *row["negatives"])]  # fmt: skip
    names = ("query", "document", "label")
    data = Dataset.from_dict({name: list(values) for name, values in zip(names, zip(*pairs, strict=True), strict=True)})
    model = CrossEncoder(options.model, num_labels=1, max_length=BLOCK, device="cpu")
    arguments = CrossEncoderTrainingArguments(
        output_dir="st", seed=options.seed, max_steps=STEPS, bf16=not fp32,
        per_device_train_batch_size=BATCH * (1 + NEGATIVES), learning_rate=RATE, lr_scheduler_type="linear",
        warmup_steps=0.1, weight_decay=0.0, max_grad_norm=1.0, use_cpu=True, report_to=[], save_strategy="no",
        logging_steps=1000, disable_tqdm=True,
    )  # fmt: skip

    class Noted(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.note()

    trainer = CrossEncoderTrainer(
        model, arguments, train_dataset=data, loss=BinaryCrossEntropyLoss(model), callbacks=[Noted()]
    )
    trainer.train()
    asked = [(row["query"], text) for row in held for text in (row["positive"], *row["negatives"])]
    return figures(list(np.asarray(model.predict(asked, show_progress_bar=False)).reshape(len(held), CANDIDATES)))


CONTESTANTS = {"artel": artel_run, "sentence-transformers": sentence_transformers_run}
AS_THEY_COME = {"artel": False, "sentence-transformers": True}
"""Whether float32 is what a contestant takes by itself."""


def contest(name: str, folder: Path, model: str, seed: int, *, fp32: bool) -> dict[str, Any]:
    """(MRR, share first) of a contestant and its pairs a second, in a process of its own."""
    words = ["--contestant", name, "--model", model, "--seed", str(seed)]
    words += ["--fp32"] * fp32
    return run_alone(__file__, words, folder)


def row_of(title: str, runs: list[tuple[float, float]], speed: str = "") -> str:
    cells = []
    for values in zip(*runs, strict=True):
        each = f" ({', '.join(f'{value:.2f}' for value in values)})" if len(values) > 1 else ""
        cells.append(f"{np.mean(values):.3f}{each}")
    return f"| {title} | {' | '.join(cells)} | {speed} |"


def rows_of(results: dict[tuple[str, bool], list[dict[str, Any]]]) -> list[str]:
    """A line for each contestant and precision; the ratio is that of artel as it comes, and in the same precision."""
    rates = {key: float(np.mean([run["rate"] for run in runs])) for key, runs in results.items()}
    rows = []
    for (name, fp32), runs in results.items():
        speed = f"{rates[name, fp32]:.1f}"
        if name != "artel":
            as_it_comes, alike = rates["artel", False], rates["artel", fp32]
            speed += f"; artel {as_it_comes / rates[name, fp32]:.2f} ×, in the same precision "
            speed += f"{alike / rates[name, fp32]:.2f} ×"
        precision = "float32" if fp32 else "bf16"
        rows.append(row_of(f"{name}, {precision}", [tuple(run["metrics"]) for run in runs], speed))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder of real texts")
    parser.add_argument("--encoder", help="the folder of a small encoder: all-MiniLM-L6-v2")
    parser.add_argument("--language", choices=("en", "ru"), default="en", help="of the questions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=Path("runs/rerank.jsonl"))
    for name in ("contestant", "model"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fp32", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        clock = StepClock()
        reached = CONTESTANTS[options.contestant](options, clock, fp32=options.fp32)
        print(json.dumps({"metrics": reached, "rate": clock.rate(BATCH * (1 + NEGATIVES))}))
        return
    encoder = str(Path(options.encoder).resolve())
    results: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        held = split(options.data, options.language, folder)
        rows = [row_of("tf-idf", [by_words(held)])]
        rows.append(row_of("all-MiniLM-L6-v2 as it is, cosine of vectors", [by_vectors(held, encoder)]))
        for seed in options.seeds:  # in turns, so that a busy minute meets both
            for other in (False, True) if seed == options.seeds[0] else (False,):
                for name, own in AS_THEY_COME.items():
                    fp32 = own != other
                    key = {"contestant": name, "fp32": fp32, "seed": seed, "language": options.language}
                    key |= {"steps": STEPS, "batch": BATCH, "learning_rate": RATE}
                    train = functools.partial(contest, name, folder, encoder, seed, fp32=fp32)
                    results.setdefault((name, fp32), []).append(once(options.results, key, train))
    write(options, len(held), rows + rows_of(results))


def write(options: argparse.Namespace, held: int, rows: list[str]) -> None:
    more = "" if options.language == "en" else f" --language {options.language}"
    lines = [
        f"{STEPS} steps of {BATCH} questions of xquad.{options.language}, each with its paragraph and {NEGATIVES}",
        f"others (block {BLOCK}, {CHARACTERS} characters of a paragraph); {held} questions of other articles, each",
        f"with {CANDIDATES} candidates. Cross-encoders from all-MiniLM-L6-v2; the mean over the seeds, and each.",
        "",
        "| | MRR | its paragraph is first | pairs a second of the processor |",
        "|---|---|---|---|",
        *rows,
        "",
        "By themselves artel takes bf16 (where the processor has it) and sentence-transformers float32.",
    ]
    page = HERE / ("rerank.md" if options.language == "en" else f"rerank.{options.language}.md")
    command = f"benchmarks/rerank.py --encoder FOLDER{more}"
    write_page(page, "Reranking beside sentence-transformers", command, options.results, lines)


if __name__ == "__main__":
    main()
