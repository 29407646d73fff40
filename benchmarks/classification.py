"""Whose paragraph is it? Six authors, their books' last chapters held out: artel, transformers' Trainer, and tf-idf.

    python benchmarks/classification.py --data ../shared/data/literature --minilm FOLDER [--seeds 0 1 2]

Of each book every paragraph of 40 characters or more is a text and its author the label; at most --most of each author,
evenly spread. The first 85 % of a book is learned, the rest is held out. Two models are trained: a small one from
scratch with a tokenizer of its own, and all-MiniLM-L6-v2 (an English encoder, which sees Russian letter by letter).
artel and Trainer get the same paragraphs, tokens, steps, batch, optimizer and weights to begin with; each has its own
order of batches. Writes benchmarks/classification.md.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from contest import Contest, Training, hold

BOOKS = {"Толстой": "anna_karenina", "Достоевский": "crime_and_punishment", "Пушкин": "eugene_onegin",
         "Тургенев": "fathers_and_sons", "Лермонтов": "a_hero_of_our_time", "Гончаров": "oblomov"}  # fmt: skip
SHORTEST, HELD_OUT = 40, 0.15
SCRATCH = {"model_type": "bert", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 512}  # fmt: skip


def arguments(parser):
    parser.add_argument("--data", type=Path, required=True, help="the folder of books, a paragraph a line")
    parser.add_argument("--minilm", type=Path, help="all-MiniLM-L6-v2; without it only from scratch")
    parser.add_argument("--most", type=int, default=600, help="paragraphs of each author")


def cases(options):
    made = {"from scratch": {"model": {"config": SCRATCH}, "tokenizer": {"train": {"vocab": 8192}}, "block": 128,
                             "steps": 150, "rate": 1e-3, "batch": 32}}  # fmt: skip
    if options.minilm:
        model = {"from": str(options.minilm.resolve())}
        made["MiniLM"] = {"model": model, "tokenizer": {}, "block": 96, "steps": 100, "rate": 3e-4, "batch": 16}
    return made


def write_paragraphs(options, folder: Path) -> str:
    """Write train/AUTHOR/BOOK.txt and heldout/AUTHOR/BOOK.txt, a paragraph a line."""
    counts = {"train": 0, "heldout": 0}
    for author, book in BOOKS.items():
        lines = (options.data / f"{book}.txt").read_text(encoding="utf-8").splitlines()
        paragraphs = [line.strip() for line in lines if len(line.strip()) >= SHORTEST]
        cut = round(len(paragraphs) * (1 - HELD_OUT))
        for part, chosen in (("train", paragraphs[:cut]), ("heldout", paragraphs[cut:])):
            wanted = min(len(chosen), round(options.most * (HELD_OUT if part == "heldout" else 1 - HELD_OUT)))
            file = folder / part / author / f"{book}.txt"
            file.parent.mkdir(parents=True)
            file.write_text("\n".join(chosen[at * len(chosen) // wanted] for at in range(wanted)), encoding="utf-8")
            counts[part] += wanted
    return (
        f"{counts['train']:,} paragraphs of six authors are learned, {counts['heldout']:,} of last chapters held out."
    )


def paragraphs_of(folder: Path, part: str) -> tuple[list[str], list[str]]:
    """(texts, authors)."""
    files = sorted((folder / part).rglob("*.txt"))
    rows = [(line, file.parent.name) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [text for text, _ in rows], [author for _, author in rows]


def scores(gold: list[str], predicted: list[str]) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, f1_score

    return {"accuracy": float(accuracy_score(gold, predicted)), "f1": float(f1_score(gold, predicted, average="macro"))}


def baselines(options, folder: Path, case):
    """The author with most paragraphs; and words and pairs of words by tf-idf, with a logistic regression."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    (texts, learned), (held_out, gold) = (paragraphs_of(folder, part) for part in ("train", "heldout"))
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LogisticRegression(max_iter=1000))
    model.fit(texts, learned)
    commonest = max(sorted(set(learned)), key=learned.count)
    return {
        "the commonest author": scores(gold, [commonest] * len(gold)),
        "tf-idf and logistic regression": scores(gold, list(model.predict(held_out))),
    }


def run_of(training: Training) -> dict:
    case, source = training.case, {"path": str(training.data / "train"), "format": "labels", "document": "line"}
    return {
        "data": {"sources": [source], "validation": str(training.data / "heldout"), "block": case["block"]},
        "tokenizer": case["tokenizer"], "model": case["model"], "objective": "classification",
        "train": {"steps": case["steps"], "batch": case["batch"], "learning_rate": case["rate"]},
    }  # fmt: skip


def train_artel(training: Training):
    import artel

    run = training.artel(run_of(training))
    texts, gold = paragraphs_of(training.data, "heldout")
    answers = artel.open(run).classify(texts)
    return scores(gold, [answer["label"] for answer in answers]) | {"speed": training.rate(training.case["batch"])}


def train_trainer(training: Training, *, bf16: bool):
    """As in transformers' guide to text classification: rows padded to the longest of their batch."""
    from transformers import AutoModelForSequenceClassification as AutoModel
    from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

    case, untrained = training.case, training.untrained(run_of(training))
    model, tokenizer = (kind.from_pretrained(untrained) for kind in (AutoModel, AutoTokenizer))

    def rows(part: str) -> list[dict]:
        texts, authors = paragraphs_of(training.data, part)
        encoded = tokenizer(texts, truncation=True, max_length=case["block"])
        return [{**{name: values[row] for name, values in encoded.items()}, "labels": model.config.label2id[author]}
                for row, author in enumerate(authors)]  # fmt: skip

    steps = {name: case[name] for name in ("steps", "batch", "rate")}
    settings = training.trainer_arguments(
        TrainingArguments, **steps, bf16=bf16, per_device_eval_batch_size=case["batch"]
    )
    collator, callbacks = DataCollatorWithPadding(tokenizer), [training.trainer_callback()]
    trainer = Trainer(model, settings, collator, train_dataset=rows("train"), callbacks=callbacks)
    trainer.train()
    predicted = trainer.predict(rows("heldout")).predictions.argmax(axis=1)
    labels = [model.config.id2label[int(number)] for number in predicted]
    return scores(paragraphs_of(training.data, "heldout")[1], labels) | {"speed": training.rate(case["batch"])}


if __name__ == "__main__":
    hold(Contest(
        __file__, "Classification beside transformers' Trainer and tf-idf", __doc__,
        {"accuracy": "accuracy", "f1": "macro F1"}, "examples",
        {"artel": train_artel, "Trainer": partial(train_trainer, bf16=False),
         "Trainer, bf16": partial(train_trainer, bf16=True)},
        write_paragraphs, cases, baselines, first_seed_only=("Trainer, bf16",), arguments=arguments,
    ))  # fmt: skip
