"""Texts to prepare, and documents of a store as they come out of artel prepare."""

import hashlib
import json
import random
from functools import cache
from pathlib import Path
from typing import NamedTuple

from artel.config import TokenizerTraining
from artel.config.load import parse_run
from artel.messages import from_json
from artel.preparing import prepare
from artel.tokens import train_tokenizer


class Stored(NamedTuple):
    origin: str
    text: str
    split: str


@cache
def bytes_tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer that has a token for each byte and for what talks need."""
    settings = TokenizerTraining(vocab=260, special=["<|im_start|>", "<|im_end|>"])
    train_tokenizer(iter(["x"]), settings).save(folder / "bytes")
    return folder / "bytes"


def run_of(folder: Path, **sections):
    """A run whose store and folder lie in `folder`, by relative paths in the working folder.

    Its tokens are bytes when no tokenizer is given.
    """
    folder = folder.absolute()
    place = Path() if folder == Path.cwd() else folder
    data = {"store": str(place / "stores"), "validation": 0.0, **sections.pop("data", {})}
    tree = {"run": str(place / "run"), **sections, "data": data}
    tree.setdefault("tokenizer", {"from": str(place / bytes_tokenizer(folder).name)})
    return parse_run(tree, {}, {(): "run.yaml"})


def stored(folder: Path, **sections):
    """(documents in the order of the store, ledger) of what artel prepare makes of a run."""
    prepared = prepare(run_of(folder, **sections))
    store, tokenizer = prepared.open(), prepared.tokenizer()
    documents = [
        Stored(origin, tokenizer.decode(ids[:-1] if ids[-1] == tokenizer.end_id else ids), part)
        for part in ("validation", "train")
        for origin, ids in getattr(store, part).iter_samples()
    ]
    return documents, from_json(prepared.ledger())


def tree(folder: Path) -> str:
    """One digest of all names and contents."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


OFTEN = "это строка, которая стоит во многих текстах"


def lines_with_repeats(count, seed):
    """JSON lines of two sets with equal, nearly equal and unreadable ones among them, of unequal length."""
    chance = random.Random(seed)
    texts = []
    for number in range(count):
        kind = chance.random()
        if texts and kind < 0.1:
            texts.append(chance.choice(texts))
        elif texts and kind < 0.25:
            words = chance.choice(texts).split()
            words[chance.randrange(len(words))] = f"иначе{number}"
            texts.append(" ".join(words))
        else:
            lines = [" ".join(f"слово{chance.randrange(3000)}" for _ in range(chance.randrange(8, 30))) for _ in "123"]
            texts.append("\n".join([OFTEN, *lines]))
    texts.append(OFTEN)
    rows = [{"text": text, "set": f"set {number % 3}"} for number, text in enumerate(texts)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines[7] = '{"text": 5}'
    lines[count // 2] = "not JSON"
    return "".join(f"{line}\n" for line in lines)
