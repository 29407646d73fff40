"""Reward models on real pairs of answers: held-out accuracy beside plain baselines and TRL, and examples a second.

    python benchmarks/reward.py --data ../shared/data --encoder FOLDER

The last 60 pairs of chat/preferences_demo.json are held out, the others are learned; prompts and answers are cut short,
so that minutes of one core suffice. Each contestant trains with the same rows, batch, rate, schedule, precision and
steps, in a process of its own with one thread; the order is each one's own. The time is the processor's, of a whole
run, and that of a run of two steps is taken away: what is left are the other steps. Writes benchmarks/reward.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).with_suffix(".md")
BLOCK, BATCH, RATE, SEEDS = 256, 8, 5e-5, (0, 1, 2)
STEPS, SHORT, HELD = 12, 2, 60
SIDES, PROMPT, ANSWER = ("chosen", "rejected"), 200, 500
"""Characters of a prompt and of an answer that are kept."""
TINY = {"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 512}  # fmt: skip


def conversation(row: dict[str, Any], side: str) -> list[dict[str, str]]:
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    turns = [*row["conversations"], row[side]]
    return [{"role": roles[turn["from"]], "content": turn["value"]} for turn in turns]


def split(data: Path, folder: Path) -> tuple[list[dict], list[dict]]:
    """(learned, held out) rows, each in a file of `folder`."""
    rows = json.loads((data / "chat/preferences_demo.json").read_text(encoding="utf-8"))
    for row in rows:
        for turn in row["conversations"]:
            turn["value"] = turn["value"][:PROMPT]
        for side in SIDES:
            row[side]["value"] = row[side]["value"][:ANSWER]
    rows = [row for row in rows if len(row["conversations"]) == 1 and row["chosen"] != row["rejected"]]
    parts = rows[:-HELD], rows[-HELD:]
    for name, part in zip(("train", "held"), parts, strict=True):
        lines = ({side: conversation(row, side) for side in SIDES} for row in part)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return parts


# Baselines ----------------------------------------------------------------------------


def by_length(held: list[dict]) -> float:
    """Accuracy of taking the longer answer, or the shorter one, whichever is better on these very pairs."""
    longer = np.mean([len(row["chosen"]["value"]) > len(row["rejected"]["value"]) for row in held])
    return float(max(longer, 1 - longer))


def by_words(learned: list[dict], held: list[dict]) -> float:
    """tf-idf of both answers, and a logistic regression on the difference."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectors = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    vectors.fit([row[side]["value"] for row in learned for side in SIDES])

    def differences(rows: list[dict]) -> Any:
        chosen, rejected = (vectors.transform([row[side]["value"] for row in rows]) for side in SIDES)
        return (chosen - rejected).toarray()

    mine = differences(learned)
    model = LogisticRegression(C=10.0, fit_intercept=False, max_iter=1000)
    model.fit(np.concatenate([mine, -mine]), np.repeat([1, 0], len(mine)))
    return float((model.decision_function(differences(held)) > 0).mean())


# Contestants, each in a process of its own --------------------------------------------


def artel_run(options: argparse.Namespace, steps: int, seed: int) -> float:
    import artel

    model = {"from": options.model} if options.model else {"config": TINY}
    run = {
        "run": f"artel-{steps}-{seed}", "seed": seed, "objective": "reward", "model": model,
        "data": {"sources": [{"path": "train.jsonl", "format": "preference"}], "validation": "held.jsonl",
                 "block": BLOCK},
        "tokenizer": {"from": options.tokenizer},
        "train": {"steps": steps, "batch": BATCH, "learning_rate": options.rate, "weight_decay": 0,
                  "betas": [0.9, 0.999], "schedule": "linear", "warmup": 0.1, "precision": "fp32",
                  "compile": "off", "threads": 1, "micro_batch": BATCH},
        "checkpoint": {"every": 10_000}, "track": ["jsonl"],
    }  # fmt: skip
    trained = artel.train(run, tell=lambda _: None)
    return json.loads((trained.folder / "result.json").read_bytes())["validation"]["accuracy"]


