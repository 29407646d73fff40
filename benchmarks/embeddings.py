"""Embeddings beside sentence-transformers: the same data, steps, batches and seeds, what is found, and how fast.

    python benchmarks/embeddings.py --data ../shared/data --minilm FOLDER [--results FILE.jsonl]

Questions of XQuAD and their paragraphs, and groups of near-duplicates; a tiny BERT from scratch, and MiniLM (English,
so that it gets the English questions); beside MiniLM untouched, and tf-idf. Texts, split and initial weights are
artel's, and one function computes all figures. Speeds are texts per second of processor time, of all steps but the
first five, in one thread. sentence-transformers runs as it is by default, in float32, and for the first seed with
`bf16`, which artel chooses by itself where the processor multiplies it. Each run is a line of the results, and the same
command goes on with what is missing. Writes benchmarks/embeddings.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from contestants import StepClock, once, run_alone, write_page

CONTESTANTS = ("artel", "sentence-transformers", "sentence-transformers, bf16")
SEEDS = (1, 2, 3)
TINY = {"model_type": "bert", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 512, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}  # fmt: skip
SETS: dict[str, dict[str, Any]] = {
    "xquad.ru": {"path": "qa/xquad.ru.first36.json", "format": "matches"},
    "xquad.en": {"path": "qa/xquad.en.first36.json", "format": "matches"},
    "near-duplicates": {"path": "dedup/ru_near_duplicates.txt", "format": "matches", "rows": "[:3000]"},
}
VOCABULARIES = {"xquad.ru": 8000, "near-duplicates": 6000}  # of the tiny models
CASES = {
    ("tiny", "xquad.ru"): {"steps": 60, "batch": 32, "block": 128, "learning_rate": 5e-4, "validation": 0.2},
    ("tiny", "near-duplicates"): {"steps": 40, "batch": 64, "block": 64, "learning_rate": 5e-4, "validation": 0.1},
    ("MiniLM", "xquad.en"): {"steps": 12, "batch": 32, "block": 96, "learning_rate": 2e-5, "validation": 0.2},
    ("MiniLM", "near-duplicates"): {"steps": 12, "batch": 32, "block": 64, "learning_rate": 1e-4, "validation": 0.1},
}


def run_file(folder: Path, model: str, name: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    case = CASES[model, name]
    source = {**SETS[name], "path": str(Path(arguments.data) / SETS[name]["path"])}
    return {
        "run": str(folder / f"{model}-{name}-{seed}"),
        "seed": seed,
        "objective": "embedding",
        "data": {"sources": [source], "block": case["block"], "validation": case["validation"]},
        "tokenizer": {"train": {"vocab": VOCABULARIES[name]}} if model == "tiny" else {"from": str(arguments.minilm)},
        "model": {"config": TINY} if model == "tiny" else {"from": str(arguments.minilm)},
        "train": {"steps": case["steps"], "batch": case["batch"], "micro_batch": case["batch"], "threads": 1,
                  "learning_rate": case["learning_rate"], "weight_decay": 0.0, "betas": [0.9, 0.999],
                  "schedule": "linear", "warmup": 0.1},
        "validate": {"every": "never"},
        "checkpoint": {"every": "never"},
    }  # fmt: skip


def matches(run: dict[str, Any], split: str) -> Iterator[Any]:
    from artel.config import RunConfig
    from artel.text import Ledger, read_documents

    for document in read_documents(RunConfig.model_validate(run).data, Ledger()):
        if document.split == split:
            yield document.record.fields


def figures(embed: Any, run: dict[str, Any]) -> dict[str, float]:
    """What is found by `embed`, a function from texts to vectors, among the validation split's documents."""
    from artel.objectives.embedding.retrieval import retrieval_metrics, unit

    held_out = list(matches(run, "validation"))
    corpus = list(dict.fromkeys(text for match in held_out for text in match.positives))
    places = {text: place for place, text in enumerate(corpus)}
    relevant: dict[str, dict[int, float]] = {}
    for match in held_out:
        relevant.setdefault(match.query, {}).update({places[text]: 1.0 for text in match.positives})
    vectors = [unit(np.asarray(embed(texts), dtype=np.float32)) for texts in (list(relevant), corpus)]
    own = {number: places[query] for number, query in enumerate(relevant) if query in places}
    found = retrieval_metrics(*vectors, list(relevant.values()), own)
    return {name: found[name] for name in ("recall_at_1", "mrr_at_10", "ndcg_at_10")} | {"documents": len(corpus)}


def by_artel(run: dict[str, Any], model: str, name: str) -> dict[str, float]:
    import artel

    clock = StepClock()
    done = artel.train(run, callbacks=[clock.note], tell=lambda _: None)
    opened = artel.open(done.folder)
    return figures(opened.embed, run) | {"texts_per_second": clock.rate(2 * CASES[model, name]["batch"])}


