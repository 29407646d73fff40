"""Embeddings beside sentence-transformers: the same data, steps, batches and seeds, what is found, and how fast.

    python benchmarks/embeddings.py --data ../shared/data --minilm FOLDER --out benchmarks/embeddings.md

Questions of XQuAD (ru) and their paragraphs, and groups of near-duplicates; a tiny BERT from scratch, and MiniLM;
beside MiniLM untouched, and tf-idf. Texts and split are artel's, and one function computes all figures. Speeds are
texts per second of processor time, of all steps but the first, in one thread. sentence-transformers runs as it is by
default, in float32, and with `bf16`, which artel chooses by itself where the processor multiplies it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

SEEDS = (1, 2, 3)
TINY = {"model_type": "bert", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 512, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}  # fmt: skip
SETS: dict[str, dict[str, Any]] = {
    "xquad.ru": {"path": "qa/xquad.ru.first36.json", "format": "matches"},
    "near-duplicates": {"path": "dedup/ru_near_duplicates.txt", "format": "matches", "rows": "[:3000]"},
}
CASES = {
    ("tiny", "xquad.ru"): {"steps": 60, "batch": 32, "block": 128, "learning_rate": 5e-4, "validation": 0.2},
    ("tiny", "near-duplicates"): {"steps": 40, "batch": 64, "block": 64, "learning_rate": 5e-4, "validation": 0.1},
    ("MiniLM", "xquad.ru"): {"steps": 10, "batch": 32, "block": 96, "learning_rate": 1e-4, "validation": 0.2},
    ("MiniLM", "near-duplicates"): {"steps": 10, "batch": 32, "block": 64, "learning_rate": 1e-4, "validation": 0.1},
}


def run_file(folder: Path, model: str, name: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    case = CASES[model, name]
    source = {**SETS[name], "path": str(Path(arguments.data) / SETS[name]["path"])}
    return {
        "run": str(folder / f"{model}-{name}-{seed}"),
        "seed": seed,
        "objective": "embedding",
        "data": {"sources": [source], "block": case["block"], "validation": case["validation"]},
        "tokenizer": {"train": {"vocab": 8000}} if model == "tiny" else {"from": arguments.minilm},
        "model": {"config": TINY} if model == "tiny" else {"from": arguments.minilm},
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


class Clock:
    """Processor time from the end of the first step to that of the last."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def __call__(self, *_: Any) -> None:
        self.ends.append(time.process_time())

    def texts_per_second(self, batch: int) -> float:
        return 2 * batch * (len(self.ends) - 1) / (self.ends[-1] - self.ends[0])


def figures(embed: Any, run: dict[str, Any]) -> dict[str, float]:
    """What is found by `embed`, a function from texts to vectors, among the validation split's documents."""
    from artel.objectives.embedding.retrieval import retrieval_figures, unit

    held_out = list(matches(run, "validation"))
    corpus = list(dict.fromkeys(text for match in held_out for text in match.positives))
    places = {text: place for place, text in enumerate(corpus)}
    relevant: dict[str, set[int]] = {}
    for match in held_out:
        relevant.setdefault(match.query, set()).update(places[text] for text in match.positives)
    vectors = [unit(np.asarray(embed(texts), dtype=np.float32)) for texts in (list(relevant), corpus)]
    own = {number: places[query] for number, query in enumerate(relevant) if query in places}
    found = retrieval_figures(*vectors, [np.array(sorted(each)) for each in relevant.values()], own)
    return {name: found[name] for name in ("recall_at_1", "mrr_at_10", "ndcg_at_10")} | {"documents": len(corpus)}


def by_artel(run: dict[str, Any], model: str, name: str) -> dict[str, float]:
    import artel

    clock = Clock()
    done = artel.train(run, callbacks=[clock], tell=lambda _: None)
    opened = artel.open(done.folder)
    return figures(opened.embed, run) | {"texts_per_second": clock.texts_per_second(CASES[model, name]["batch"])}


