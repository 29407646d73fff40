"""Rerankers on questions and paragraphs: order of held-out paragraphs beside plain baselines and sentence-transformers.

    python benchmarks/rerank.py --encoder FOLDER [--data ../shared/data] [--language ru --out FILE]

Articles of xquad are learned or held out whole. A held-out question has ten candidates: its paragraph and nine others,
of its own article first, which are the hard ones; the same for everybody. Paragraphs are cut short, so that minutes of
one core suffice. Both train with the same pairs (a paragraph that matches and two that do not), batch, rate, schedule
and steps, as they come: artel in bf16 where the processor has it, sentence-transformers in float32; for the first seed
each in the other precision too. Writes benchmarks/rerank.md.
"""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contest import Contest, Training, hold, read_json_lines, write_json_lines

BLOCK, BATCH, NEGATIVES, RATE, STEPS = 96, 8, 2, 5e-5, 60
CANDIDATES, HELD, CHARACTERS = 10, 100, 250


def arguments(parser):
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder of real texts")
    parser.add_argument("--encoder", type=Path, required=True, help="the folder of a small encoder: all-MiniLM-L6-v2")
    parser.add_argument("--language", choices=("en", "ru"), default="en", help="of the questions")


def cases(options):
    encoder = options.encoder.resolve()
    return {encoder.name: {"model": str(encoder), "language": options.language}}


def split(options, folder: Path) -> str:
    """Write train.jsonl and held.jsonl (query, positive, negatives)."""
    name = f"xquad.{options.language}"
    articles = json.loads((options.data / f"qa/{name}.first36.json").read_text(encoding="utf-8"))["data"]
    chance = random.Random(0)
    chance.shuffle(articles)
    cut = 2 * len(articles) // 3
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "held": []}
    for part, own, count in (("train", articles[:cut], NEGATIVES), ("held", articles[cut:], CANDIDATES - 1)):
        texts = [[paragraph["context"][:CHARACTERS] for paragraph in article["paragraphs"]] for article in own]
        for number, article in enumerate(own):
            others = [text for at, those in enumerate(texts) for text in those if at != number]
            for paragraph in article["paragraphs"]:
                mine = paragraph["context"][:CHARACTERS]
                near = [text for text in texts[number] if text != mine]
                for question in paragraph["qas"]:
                    chosen = chance.sample(near, min(len(near), count))
                    chosen += chance.sample(others, count - len(chosen))
                    rows[part].append({"query": question["question"], "positive": mine, "negatives": chosen})
        chance.shuffle(rows[part])
    write_json_lines(folder / "train.jsonl", rows["train"])
    write_json_lines(folder / "held.jsonl", rows["held"][:HELD])
    return (
        f"{STEPS} steps of {BATCH} questions of {name}, each with its paragraph and {NEGATIVES} others (block {BLOCK}, "
        f"{CHARACTERS} characters of a paragraph); {min(HELD, len(rows['held']))} questions of other articles, each "
        f"with {CANDIDATES} candidates. By themselves artel takes bf16 (where the processor has it) and "
        "sentence-transformers float32."
    )


def ranked(scores: list[np.ndarray]) -> dict[str, float]:
    """Metrics of the candidates' scores of each question, its own paragraph first."""
    ranks = np.array([1 + (one[1:] >= one[0]).sum() for one in scores])
    return {"mrr": float((1 / ranks).mean()), "accuracy": float((ranks == 1).mean())}


def baselines(options, folder: Path, case):
    from sentence_transformers import SentenceTransformer
    from sklearn.feature_extraction.text import TfidfVectorizer

    held = read_json_lines(folder / "held.jsonl")
    documents = [[row["positive"], *row["negatives"]] for row in held]
    words = TfidfVectorizer(sublinear_tf=True).fit(sorted({text for own in documents for text in own}))
    model = SentenceTransformer(str(options.encoder), device="cpu")

    def cosines(query: str, own: list[str]) -> np.ndarray:
        first, *others = model.encode([query, *own], normalize_embeddings=True)
        return np.array(others) @ first

    pairs = list(zip((row["query"] for row in held), documents, strict=True))
    return {
        "tf-idf": ranked([(words.transform(own) @ words.transform([query]).T).toarray()[:, 0] for query, own in pairs]),
        "the encoder as it is, cosine of vectors": ranked([cosines(*pair) for pair in pairs]),
    }


def train_artel(training: Training, *, fp32: bool):
    data = training.data
    run = training.artel({
        "objective": "rerank", "model": {"from": training.case["model"]}, "validate": {"every": 10_000},
        "rerank": {"negatives": NEGATIVES, "candidates": CANDIDATES},
        "data": {"sources": [{"path": str(data / "train.jsonl"), "format": "matches"}],
                 "validation": str(data / "held.jsonl"), "block": BLOCK},
        "train": {"steps": STEPS, "batch": BATCH, "learning_rate": RATE, "weight_decay": 0,
                  "precision": "fp32" if fp32 else "auto"},
    })  # fmt: skip
    result = json.loads((run / "result.json").read_bytes())["validation"]
    return {name: result[name] for name in ("mrr", "accuracy")} | {"speed": training.rate(BATCH * (1 + NEGATIVES))}


def train_sentence_transformers(training: Training, *, fp32: bool):
    import torch
    from datasets import Dataset
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    callback = training.trainer_callback()
    torch.manual_seed(training.seed)
    rows, held = (read_json_lines(training.data / f"{name}.jsonl") for name in ("train", "held"))
    pairs = [(row["query"], text, float(text == row["positive"]))
             for row in rows for text in (row["positive"], *row["negatives"])]  # fmt: skip
    columns = (list(values) for values in zip(*pairs, strict=True))
    data = Dataset.from_dict(dict(zip(("query", "document", "label"), columns, strict=True)))
    model = CrossEncoder(training.case["model"], num_labels=1, max_length=BLOCK, device="cpu")
    settings = training.trainer_arguments(
        CrossEncoderTrainingArguments, steps=STEPS, batch=BATCH * (1 + NEGATIVES), rate=RATE, weight_decay=0.0,
        bf16=not fp32,
    )  # fmt: skip
    loss = BinaryCrossEntropyLoss(model)
    CrossEncoderTrainer(model, settings, train_dataset=data, loss=loss, callbacks=[callback]).train()
    asked = [(row["query"], text) for row in held for text in (row["positive"], *row["negatives"])]
    scores = np.asarray(model.predict(asked, show_progress_bar=False)).reshape(len(held), CANDIDATES)
    return ranked(list(scores)) | {"speed": training.rate(BATCH * (1 + NEGATIVES))}


if __name__ == "__main__":
    hold(Contest(
        __file__, "Reranking beside sentence-transformers", __doc__,
        {"mrr": "MRR", "accuracy": "its paragraph is first"}, "pairs",
        {"artel": partial(train_artel, fp32=False),
         "sentence-transformers": partial(train_sentence_transformers, fp32=True),
         "artel, float32": partial(train_artel, fp32=True),
         "sentence-transformers, bf16": partial(train_sentence_transformers, fp32=False)},
        split, cases, baselines, first_seed_only=("artel, float32", "sentence-transformers, bf16"),
        same_precision={"sentence-transformers": "artel, float32"}, arguments=arguments,
    ))  # fmt: skip
