"""Embeddings beside sentence-transformers: the same data, steps, batches and seeds, what is found, and how fast.

    python benchmarks/embeddings.py --data ../shared/data --minilm FOLDER [--seeds 1 2 3]

Questions of XQuAD and their paragraphs, and groups of near-duplicates; a tiny BERT from scratch, and MiniLM (English,
so that it gets the English questions); beside MiniLM untouched, and tf-idf. Texts, split and initial weights are
artel's, and one function computes all metrics. sentence-transformers runs as it is by default, in float32, and for the
first seed with `bf16`, which artel chooses by itself where the processor multiplies it. Writes
benchmarks/embeddings.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contest import Contest, Training, hold

TINY = {"model_type": "bert", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 512, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}  # fmt: skip
SETS: dict[str, dict[str, Any]] = {
    "xquad.ru": {"path": "qa/xquad.ru.first36.json", "format": "matches"},
    "xquad.en": {"path": "qa/xquad.en.first36.json", "format": "matches"},
    "near-duplicates": {"path": "dedup/ru_near_duplicates.txt", "format": "matches", "rows": "[:3000]"},
}
VOCABULARIES = {"xquad.ru": 8000, "near-duplicates": 6000}  # of the tiny models
CASES = {
    ("tiny", "xquad.ru"): {"steps": 60, "batch": 32, "block": 128, "rate": 5e-4, "validation": 0.2},
    ("tiny", "near-duplicates"): {"steps": 40, "batch": 64, "block": 64, "rate": 5e-4, "validation": 0.1},
    ("MiniLM", "xquad.en"): {"steps": 12, "batch": 32, "block": 96, "rate": 2e-5, "validation": 0.2},
    ("MiniLM", "near-duplicates"): {"steps": 12, "batch": 32, "block": 64, "rate": 1e-4, "validation": 0.1},
}


def arguments(parser):
    parser.add_argument("--data", type=Path, required=True, help="the folder shared/data")
    parser.add_argument("--minilm", type=Path, required=True, help="the folder of all-MiniLM-L6-v2")


def cases(session):
    return {f"{model}, {name}, {case['steps']} steps of {case['batch']}": case | {"model": model, "set": name}
            for (model, name), case in CASES.items()}  # fmt: skip


def run_of(options, case: dict[str, Any]) -> dict[str, Any]:
    name, minilm = case["set"], {"from": str(options.minilm.resolve())}
    source = {**SETS[name], "path": str(options.data.resolve() / SETS[name]["path"])}
    return {
        "objective": "embedding",
        "data": {"sources": [source], "block": case["block"], "validation": case["validation"]},
        "tokenizer": {"train": {"vocab": VOCABULARIES[name]}} if case["model"] == "tiny" else minilm,
        "model": {"config": TINY} if case["model"] == "tiny" else minilm,
        "train": {"steps": case["steps"], "batch": case["batch"], "micro_batch": case["batch"],
                  "learning_rate": case["rate"], "weight_decay": 0.0},
    }  # fmt: skip


def matches(run: dict[str, Any], seed: int, split: str) -> Iterator[Any]:
    from artel.config import RunConfig
    from artel.text import Ledger, read_documents

    for document in read_documents(RunConfig.model_validate({"run": "run", "seed": seed, **run}).data, Ledger()):
        if document.split == split:
            yield document.record.fields


def judged(embed: Callable[[list[str]], Any], run: dict[str, Any], seed: int) -> dict[str, float]:
    """Return the metrics of retrieval among the validation documents. `embed`: from texts to vectors."""
    from artel.objectives.embedding.retrieval import retrieval_metrics, unit

    held_out = list(matches(run, seed, "validation"))
    corpus = list(dict.fromkeys(text for match in held_out for text in match.positives))
    numbers = {text: number for number, text in enumerate(corpus)}
    relevant: dict[str, dict[int, float]] = {}
    for match in held_out:
        relevant.setdefault(match.query, {}).update({numbers[text]: 1.0 for text in match.positives})
    vectors = [unit(np.asarray(embed(texts), dtype=np.float32)) for texts in (list(relevant), corpus)]
    own = {number: numbers[query] for number, query in enumerate(relevant) if query in numbers}
    found = retrieval_metrics(*vectors, list(relevant.values()), own)
    return {name: found[name] for name in ("recall_at_1", "mrr_at_10", "ndcg_at_10")} | {"documents": len(corpus)}


def baselines(options, folder: Path, case: dict[str, Any]):
    from sklearn.feature_extraction.text import TfidfVectorizer

    import artel

    run, seed = run_of(options, case), options.seeds[0]
    texts = [text for match in matches(run, seed, "train") for text in match.texts]
    vectorizer = TfidfVectorizer(sublinear_tf=True).fit(texts)
    found = {"tf-idf": judged(lambda asked: vectorizer.transform(asked).toarray(), run, seed)}
    if case["model"] == "MiniLM":
        found["untouched"] = judged(artel.open(str(options.minilm)).embed, run, seed)
    return found


def train_artel(training: Training):
    import artel

    run = run_of(training.options, training.case)
    metrics = judged(artel.open(training.artel(run)).embed, run, training.seed)
    return metrics | {"speed": training.rate(2 * training.case["batch"])}


def train_sentence_transformers(training: Training, *, bf16: bool):
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments

    case, run, callback = training.case, run_of(training.options, training.case), training.trainer_callback()
    begin = run["model"]["from"] if case["model"] == "MiniLM" else str(training.untrained(run))
    encoder = SentenceTransformer(begin, device="cpu")
    encoder.max_seq_length = case["block"]
    pairs = [(match.query, match.positives[0]) for match in matches(run, training.seed, "train")]
    rows = Dataset.from_dict({"anchor": [query for query, _ in pairs], "positive": [text for _, text in pairs]})
    settings = training.trainer_arguments(
        SentenceTransformerTrainingArguments, **{name: case[name] for name in ("steps", "batch", "rate")},
        weight_decay=0.0, bf16=bf16,
    )  # fmt: skip
    loss = MultipleNegativesRankingLoss(encoder)
    SentenceTransformerTrainer(
        model=encoder, args=settings, train_dataset=rows, loss=loss, callbacks=[callback]
    ).train()
    metrics = judged(lambda texts: encoder.encode(texts, show_progress_bar=False), run, training.seed)
    return metrics | {"speed": training.rate(2 * case["batch"])}


if __name__ == "__main__":
    hold(Contest(
        __file__, "Embeddings beside sentence-transformers", __doc__,
        {"recall_at_1": "recall@1", "mrr_at_10": "MRR@10", "ndcg_at_10": "nDCG@10", "documents": "documents"}, "texts",
        {"artel": train_artel, "sentence-transformers": partial(train_sentence_transformers, bf16=False),
         "sentence-transformers, bf16": partial(train_sentence_transformers, bf16=True)},
        lambda options, folder: "", cases, baselines, first_seed_only=("sentence-transformers, bf16",),
        arguments=arguments, seeds=(1, 2, 3),
    ))  # fmt: skip