def by_sentence_transformers(run: dict[str, Any], model: str, name: str, bf16: bool) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments
    from transformers import AutoConfig, AutoModel, AutoTokenizer, TrainerCallback

    torch.set_num_threads(1)
    case, clock = CASES[model, name], Clock()
    saved = Path(run["run"]) / "model"  # of artel's run: the same tokenizer, and the same folder but for the weights
    with tempfile.TemporaryDirectory() as folder:
        start = folder
        if model == "tiny":
            shutil.copytree(saved, folder, dirs_exist_ok=True)
            torch.manual_seed(run["seed"])
            AutoModel.from_config(AutoConfig.from_pretrained(saved)).save_pretrained(folder)
            AutoTokenizer.from_pretrained(saved).save_pretrained(folder)
        else:
            start = str(run["model"]["from"])
        encoder = SentenceTransformer(start, device="cpu")
        encoder.max_seq_length = case["block"]
        pairs = [(match.query, match.positives[0]) for match in matches(run, "train")]
        rows = Dataset.from_dict({"anchor": [one for one, _ in pairs], "positive": [other for _, other in pairs]})

        class Ends(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock()

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
        return figures(encode, run) | {"texts_per_second": clock.texts_per_second(case["batch"])}


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
    run = run_file(Path(arguments.folder), arguments.model, arguments.set, arguments, arguments.seed)
    name, kind = arguments.set, arguments.one
    if kind == "artel":
        result = by_artel(run, arguments.model, name)
    elif kind == "tf-idf":
        result = tf_idf(run)
    elif kind == "untouched":
        result = untouched(run, arguments.minilm)
    else:
        result = by_sentence_transformers(run, arguments.model, name, bf16="bf16" in kind)
    print(json.dumps(result))


def ask(arguments: argparse.Namespace, folder: str, kind: str, model: str, name: str, seed: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", kind, "--model", model, "--set", name, "--seed", str(seed)]
    command += ["--data", arguments.data, "--minilm", arguments.minilm, "--folder", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | ENVIRONMENT)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    print(kind, model, name, seed, done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(name: str, results: list[dict[str, float]], peer: float | None) -> str:
    """A line of the table: means over seeds, and from the least to the largest."""
    cells = []
    for figure in ("recall_at_1", "mrr_at_10", "ndcg_at_10"):
        values = [result[figure] for result in results]
        spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.3f}{spread}")
    speeds = [result["texts_per_second"] for result in results if "texts_per_second" in result]
    speed = f"{statistics.mean(speeds):.1f}" if speeds else ""
    ratio = f"{statistics.mean(speeds) / peer:.2f}" if speeds and peer else ""
    return f"| {name} | {' | '.join(cells)} | {speed} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder shared/data")
    parser.add_argument("--minilm", required=True, help="the folder of all-MiniLM-L6-v2")
    parser.add_argument("--out", help="the table, as a file of Markdown")
    for name in ("--one", "--model", "--set", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments)
        return
    peers = ("sentence-transformers", "sentence-transformers, bf16")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for (model, name), case in CASES.items():
            results: dict[str, list[dict[str, float]]] = {}
            for seed in SEEDS:
                for kind in ("artel", *peers[: 2 if seed == SEEDS[0] else 1]):
                    results.setdefault(kind, []).append(ask(arguments, folder, kind, model, name, seed))
            peer = statistics.mean(result["texts_per_second"] for result in results[peers[0]])
            baseline = "untouched" if model == "MiniLM" else "tf-idf"
            documents = int(results["artel"][0]["documents"])
            lines += ["", f"{model}, {name}: {case['steps']} steps of {case['batch']}, {documents} documents", ""]
            lines += [
                "| | recall@1 | MRR@10 | nDCG@10 | texts/s of processor time | ratio |",
                "|---|---|---|---|---|---|",
            ]
            lines += [row(kind, found, peer) for kind, found in results.items()]
            lines.append(row(baseline, [ask(arguments, folder, baseline, model, name, 1)], None))
            if arguments.out:
                Path(arguments.out).write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
