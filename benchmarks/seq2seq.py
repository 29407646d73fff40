"""Right spelling from wrong: artel beside transformers' Seq2SeqTrainer, a small T5 from scratch.

    python benchmarks/seq2seq.py --data ../shared/data/literature/anna_karenina.txt [--steps 60] [--out FILE.md]

Sentences of a novel are the outputs, and the inputs are the same with letters left out, doubled, swapped or taken for
others that sound alike. Both contestants get the same pairs, tokenizer, first weights, steps, batch and learning rate;
each has its own order of batches. The loss is that of held-out pairs, for both by `artel evaluate`. Examples/s are of
processor time (`time.process_time`) in training steps, the first ones left out, so that a busy machine does not show.
Everything is written below --work.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

MODEL = {"model_type": "t5", "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4,
         "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}  # fmt: skip
ALIKE = dict(zip("оаеиыийтдбпзсжш", "аоиеиейдтпбсзшж", strict=True))
PAIRS, HELD_OUT, BLOCK, BATCH, RATE = 3000, 300, 96, 32, 1e-3
LEFT_OUT = 5  # steps before the clock starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a novel")
    parser.add_argument("--work", type=Path, default=Path("runs/seq2seq"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="write the table there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(CONTESTANTS[asked.one](asked.work, asked.steps)))
        return
    write_pairs(asked.data, asked.work)
    lines = ["| contestant | held-out loss | token accuracy | examples/s of a processor |", "|---|---|---|---|"]
    found = {name: in_process(name) for name in CONTESTANTS}
    for name, result in found.items():
        ratio = found["artel"]["speed"] / result["speed"]
        shown = "" if name == "artel" else f" (artel: {ratio:.2f} times)"
        lines.append(f"| {name} | {result['loss']:.4f} | {result['accuracy']:.4f} | {result['speed']:.1f}{shown} |")
    text = "\n".join(lines)
    print(text)
    if asked.out:
        asked.out.write_text(f"{text}\n", encoding="utf-8")


def in_process(contestant: str) -> dict[str, float]:
    """Each training in a process of its own, with one thread: nothing of one is left for the next."""
    command = [sys.executable, *sys.argv, "--one", contestant]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_pairs(novel: Path, work: Path) -> None:
    """Write train.jsonl and heldout.jsonl, of other chapters."""
    work.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    text = novel.read_text(encoding="utf-8")
    sentences = [each.strip() for each in re.findall(r"[А-ЯЁ][^.!?\n]{20,140}[.!?]", text)][: PAIRS + HELD_OUT]
    for name, part in (("train", sentences[:PAIRS]), ("heldout", sentences[PAIRS:])):
        rows = [{"input": broken(sentence, chance), "output": sentence} for sentence in part]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (work / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def broken(sentence: str, chance: random.Random) -> str:
    """The sentence with a mistake in about one letter of twelve."""
    letters = list(sentence)
    for place, letter in enumerate(letters):
        if not letter.isalpha() or chance.random() > 1 / 12:
            continue
        kind = chance.randrange(3)
        letters[place] = ("", letter * 2, ALIKE.get(letter.lower(), letter))[kind]
    return "".join(letters)


class Clock:
    """Processor time of training steps, the first ones left out."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def step(self) -> None:
        self._times.append(time.process_time())

    @property
    def examples_per_second(self) -> float:
        times = self._times[LEFT_OUT:]
        return BATCH * (len(times) - 1) / (times[-1] - times[0])


def run_of(work: Path, steps: int) -> dict:
    return {
        "run": str(work / "artel"),
        "data": {"sources": [{"path": str(work / "train.jsonl"), "format": "pairs"}], "validation": 0.0,
                 "block": BLOCK, "store": str(work / "stores")},
        "tokenizer": {"train": {"vocab": 4096}},
        "model": {"config": MODEL},
        "objective": "seq2seq",
        "train": {"steps": steps, "batch": BATCH, "learning_rate": RATE, "schedule": "linear", "warmup": 0.1,
                  "weight_decay": 0.01, "betas": [0.9, 0.999], "compile": "off", "threads": 1},
        "track": [],
    }  # fmt: skip


def figures(folder: Path, work: Path, clock: Clock) -> dict[str, float]:
    import artel

    overrides = {"data.block": BLOCK, "seq2seq.generate": 0, "data.store": str(work / "stores")}
    found = artel.open(folder).evaluate(work / "heldout.jsonl", overrides, tell=lambda text: None).metrics
    return {"loss": found["loss"], "accuracy": found["accuracy"], "speed": clock.examples_per_second}


def train_artel(work: Path, steps: int, precision: str) -> dict[str, float]:
    import shutil

    import artel

    shutil.rmtree(work / "artel", ignore_errors=True)
    clock = Clock()
    changes = {"train.precision": precision}
    run = artel.train(run_of(work, steps), changes, callbacks=[lambda run: clock.step()], tell=lambda text: None)
    return figures(run.folder / "model", work, clock)


def train_trainer(work: Path, steps: int, *, bf16: bool) -> dict[str, float]:
    """As transformers' guides to summaries and translation have it: rows padded to the longest of their batch."""
    import torch
    from transformers import (
        AutoModelForSeq2SeqLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        TrainerCallback,
    )

    torch.set_num_threads(1)
    begin_model(work, steps)
    model = AutoModelForSeq2SeqLM.from_pretrained(work / "begin")
    tokenizer = AutoTokenizer.from_pretrained(work / "begin")
    rows = [json.loads(line) for line in (work / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    cut = {"truncation": True, "max_length": BLOCK}
    encoded = [
        {**tokenizer(row["input"], **cut), "labels": tokenizer(text_target=row["output"], **cut)["input_ids"]}
        for row in rows
    ]
    clock = Clock()

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            clock.step()

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(work / "trainer"), seed=0, max_steps=steps, per_device_train_batch_size=BATCH,
        learning_rate=RATE, lr_scheduler_type="linear", warmup_steps=round(0.1 * steps), weight_decay=0.01,
        use_cpu=True, bf16=bf16, save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    trainer = Seq2SeqTrainer(model, arguments, collator, train_dataset=encoded, callbacks=[Steps()])
    trainer.train()
    model.save_pretrained(work / "trainer")
    tokenizer.save_pretrained(work / "trainer")
    return figures(work / "trainer", work, clock)


def begin_model(work: Path, steps: int) -> None:
    """Write the model of artel's run before its first step."""
    from artel.config import load_run
    from artel.inference import open_untrained

    file = work / "begin.json"
    file.write_text(json.dumps(run_of(work, steps)), encoding="utf-8")
    opened = open_untrained(load_run(str(file)), lambda text: None)
    opened.model.save_pretrained(work / "begin")
    opened.tokenizer.save(work / "begin")


CONTESTANTS = {
    "artel": lambda *run: train_artel(*run, "auto"),
    "artel, fp32": lambda *run: train_artel(*run, "fp32"),
    "Seq2SeqTrainer": lambda *run: train_trainer(*run, bf16=False),
    "Seq2SeqTrainer, bf16": lambda *run: train_trainer(*run, bf16=True),
}

if __name__ == "__main__":
    main()
