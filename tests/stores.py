"""Documents of a store, as they come out of artel prepare."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from artel.config import TokenizerTraining
from artel.config.load import run_from
from artel.preparing import prepare
from artel.tokens import train_tokenizer


class Stored(NamedTuple):
    origin: str
    text: str
    part: str


@cache
def bytes_tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer that has a token for each byte and for what talks need."""
    wanted = TokenizerTraining(vocab=260, special=["<|im_start|>", "<|im_end|>"])
    train_tokenizer(iter(["x"]), wanted).save(folder / "bytes")
    return folder / "bytes"


def run_of(folder: Path, **sections):
    """A run whose store and folder lie in `folder`; its tokens are bytes when no tokenizer is given."""
    data = {"store": str(folder / "stores"), "validation": 0.0, **sections.pop("data", {})}
    tree = {"run": str(folder / "run"), **sections, "data": data}
    tree.setdefault("tokenizer", {"from": str(bytes_tokenizer(folder))})
    return run_from(tree, [], {(): "run.yaml"})


def stored(folder: Path, **sections):
    """(documents in the order of the store, ledger) of what artel prepare makes of a run."""
    prepared = prepare(run_of(folder, **sections))
    store, tokenizer = prepared.open(), prepared.tokenizer()
    documents = [
        Stored(origin, tokenizer.decode(ids[:-1] if ids[-1] == tokenizer.end_id else ids), part)
        for part in ("validation", "train")
        for origin, ids in getattr(store, part).each_sample()
    ]
    return documents, prepared.ledger()
