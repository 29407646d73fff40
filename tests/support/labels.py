"""Texts with labels made for tests, and runs of tiny models on them."""

import json
import random
from pathlib import Path

from support.runs import write_run

WORDS = {
    "sport": "ball goal team match win",
    "food": "soup bread salt cook oven",
    "law": "court judge case guilty trial",
}
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}  # fmt: skip
DECODER = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
           "num_key_value_heads": 2, "intermediate_size": 64}  # fmt: skip


def words_of(label, chance, most=12):
    others = " ".join(WORDS.values()).split()
    words = chance.choices(WORDS[label].split(), k=chance.randint(2, most)) + chance.choices(others, k=1)
    return " ".join(chance.sample(words, len(words)))


def one_label(rows=240):
    """Texts of three labels, in shares of 16 : 3 : 1."""
    chance = random.Random(0)
    labels = ("sport" if number % 20 < 16 else "food" if number % 20 < 19 else "law" for number in range(rows))
    return [{"text": f"{words_of(label, chance)} {number}", "label": label} for number, label in enumerate(labels)]


def several_labels(rows=240):
    chance = random.Random(0)
    chosen = (chance.sample(list(WORDS), chance.choice((0, 1, 1, 2))) for _ in range(rows))
    return [
        {"text": " ".join([str(number), *(words_of(label, chance) for label in labels)]), "label": sorted(labels)}
        for number, labels in enumerate(chosen)
    ]


def numbers(rows=240):
    """How much of a text is about sport."""
    chance = random.Random(0)
    made = []
    for number in range(rows):
        words = words_of(chance.choice(list(WORDS)), chance).split()
        share = sum(word in WORDS["sport"].split() for word in words) / len(words)
        made.append({"text": f"{' '.join(words)} {number}", "label": round(share, 3)})
    return made


def pairs(rows=240):
    chance = random.Random(0)
    made = []
    for number in range(rows):
        first, second = (chance.choice(list(WORDS)) for _ in range(2))
        label = "same" if first == second else "other"
        made.append({"text": f"{words_of(first, chance)} {number}", "then": words_of(second, chance), "label": label})
    return made


ROWS = {"single": one_label, "multi": several_labels, "number": numbers, "pairs": pairs}


def write_rows(file: Path, rows) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def label_run(path: Path, rows, *, model=BERT, data=None, **changes) -> Path:
    """A run file that learns the labels of rows, beside it, with a tiny model."""
    file = write_rows(path.with_suffix(".jsonl"), rows)
    name = file.name if path.parent == Path.cwd() else str(file)
    source = {"path": name, "format": "labels", **({"second": "then"} if "then" in rows[0] else {})}
    base = {"objective": "classification", "model": {"config": model}, "tokenizer": {"train": {"vocab": 270}},
            "train": {"batch": 16, "steps": 30, "learning_rate": 3e-3, "warmup": 2, "precision": "fp32",
                      "compile": "off", "threads": 1},
            "data": {"sources": [source], "validation": 0.2, "block": 48, **(data or {})},
            "track": ["jsonl"]}  # fmt: skip
    return write_run(path, base, **changes)
