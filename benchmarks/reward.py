"""Reward models on real pairs of answers: held-out accuracy beside plain baselines and TRL, and pairs a second.

    python benchmarks/reward.py --encoder FOLDER [--data ../shared/data] [--seeds 0 1 2] [--results FILE.jsonl]

The last 60 pairs of chat/preferences_demo.json are held out, the others are learned; prompts and answers are cut short,
so that minutes of one core suffice. Each contestant trains with the same rows, batch, rate, schedule and steps, in a
process of its own with one thread; the order is each one's own. Both run as they come (bf16 where the processor has
it; TRL without its gradient checkpointing, and with the model's dropout, which it takes away by itself), and for the
first seed in float32 too. Speed is pairs for each second of the processor from the end of the sixth step to that of
the last. Each run is a line of the results, and the same command goes on with what is missing. Writes
benchmarks/reward.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from contestants import StepClock, once, run_alone, write_page

PAGE = Path(__file__).with_suffix(".md")
BLOCK, BATCH, STEPS, HELD = 512, 8, 26, 60
SIDES, PROMPT, ANSWER = ("chosen", "rejected"), 300, 1500
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


def artel_run(options: argparse.Namespace, clock: StepClock, *, fp32: bool) -> float:
    import artel

    model = {"from": options.model} if options.model else {"config": TINY}
    run = {
        "run": "artel", "seed": options.seed, "objective": "reward", "model": model,
        "data": {"sources": [{"path": "train.jsonl", "format": "preference"}], "validation": "held.jsonl",
                 "block": BLOCK},
        "tokenizer": {"from": options.tokenizer},
        "train": {"steps": STEPS, "batch": BATCH, "micro_batch": BATCH, "learning_rate": options.rate,
                  "weight_decay": 0, "betas": [0.9, 0.999], "schedule": "linear", "warmup": 0.1, "threads": 1,
                  "precision": "fp32" if fp32 else "auto"},
        "validate": {"every": 10_000}, "checkpoint": {"every": "never"}, "track": ["jsonl"],
    }  # fmt: skip
    trained = artel.train(run, callbacks=[clock.note], tell=lambda _: None)
    return json.loads((trained.folder / "result.json").read_bytes())["validation"]["accuracy"]


def trl_run(options: argparse.Namespace, clock: StepClock, *, fp32: bool) -> float:
    import torch
    from datasets import load_dataset
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl import RewardConfig, RewardTrainer

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
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
        output_dir="trl", seed=options.seed, max_steps=STEPS, per_device_train_batch_size=BATCH,
        learning_rate=options.rate, lr_scheduler_type="linear", warmup_steps=0.1,
        weight_decay=0.0, adam_beta2=0.999, max_grad_norm=1.0, use_cpu=True, bf16=not fp32,
        gradient_checkpointing=False, disable_dropout=False, max_length=None, report_to=[], save_strategy="no",
        logging_steps=1000, disable_tqdm=True,
    )  # fmt: skip

    class Noted(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.note()

    trainer = RewardTrainer(
        model, arguments, train_dataset=data["train"], processing_class=tokenizer, callbacks=[Noted()]
    )
    trainer.train()
    model.eval()
    with torch.no_grad():
        scores = [[float(model(input_ids=torch.tensor([row[f"{side}_ids"]])).logits) for side in SIDES]
                  for row in data["held"]]  # fmt: skip
    return float(np.mean([chosen > rejected for chosen, rejected in scores]))


CONTESTANTS = {"artel": artel_run, "TRL": trl_run}


def contest(name: str, folder: Path, seed: int, *, fp32: bool, **case: Any) -> dict[str, float]:
    """Held-out accuracy of a contestant and its pairs a second, in a process of its own."""
    words = ["--contestant", name, "--seed", str(seed)]
    words += ["--fp32"] * fp32 + [word for key, value in case.items() for word in (f"--{key}", str(value))]
    return run_alone(__file__, words, folder)


def percent(values: list[float]) -> str:
    return f"{100 * np.mean(values):.1f} ({', '.join(f'{100 * value:.0f}' for value in values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder of real texts")
    parser.add_argument("--encoder", help="the folder of a small encoder: all-MiniLM-L6-v2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=Path("runs/reward.jsonl"))
    for name in ("contestant", "model", "tokenizer"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=5e-5, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fp32", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        clock = StepClock()
        accuracy = CONTESTANTS[options.contestant](options, clock, fp32=options.fp32)
        print(json.dumps({"accuracy": accuracy, "rate": clock.rate(BATCH)}))
        return
    encoder = str(Path(options.encoder).resolve())
    cases = {"all-MiniLM-L6-v2": {"tokenizer": encoder, "model": encoder},
             "a Llama of 1 M weights, from scratch": {"tokenizer": encoder, "rate": 1e-3}}  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        learned, held = split(options.data, folder)
        rows = [f"| | the longer, or the shorter answer | {100 * by_length(held):.1f} | |",
                f"| | tf-idf, logistic regression | {100 * by_words(learned, held):.1f} | |"]  # fmt: skip
        for title, case in cases.items():
            results: dict[str, list[dict[str, float]]] = {}
            for seed in options.seeds:  # in turns, so that a busy minute meets both
                for fp32 in (False, True) if seed == options.seeds[0] else (False,):
                    for name in CONTESTANTS:
                        row = f"{name}, float32" if fp32 else name
                        key = {"model": title, "contestant": row, "seed": seed, "steps": STEPS, "batch": BATCH}
                        train = functools.partial(contest, name, folder, seed, fp32=fp32, **case)
                        results.setdefault(row, []).append(once(options.results, key, train))
            rows += [row_of(title, name, results) for name in results]
    write(options.results, len(learned), len(held), rows)


def row_of(title: str, name: str, results: dict[str, list[dict[str, float]]]) -> str:
    """A line of the table; the ratio is that of artel in the same precision."""
    rates = {key: float(np.mean([run["rate"] for run in runs])) for key, runs in results.items()}
    speed = f"{rates[name]:.2f}"
    if name.startswith("TRL"):
        speed += f"; artel {rates[name.replace('TRL', 'artel')] / rates[name]:.2f} ×"
    return f"| {title} | {name} | {percent([run['accuracy'] for run in results[name]])} | {speed} |"


def write(results: Path, learned: int, held: int, rows: list[str]) -> None:
    error = 100 * (0.25 / held) ** 0.5
    lines = [
        f"{learned} pairs of chat/preferences_demo.json are learned ({STEPS} steps of {BATCH}, block {BLOCK};",
        f"{PROMPT} characters of a prompt, {ANSWER} of an answer), {held} are held out: the standard error of an",
        f"accuracy is {error:.1f} points. The mean over the seeds, and each.",
        "",
        "| model | | held-out accuracy, % | pairs a second of the processor |",
        "|---|---|---|---|",
        *rows,
        "",
        "Both run as they come, in bf16 where the processor has it, unless float32 is said; TRL without gradient",
        "checkpointing, and with the model's dropout, which it takes away by itself. Both read the same tokens, a",
        "whole batch at a time; TRL pads it to its longest answer.",
    ]
    write_page(PAGE, "Rewards beside TRL", "benchmarks/reward.py --encoder FOLDER", results, lines)


if __name__ == "__main__":
    main()
