"""Reward models on real pairs of answers: held-out accuracy beside plain baselines and TRL, and pairs a second.

    python benchmarks/reward.py --encoder FOLDER [--data ../shared/data] [--seeds 0 1 2]

The last 60 pairs of chat/preferences_demo.json are held out, the others are learned; prompts and answers are cut short,
so that minutes of one core suffice. Each contestant trains with the same rows, batch, rate, schedule and steps; the
order is each one's own. Both run as they come (bf16 where the processor has it; TRL without its gradient checkpointing,
and with the model's dropout, which it takes away by itself), and for the first seed in float32 too. Writes
benchmarks/reward.md.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contest import Contest, Training, hold, read_json_lines, write_json_lines

BLOCK, BATCH, STEPS, HELD = 512, 8, 26, 60
SIDES, PROMPT, ANSWER = ("chosen", "rejected"), 300, 1500
"""Characters of a prompt and of an answer that are kept."""
TINY = {"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 512}  # fmt: skip
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def arguments(parser):
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder of real texts")
    parser.add_argument("--encoder", type=Path, required=True, help="the folder of a small encoder: all-MiniLM-L6-v2")


def cases(options):
    encoder = str(options.encoder.resolve())
    return {"all-MiniLM-L6-v2": {"tokenizer": encoder, "model": encoder, "rate": 5e-5},
            "a Llama of 1 M weights, from scratch": {"tokenizer": encoder, "model": "", "rate": 1e-3}}  # fmt: skip


def split(options, folder: Path) -> str:
    """Write the learned and the held-out pairs, as conversations."""
    rows = json.loads((options.data / "chat/preferences_demo.json").read_text(encoding="utf-8"))
    for row in rows:
        for turn in row["conversations"]:
            turn["value"] = turn["value"][:PROMPT]
        for side in SIDES:
            row[side]["value"] = row[side]["value"][:ANSWER]
    rows = [row for row in rows if len(row["conversations"]) == 1 and row["chosen"] != row["rejected"]]
    for name, part in (("train", rows[:-HELD]), ("held", rows[-HELD:])):
        write_json_lines(folder / f"{name}.jsonl", ({side: conversation(row, side) for side in SIDES} for row in part))
    return (
        f"{len(rows) - HELD} pairs of chat/preferences_demo.json are learned ({STEPS} steps of {BATCH}, block {BLOCK}; "
        f"{PROMPT} characters of a prompt, {ANSWER} of an answer), {HELD} are held out: the standard error of an "
        f"accuracy is {(0.25 / HELD) ** 0.5:.3f}. Both run in bf16 where the processor has it, unless float32 is said; "
        "TRL without gradient checkpointing, and with the model's dropout, which it takes away by itself. Both read "
        "the same tokens, a whole batch at a time; TRL pads it to its longest answer."
    )


def conversation(row: dict[str, Any], side: str) -> list[dict[str, str]]:
    return [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in [*row["conversations"], row[side]]]


def baselines(options, folder: Path, case):
    """The longer or the shorter answer, whichever is better here; and a logistic regression on tf-idf's difference."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    def answers(rows: list[dict], side: str) -> list[str]:
        return [row[side][-1]["content"] for row in rows]

    learned, held = (read_json_lines(folder / f"{name}.jsonl") for name in ("train", "held"))
    longer = np.mean(
        [len(chosen) > len(other) for chosen, other in zip(*(answers(held, side) for side in SIDES), strict=True)]
    )
    vectors = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    vectors.fit([text for side in SIDES for text in answers(learned, side)])

    def differences(rows: list[dict]) -> Any:
        chosen, rejected = (vectors.transform(answers(rows, side)) for side in SIDES)
        return (chosen - rejected).toarray()

    mine = differences(learned)
    model = LogisticRegression(C=10.0, fit_intercept=False, max_iter=1000)
    model.fit(np.concatenate([mine, -mine]), np.repeat([1, 0], len(mine)))
    words = float((model.decision_function(differences(held)) > 0).mean())
    return {"the longer, or the shorter answer": {"accuracy": float(max(longer, 1 - longer))},
            "tf-idf, logistic regression": {"accuracy": words}}  # fmt: skip