def trl_run(options: argparse.Namespace, steps: int, seed: int) -> float:
    import torch
    from datasets import load_dataset
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    framed = tokenizer.cls_token is not None
    if tokenizer.chat_template is None:
        from artel.tokens.tokenizer.chat_template import PLAIN

        tokenizer.chat_template = PLAIN
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if options.model:
        model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1, dtype=torch.float32)
    else:
        kind, *_ = TINY.values()
        sizes = {name: size for name, size in TINY.items() if name != "model_type"}
        config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), num_labels=1, **sizes)
        model = AutoModelForSequenceClassification.from_config(config)
    model.config.pad_token_id = tokenizer.pad_token_id

    def ids(row: dict[str, Any], side: str) -> list[int]:
        text = tokenizer.apply_chat_template(row[side], tokenize=False)
        return tokenizer(text, add_special_tokens=framed)["input_ids"]

    data = load_dataset("json", data_files={"train": "train.jsonl", "held": "held.jsonl"})
    data = data.map(lambda row: {f"{side}_ids": ids(row, side) for side in SIDES},
                    remove_columns=["chosen", "rejected"])  # fmt: skip
    data = data.filter(lambda row: max(len(row["chosen_ids"]), len(row["rejected_ids"])) <= BLOCK)
    arguments = RewardConfig(
        output_dir="trl", seed=seed, max_steps=steps, per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH, learning_rate=options.rate, lr_scheduler_type="linear", warmup_steps=0.1,
        weight_decay=0.0, adam_beta2=0.999, max_grad_norm=1.0, use_cpu=True, bf16=False,
        gradient_checkpointing=False, max_length=None, report_to=[], save_strategy="no", logging_steps=1000,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = RewardTrainer(model, arguments, train_dataset=data["train"], eval_dataset=data["held"],
                            processing_class=tokenizer)  # fmt: skip
    trainer.train()
    return trainer.evaluate()["eval_accuracy"]


CONTESTANTS = {"artel": artel_run, "trl": trl_run}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracies of the seeds, and pairs a second of the processor."""
    run = CONTESTANTS[name]
    run(options, SHORT, 0)  # what happens once is over: imports, texts to tokens
    seconds, accuracies = [], []
    for steps, seed in ((SHORT, 0), *((STEPS, seed) for seed in SEEDS)):
        began = time.process_time()
        accuracies.append(run(options, steps, seed + (steps == SHORT) * 10))
        seconds.append(time.process_time() - began)
    short, *whole = seconds
    return {"accuracies": accuracies[1:], "pace": (STEPS - SHORT) * BATCH / (float(np.median(whole)) - short)}


def contest(name: str, folder: Path, **options: Any) -> dict[str, Any]:
    """What `measure` finds, in a process of its own."""
    words = [sys.executable, __file__, "--contestant", name]
    words += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for file in folder.glob("*.jsonl"):
            (Path(place) / file.name).symlink_to(file)
        done = subprocess.run(words, cwd=place, capture_output=True, text=True, env={**os.environ, **ONE_THREAD})
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def percent(values: list[float]) -> str:
    return f"{100 * np.mean(values):.1f} ({', '.join(f'{100 * value:.0f}' for value in values)})"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder of real texts")
    options.add_argument("--encoder", help="the folder of a small encoder: all-MiniLM-L6-v2")
    for name in ("--contestant", "--model", "--tokenizer"):
        options.add_argument(name, default="", help=argparse.SUPPRESS)
    options.add_argument("--rate", type=float, default=RATE, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.contestant:
        print(json.dumps(measure(chosen.contestant, chosen)))
        return
    encoder = str(Path(chosen.encoder).resolve())
    cases = {"all-MiniLM-L6-v2": {"tokenizer": encoder, "model": encoder},
             "a Llama of 1 M weights, from scratch": {"tokenizer": encoder, "rate": 1e-3}}  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        learned, held = split(chosen.data, folder)
        accuracies = [f"| the longer, or the shorter answer | {100 * by_length(held):.1f} |",
                      f"| tf-idf, logistic regression | {100 * by_words(learned, held):.1f} |"]  # fmt: skip
        speeds = []
        for title, case in cases.items():
            with ThreadPoolExecutor(len(CONTESTANTS)) as pool:  # side by side, one core each
                running = {name: pool.submit(contest, name, folder, **case) for name in CONTESTANTS}
                found = {name: one.result() for name, one in running.items()}
            for name, one in found.items():
                accuracies.append(f"| {title}: {name} | {percent(one['accuracies'])} |")
                print(accuracies[-1], f"{one['pace']:.2f} pairs/s", file=sys.stderr)
            mine, theirs = (one["pace"] for one in found.values())
            speeds.append(f"| {title} | {mine:.2f} | {theirs:.2f} | {mine / theirs:.2f} |")
    write(len(learned), len(held), accuracies, speeds)


def write(learned: int, held: int, accuracies: list[str], speeds: list[str]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    error = 100 * (0.25 / held) ** 0.5
    lines = [
        "# Rewards beside TRL",
        "",
        f"`python benchmarks/reward.py --encoder FOLDER` on {datetime.date.today():%d.%m.%Y}, at {commit}.",
        f"{learned} pairs of chat/preferences_demo.json are learned ({STEPS} steps of {BATCH}, block {BLOCK}, float32;",
        f"{PROMPT} characters of a prompt, {ANSWER} of an answer), {held} are held out: the standard error of an",
        f"accuracy is {error:.1f} points. Of three seeds the mean, and each.",
        "",
        "| | held-out accuracy, % |",
        "|---|---|",
        *accuracies,
        "",
        f"Pairs of answers a second of the processor, with one thread, of whole training steps (batch {BATCH}, no",
        "compilation). Both read the same tokens; TRL pads a batch to its longest answer.",
        "",
        "| model | artel | TRL | ratio |",
        "|---|---|---|---|",
        *speeds,
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
