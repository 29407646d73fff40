"""Rerankers on questions and paragraphs: order of held-out paragraphs beside plain baselines and sentence-transformers.

    python benchmarks/rerank.py --data ../shared/data --encoder FOLDER [--language ru]

Articles of xquad are learned or held out whole. A held-out question has ten candidates: its paragraph and nine others,
of its own article first, which are the hard ones; the same for everybody. Paragraphs are cut short, so that minutes of
one core suffice. Both train with the same pairs (a paragraph that matches and two that do not), batch, rate, schedule,
precision and steps, in a process of its own with one thread. The time is the processor's, of a whole run, and that of a
run of two steps before it is taken away. Writes benchmarks/rerank.md, for Russian rerank.ru.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
BLOCK, BATCH, NEGATIVES, RATE, SEEDS = 96, 8, 2, 5e-5, (0, 1, 2)
STEPS, SHORT, CANDIDATES, HELD, CHARACTERS = 12, 2, 10, 40, 250
ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


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


def artel_run(options: argparse.Namespace, steps: int, seed: int) -> tuple[float, float]:
    import artel

    def matches(name: str) -> dict[str, Any]:
        return {"path": f"{name}.jsonl", "format": "matches"}

    run = {
        "run": f"artel-{steps}-{seed}", "seed": seed, "objective": "rerank", "model": {"from": options.model},
        "rerank": {"negatives": NEGATIVES, "candidates": CANDIDATES},
        "data": {"sources": [matches("train")], "validation": "held.jsonl", "block": BLOCK},
        "train": {"steps": steps, "batch": BATCH, "learning_rate": RATE, "weight_decay": 0,
                  "betas": [0.9, 0.999], "schedule": "linear", "warmup": 0.1, "precision": "fp32", "compile": "off",
                  "threads": 1, "micro_batch": BATCH},
        "checkpoint": {"every": 10_000}, "track": ["jsonl"],
    }  # fmt: skip
    trained = artel.train(run, tell=lambda _: None)
    result = json.loads((trained.folder / "result.json").read_bytes())["validation"]
    return result["mrr"], result["accuracy"]


def sentence_transformers_run(options: argparse.Namespace, steps: int, seed: int) -> tuple[float, float]:
    import torch
    from datasets import Dataset
    from sentence_transformers.cross_encoder import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    texts = (Path(f"{name}.jsonl").read_text(encoding="utf-8") for name in ("train", "held"))
    rows, held = ([json.loads(line) for line in text.splitlines()] for text in texts)
    pairs = [(row["query"], text, float(text == row["positive"]))
             for row in rows for text in (row["positive"], *row["negatives"])]  # fmt: skip
    names = ("query", "document", "label")
    data = Dataset.from_dict({name: list(values) for name, values in zip(names, zip(*pairs, strict=True), strict=True)})
    model = CrossEncoder(options.model, num_labels=1, max_length=BLOCK, device="cpu")
    arguments = CrossEncoderTrainingArguments(
        output_dir="st", seed=seed, max_steps=steps,
        per_device_train_batch_size=BATCH * (1 + NEGATIVES), learning_rate=RATE, lr_scheduler_type="linear",
        warmup_steps=0.1, weight_decay=0.0, max_grad_norm=1.0, use_cpu=True, report_to=[], save_strategy="no",
        logging_steps=1000, disable_tqdm=True,
    )  # fmt: skip
    trainer = CrossEncoderTrainer(model, arguments, train_dataset=data, loss=BinaryCrossEntropyLoss(model))
    trainer.train()
    asked = [(row["query"], text) for row in held for text in (row["positive"], *row["negatives"])]
    return figures(list(np.asarray(model.predict(asked, show_progress_bar=False)).reshape(len(held), CANDIDATES)))


CONTESTANTS = {"artel": artel_run, "sentence-transformers": sentence_transformers_run}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the seeds, and pairs a second of the processor."""
    run = CONTESTANTS[name]
    run(options, SHORT, 0)  # what happens once is over: imports, texts to tokens
    seconds, found = [], []
    for steps, seed in ((SHORT, 10), *((STEPS, seed) for seed in SEEDS)):
        began = time.process_time()
        found.append(run(options, steps, seed))
        seconds.append(time.process_time() - began)
    short, *whole = seconds
    pairs = (STEPS - SHORT) * BATCH * (1 + NEGATIVES)
    return {"figures": found[1:], "pace": pairs / (float(np.median(whole)) - short)}


def contest(name: str, folder: Path, model: str) -> dict[str, Any]:
    """What `measure` finds, in a process of its own."""
    words = [sys.executable, __file__, "--contestant", name, "--model", model]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for file in folder.glob("*.jsonl"):
            (Path(place) / file.name).symlink_to(file)
        done = subprocess.run(words, cwd=place, capture_output=True, text=True, env={**os.environ, **ONE_THREAD})
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def row_of(title: str, runs: list[tuple[float, float]]) -> str:
    cells = []
    for values in zip(*runs, strict=True):
        each = f" ({', '.join(f'{value:.2f}' for value in values)})" if len(values) > 1 else ""
        cells.append(f"{np.mean(values):.3f}{each}")
    return f"| {title} | {' | '.join(cells)} |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder of real texts")
    options.add_argument("--encoder", help="the folder of a small encoder: all-MiniLM-L6-v2")
    options.add_argument("--language", choices=("en", "ru"), default="en", help="of the questions")
    for name in ("--contestant", "--model"):
        options.add_argument(name, default="", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.contestant:
        print(json.dumps(measure(chosen.contestant, chosen)))
        return
    encoder = str(Path(chosen.encoder).resolve())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        held = split(chosen.data, chosen.language, folder)
        rows = [row_of("tf-idf", [by_words(held)])]
        rows.append(row_of("all-MiniLM-L6-v2 as it is, cosine of vectors", [by_vectors(held, encoder)]))
        print(*rows, sep="\n", file=sys.stderr)
        with ThreadPoolExecutor(len(CONTESTANTS)) as pool:  # side by side, one core each
            running = {name: pool.submit(contest, name, folder, encoder) for name in CONTESTANTS}
            found = {name: one.result() for name, one in running.items()}
        for name, one in found.items():
            rows.append(row_of(f"cross-encoder from all-MiniLM-L6-v2: {name}", one["figures"]))
            print(rows[-1], f"{one['pace']:.1f} pairs/s", file=sys.stderr)
        paces = [one["pace"] for one in found.values()]
    write(chosen.language, len(held), rows, paces)


def write(language: str, held: int, rows: list[str], paces: list[float]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    mine, theirs = paces
    lines = [
        "# Reranking beside sentence-transformers",
        "",
        f"`python benchmarks/rerank.py --encoder FOLDER --language {language}` on {datetime.date.today():%d.%m.%Y},",
        f"at {commit}. {STEPS} steps of {BATCH} questions of xquad.{language}, each with its paragraph and {NEGATIVES}",
        f"others (block {BLOCK}, float32, {CHARACTERS} characters of a paragraph); {held} questions of other articles,",
        f"each with {CANDIDATES} candidates. Of three seeds the mean, and each.",
        "",
        "| | MRR | its paragraph is first |",
        "|---|---|---|",
        *rows,
        "",
        "Questions with a paragraph a second of the processor, with one thread, of whole training steps:",
        f"artel {mine:.1f}, sentence-transformers {theirs:.1f}; the ratio is {mine / theirs:.2f}.",
    ]
    page = HERE / ("rerank.md" if language == "en" else f"rerank.{language}.md")
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