def train_artel(training: Training, *, fp32: bool):
    case, data = training.case, training.data
    run = training.artel({
        "objective": "reward", "model": {"from": case["model"]} if case["model"] else {"config": TINY},
        "data": {"sources": [{"path": str(data / "train.jsonl"), "format": "preference"}],
                 "validation": str(data / "held.jsonl"), "block": BLOCK},
        "tokenizer": {"from": case["tokenizer"]}, "validate": {"every": 10_000},
        "train": {"steps": STEPS, "batch": BATCH, "micro_batch": BATCH, "learning_rate": case["rate"],
                  "weight_decay": 0, "precision": "fp32" if fp32 else "auto"},
    })  # fmt: skip
    result = json.loads((run / "result.json").read_bytes())
    return {"accuracy": result["validation"]["accuracy"], "speed": training.rate(BATCH)}


def train_trl(training: Training, *, fp32: bool):
    import torch
    from datasets import load_dataset
    from transformers import AutoConfig, AutoTokenizer
    from transformers import AutoModelForSequenceClassification as AutoModel
    from trl import RewardConfig, RewardTrainer

    callback, case = training.trainer_callback(), training.case
    torch.manual_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"])
    framed = tokenizer.cls_token is not None
    if tokenizer.chat_template is None:
        from artel.tokens.tokenizer.chat_template import PLAIN

        tokenizer.chat_template = PLAIN
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if case["model"]:
        model = AutoModel.from_pretrained(case["model"], num_labels=1, dtype=torch.float32)
    else:
        kind, *_ = TINY.values()
        sizes = {name: size for name, size in TINY.items() if name != "model_type"}
        model = AutoModel.from_config(AutoConfig.for_model(kind, vocab_size=len(tokenizer), num_labels=1, **sizes))
    model.config.pad_token_id = tokenizer.pad_token_id

    def with_ids(row: dict[str, Any]) -> dict[str, list[int]]:
        texts = {side: tokenizer.apply_chat_template(row[side], tokenize=False) for side in SIDES}
        return {f"{side}_ids": tokenizer(text, add_special_tokens=framed)["input_ids"] for side, text in texts.items()}

    data = load_dataset("json", data_files={name: str(training.data / f"{name}.jsonl") for name in ("train", "held")})
    data = data.map(with_ids, remove_columns=list(SIDES))
    data = data.filter(lambda row: max(len(row["chosen_ids"]), len(row["rejected_ids"])) <= BLOCK)
    settings = training.trainer_arguments(
        RewardConfig, steps=STEPS, batch=BATCH, rate=case["rate"], weight_decay=0.0, bf16=not fp32,
        gradient_checkpointing=False, disable_dropout=False, max_length=None,
    )  # fmt: skip
    RewardTrainer(
        model, settings, train_dataset=data["train"], processing_class=tokenizer, callbacks=[callback]
    ).train()
    model.eval()
    with torch.no_grad():
        scores = [[float(model(input_ids=torch.tensor([row[f"{side}_ids"]])).logits) for side in SIDES]
                  for row in data["held"]]  # fmt: skip
    accuracy = float(np.mean([chosen > rejected for chosen, rejected in scores]))
    return {"accuracy": accuracy, "speed": training.rate(BATCH)}


if __name__ == "__main__":
    hold(Contest(
        __file__, "Rewards beside TRL", __doc__, {"accuracy": "held-out accuracy"}, "pairs",
        {"artel": partial(train_artel, fp32=False), "TRL": partial(train_trl, fp32=False),
         "artel, float32": partial(train_artel, fp32=True), "TRL, float32": partial(train_trl, fp32=True)},
        split, cases, baselines, first_seed_only=("artel, float32", "TRL, float32"),
        same_precision={"TRL, float32": "artel, float32"}, arguments=arguments,
    ))  # fmt: skip
