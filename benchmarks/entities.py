"""Names in Russian news (factRuEval-2016's devset, 122 texts): artel beside transformers' Trainer, and plain baselines.

    python benchmarks/entities.py DATA.jsonl MINILM_FOLDER [--seeds 0 1 2]

The texts are split by documents, 98 to learn from and 24 to judge by, the same ones for everybody. Both contestants
begin with the same weights, read the same windows with the same labels (the Trainer those of artel's store), see as
many of them in as many steps, with the same optimizer and learning rate, and are judged by `artel evaluate`: f1 of
whole names over whole documents. The learning rate is the one with which the Trainer has the highest f1 on the last 20
of the texts to learn from, having learned the other 78 (seed 0). From scratch a small BERT with a tokenizer of these
texts, else all-MiniLM-L6-v2 (English, so that it spells Russian words letter by letter). The Trainer is run as it comes
(float32), and for the first seed with bf16=True too. Writes benchmarks/entities.md.

Baselines: the commonest tag of a word, and logistic regression over the word, its ends and shape and those of its
neighbours (a CRF without the chain), both on artel's words.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from contest import Contest, Training, hold, read_json_lines

BERT = {"model_type": "bert", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 512}  # fmt: skip
BLOCK, BATCH, HELD_OUT, CHOOSING = 128, 16, 24, 20
RATES = {"from scratch": (600, (5e-4, 1e-3, 2e-3)), "MiniLM": (100, (3e-4, 1e-3))}
"""Steps, and the learning rates to choose from."""


def arguments(parser):
    parser.add_argument("data", type=Path)
    parser.add_argument("minilm", type=Path)


def split(options, folder: Path) -> str:
    """Write contest/ and choice/, each with train.jsonl and validation.jsonl; choice/ is within the learned texts."""
    lines = options.data.read_text(encoding="utf-8").splitlines()
    random.Random(0).shuffle(lines)
    held_out, learned = lines[:HELD_OUT], lines[HELD_OUT:]
    parts = {"contest": (learned, held_out), "choice": (learned[:-CHOOSING], learned[-CHOOSING:])}
    for part, texts in parts.items():
        (folder / part).mkdir()
        for name, rows in zip(("train", "validation"), texts, strict=True):
            (folder / part / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return (
        f"{len(learned)} texts of factRuEval-2016's devset are learned, {HELD_OUT} held out, in windows of {BLOCK} "
        "tokens. The learning rate is the one that is best for the Trainer on other texts."
    )


def cases(session):
    made = {}
    for model, (steps, rates) in RATES.items():
        case = {"model": model, "steps": steps, "part": "choice"}
        tried = {rate: session.train("Trainer", model, case | {"rate": rate}, 0)["f1"] for rate in rates}
        rate = max(tried, key=lambda each: tried[each])
        made[f"{model}, {steps} steps of {BATCH} at {rate:g}"] = case | {"part": "contest", "rate": rate}
    return made


def run_of(options, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    is_scratch, part = case["model"] == "from scratch", folder / case["part"]
    return {
        "data": {"sources": [{"path": str(part / "train.jsonl"), "format": "entities"}],
                 "validation": str(part / "validation.jsonl"), "block": BLOCK},
        "tokenizer": {"train": {"vocab": 4000}} if is_scratch else {},
        "model": {"config": BERT} if is_scratch else {"from": str(options.minilm.resolve())},
        "objective": "tokens",
        "train": {"steps": case["steps"], "batch": BATCH, "learning_rate": case["rate"]},
    }  # fmt: skip


def judged(training: Training, model: Path) -> dict[str, Any]:
    import artel

    overrides = {"data.block": BLOCK, "data.sources.0.format": "entities"}
    texts = training.data / training.case["part"] / "validation.jsonl"
    return artel.open(model).evaluate(texts, overrides).metrics | {"speed": training.rate(BATCH)}


def train_artel(training: Training):
    return judged(training, training.artel(run_of(training.options, training.data, training.case)) / "model")


def train_trainer(training: Training, *, bf16: bool):
    from transformers import (
        AutoModelForTokenClassification,
        DataCollatorForTokenClassification,
        Trainer,
        TrainingArguments,
    )

    import artel

    run = training.complete(run_of(training.options, training.data, training.case))
    prepared = artel.prepare(run)
    tokenizer, part = prepared.tokenizer(), prepared.open().train
    model = AutoModelForTokenClassification.from_pretrained(training.untrained(run))
    rows = []
    for number in range(part.samples):
        sample = part.sample(number)
        labels = sample.flags.astype(int) - 1  # -1: no first token of a word
        rows.append({"input_ids": sample.ids.tolist(), "labels": [-100 if label < 0 else label for label in labels]})
    case = training.case
    settings = training.trainer_arguments(
        TrainingArguments, steps=case["steps"], batch=BATCH, rate=case["rate"], bf16=bf16
    )
    collator, callbacks = DataCollatorForTokenClassification(tokenizer.hf), [training.trainer_callback()]
    Trainer(model, settings, train_dataset=rows, data_collator=collator, callbacks=callbacks).train()
    model.save_pretrained(training.folder / "model")
    tokenizer.save(training.folder / "model")
    return judged(training, training.folder / "model")


def baselines(options, folder: Path, case: dict[str, Any]):
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    if case["model"] != "from scratch":  # the same for every model
        return {}
    train, held_out = (list(tagged_words(options, folder, case, name)) for name in ("train", "validation"))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for words, tags, _ in train:
        for word, tag in zip(words, tags, strict=True):
            counts[word][tag] += 1
    common = {word: count.most_common(1)[0][0] for word, count in counts.items()}
    model = make_pipeline(DictVectorizer(), LogisticRegression(max_iter=200, C=3.0))
    model.fit([row for words, _, _ in train for row in features(words)], [tag for _, tags, _ in train for tag in tags])
    return {
        "commonest tag of a word": scored(held_out, lambda words: [common.get(word, "O") for word in words]),
        "logistic regression": scored(held_out, lambda words: list(model.predict(features(words)))),
    }


def tagged_words(
    options, folder: Path, case: dict[str, Any], name: str
) -> Iterator[tuple[list[str], list[str], dict[str, Any]]]:
    """(words, tags in BIO, source with spans, starts and ends) of each text."""
    import artel
    from artel.config import RunConfig
    from artel.objectives import objective_of
    from artel.text import Document, Record, Tagged

    prepared = artel.prepare({"run": str(folder / "run"), **run_of(options, folder, case)})
    objective = objective_of(prepared.config or RunConfig(), prepared.tokenizer())
    for row in read_json_lines(folder / case["part"] / f"{name}.jsonl"):
        spans = tuple((span["start"], span["end"], span["label"]) for span in row["entities"])
        document = Document(Record(row["text"], "", "", Tagged(row["text"], spans)), "validation")
        (made,) = objective.samples([document])
        source = made.source
        bounds = list(zip(source["starts"], source["ends"], strict=True))
        tags = ["O"] * len(bounds)
        for start, end, label in source["spans"]:
            inside = [at for at, (first, last) in enumerate(bounds) if first < end and last > start]
            for at in inside:
                tags[at] = f"{'B' if at == inside[0] else 'I'}-{label}"
        yield [row["text"][start:end] for start, end in bounds], tags, source


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


def scored(texts: list[Any], tag: Any) -> dict[str, float]:
    from artel.objectives.tokens.entities import Scores, entity_words

    scores = Scores()
    for words, _, source in texts:
        starts, ends = source["starts"], source["ends"]
        entities = entity_words(tag(words), starts, ends, of_words=False)
        scores.add(source["spans"], [(starts[first], ends[last - 1], label) for first, last, label in entities])
    return {**scores.micro(), "macro_f1": scores.macro_f1()}


if __name__ == "__main__":
    hold(Contest(
        __file__, "Names in Russian news, beside the Trainer and plain baselines", __doc__,
        {"precision": "precision", "recall": "recall", "f1": "f1", "macro_f1": "macro f1"}, "windows",
        {"artel": train_artel, "Trainer": partial(train_trainer, bf16=False),
         "Trainer, bf16": partial(train_trainer, bf16=True)},
        split, cases, baselines, first_seed_only=("Trainer, bf16",), arguments=arguments,
    ))  # fmt: skip