def by_sentence_transformers(run: dict[str, Any], model: str, name: str, bf16: bool) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    case, clock = CASES[model, name], StepClock()
    with tempfile.TemporaryDirectory() as folder:
        start = str(run["model"]["from"]) if model == "MiniLM" else write_untrained(run, Path(folder))
        encoder = SentenceTransformer(start, device="cpu")
        encoder.max_seq_length = case["block"]
        pairs = [(match.query, match.positives[0]) for match in matches(run, "train")]
        rows = Dataset.from_dict({"anchor": [one for one, _ in pairs], "positive": [other for _, other in pairs]})

        class Ends(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.note()

        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder, max_steps=case["steps"], per_device_train_batch_size=case["batch"], seed=run["seed"],
            learning_rate=case["learning_rate"], warmup_steps=round(0.1 * case["steps"]), weight_decay=0.0,
            lr_scheduler_type="linear", report_to=[], save_strategy="no", use_cpu=True, bf16=bf16,
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = SentenceTransformerTrainer(
            model=encoder, args=arguments, train_dataset=rows, loss=MultipleNegativesRankingLoss(encoder),
            callbacks=[Ends()],
        )  # fmt: skip
        trainer.train()
        encode = lambda texts: encoder.encode(texts, show_progress_bar=False)  # noqa: E731
        return figures(encode, run) | {"texts_per_second": clock.rate(2 * case["batch"])}


def write_untrained(run: dict[str, Any], folder: Path) -> str:
    """The folder of artel's model before its first step, as sentence-transformers opens it."""
    from artel.config import load_run
    from artel.inference import open_untrained
    from artel.objectives import objective_of

    file = folder / "run.json"
    file.write_text(json.dumps(run), encoding="utf-8")
    config = load_run(str(file))
    opened = open_untrained(config, lambda _: None)
    opened.model.save_pretrained(folder)
    opened.tokenizer.save(folder)
    for name, content in objective_of(config, opened.tokenizer).model_files(opened.model).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


def untouched(run: dict[str, Any], folder: str) -> dict[str, float]:
    import artel

    return figures(artel.open(folder).embed, run)


def tf_idf(run: dict[str, Any]) -> dict[str, float]:
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [text for match in matches(run, "train") for text in match.texts]
    vectorizer = TfidfVectorizer(sublinear_tf=True).fit(texts)
    return figures(lambda asked: vectorizer.transform(asked).toarray(), run)


def one(arguments: argparse.Namespace) -> None:
    """One contestant in a process of its own; its figures as a line of JSON."""
    run = run_file(Path.cwd(), arguments.model, arguments.set, arguments, arguments.seed)
    name, kind = arguments.set, arguments.one
    if kind == "artel":
        result = by_artel(run, arguments.model, name)
    elif kind == "tf-idf":
        result = tf_idf(run)
    elif kind == "untouched":
        result = untouched(run, str(arguments.minilm))
    else:
        result = by_sentence_transformers(run, arguments.model, name, bf16="bf16" in kind)
    print(json.dumps(result))


def row(name: str, results: list[dict[str, float]], artel: float | None) -> str:
    """A line of the table: means over seeds, and from the least to the largest."""
    cells = []
    for figure in ("recall_at_1", "mrr_at_10", "ndcg_at_10"):
        values = [result[figure] for result in results]
        spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.3f}{spread}")
    speeds = [result["texts_per_second"] for result in results if "texts_per_second" in result]
    speed = f"{statistics.mean(speeds):.1f}" if speeds else ""
    ratio = f"{artel / statistics.mean(speeds):.2f} ×" if artel and name != CONTESTANTS[0] else ""
    return f"| {name} | {len(results)} | {' | '.join(cells)} | {speed} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder shared/data")
    parser.add_argument("--minilm", type=Path, required=True, help="the folder of all-MiniLM-L6-v2")
    parser.add_argument("--results", type=Path, default=Path("runs/embeddings.jsonl"))
    for name in ("--one", "--model", "--set"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments)
        return
    folders = ["--data", str(arguments.data.resolve()), "--minilm", str(arguments.minilm.resolve())]
    lines = ["The mean over the seeds, and from the least to the largest."]
    with tempfile.TemporaryDirectory() as place:

        def asked(kind: str, model: str, name: str, seed: int) -> dict[str, float]:
            words = ["--one", kind, "--model", model, "--set", name, "--seed", str(seed), *folders]
            key = {"contestant": kind, "model": model, "set": name, "seed": seed, "case": CASES[model, name]}
            return once(arguments.results, key, lambda: run_alone(__file__, words, Path(place)))

        for (model, name), case in CASES.items():
            results: dict[str, list[dict[str, float]]] = {}
            for seed in SEEDS:  # in turns, so that a busy minute meets all
                for kind in CONTESTANTS[: None if seed == SEEDS[0] else 2]:
                    results.setdefault(kind, []).append(asked(kind, model, name, seed))
            baselines = ("tf-idf", "untouched") if model == "MiniLM" else ("tf-idf",)
            documents = int(results["artel"][0]["documents"])
            lines += ["", f"## {model}, {name}: {case['steps']} steps of {case['batch']}, {documents} documents", ""]
            lines += [
                "| | seeds | recall@1 | MRR@10 | nDCG@10 | texts/s of processor time | artel is |",
                "|---|---|---|---|---|---|---|",
            ]
            lines += [row(kind, [asked(kind, model, name, SEEDS[0])], None) for kind in baselines]
            own = statistics.mean(result["texts_per_second"] for result in results["artel"])
            lines += [row(kind, found, own) for kind, found in results.items()]
    command = "benchmarks/embeddings.py --data ../shared/data --minilm FOLDER"
    title = "Embeddings beside sentence-transformers"
    write_page(Path(__file__).with_suffix(".md"), title, command, arguments.results, lines)


if __name__ == "__main__":
    main()
