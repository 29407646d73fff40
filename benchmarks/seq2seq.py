"""Right spelling from wrong: artel beside transformers' Seq2SeqTrainer, a small T5 from scratch.

    python benchmarks/seq2seq.py --data ../shared/data/literature/anna_karenina.txt [--steps 60]

Sentences of a novel are the outputs, and the inputs are the same with letters left out, doubled, swapped or taken for
others that sound alike. Both contestants get the same pairs, tokenizer, first weights, steps, batch and learning rate;
each has its own order of batches. The loss is that of held-out pairs, for both by `artel evaluate`. Writes
benchmarks/seq2seq.md.
"""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

from contest import Contest, Training, hold, read_json_lines, write_json_lines

MODEL = {"model_type": "t5", "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4,
         "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}  # fmt: skip
ALIKE = dict(zip("оаеиыийтдбпзсжш", "аоиеиейдтпбсзшж", strict=True))
PAIRS, HELD_OUT, BLOCK, BATCH, RATE = 3000, 300, 96, 32, 1e-3


def arguments(parser):
    parser.add_argument("--data", type=Path, required=True, help="a novel")
    parser.add_argument("--steps", type=int, default=60)


def write_pairs(options, folder: Path) -> str:
    """Write train.jsonl and heldout.jsonl, of other chapters."""
    chance = random.Random(0)
    text = options.data.read_text(encoding="utf-8")
    sentences = [each.strip() for each in re.findall(r"[А-ЯЁ][^.!?\n]{20,140}[.!?]", text)][: PAIRS + HELD_OUT]
    for name, part in (("train", sentences[:PAIRS]), ("heldout", sentences[PAIRS:])):
        rows = ({"input": broken(sentence, chance), "output": sentence} for sentence in part)
        write_json_lines(folder / f"{name}.jsonl", rows)
    return f"{PAIRS:,} sentences with mistakes are learned, {HELD_OUT} of other chapters held out."


def broken(sentence: str, chance: random.Random) -> str:
    """The sentence with a mistake in about one letter of twelve."""
    letters = list(sentence)
    for at, letter in enumerate(letters):
        if letter.isalpha() and chance.random() <= 1 / 12:
            letters[at] = ("", letter * 2, ALIKE.get(letter.lower(), letter))[chance.randrange(3)]
    return "".join(letters)


def run_of(training: Training) -> dict:
    source = {"path": str(training.data / "train.jsonl"), "format": "pairs"}
    return {
        "data": {"sources": [source], "validation": 0.0, "block": BLOCK},
        "tokenizer": {"train": {"vocab": 4096}}, "model": {"config": MODEL}, "objective": "seq2seq",
        "train": {"steps": training.case["steps"], "batch": BATCH, "learning_rate": RATE, "compile": "off"},
    }  # fmt: skip


def judged(training: Training, model: Path):
    import artel

    overrides = {"data.block": BLOCK, "seq2seq.generate": 0, "data.store": str(training.data / "stores")}
    found = artel.open(model).evaluate(training.data / "heldout.jsonl", overrides).metrics
    return {"loss": found["loss"], "accuracy": found["accuracy"], "speed": training.rate(BATCH)}


def train_artel(training: Training, precision: str):
    return judged(training, training.artel(run_of(training), **{"train.precision": precision}) / "model")


def train_trainer(training: Training, *, bf16: bool):
    """As in transformers' guides to summaries and translation: rows padded to the longest of their batch."""
    import transformers as hf

    untrained = training.untrained(run_of(training))
    model, tokenizer = (kind.from_pretrained(untrained) for kind in (hf.AutoModelForSeq2SeqLM, hf.AutoTokenizer))
    cut = {"truncation": True, "max_length": BLOCK}
    rows = [{**tokenizer(row["input"], **cut), "labels": tokenizer(text_target=row["output"], **cut)["input_ids"]}
            for row in read_json_lines(training.data / "train.jsonl")]  # fmt: skip
    settings = training.trainer_arguments(
        hf.Seq2SeqTrainingArguments, steps=training.case["steps"], batch=BATCH, rate=RATE, bf16=bf16
    )
    collator, callbacks = hf.DataCollatorForSeq2Seq(tokenizer, model=model), [training.trainer_callback()]
    hf.Seq2SeqTrainer(model, settings, collator, train_dataset=rows, callbacks=callbacks).train()
    model.save_pretrained(training.folder / "model")
    tokenizer.save_pretrained(training.folder / "model")
    return judged(training, training.folder / "model")


if __name__ == "__main__":
    hold(Contest(
        __file__, "Sequence to sequence beside transformers' Seq2SeqTrainer", __doc__,
        {"loss": "held-out loss", "accuracy": "token accuracy"}, "examples",
        {"artel": partial(train_artel, precision="auto"), "artel, fp32": partial(train_artel, precision="fp32"),
         "Seq2SeqTrainer": partial(train_trainer, bf16=False),
         "Seq2SeqTrainer, bf16": partial(train_trainer, bf16=True)},
        write_pairs, lambda options: {"T5 from scratch": {"steps": options.steps}},
        same_precision={"Seq2SeqTrainer": "artel, fp32"}, arguments=arguments, seeds=(0,),
    ))  # fmt: skip
