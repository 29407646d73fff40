"""What artel left, read by code of these files' own: ledgers, stores, metrics, weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hostile.case import Place, check


def store_of(place: Place, under: str = "stores") -> Path:
    """The only store of a case."""
    stores = [each.parent for each in (place / under).glob("*/manifest.json") if not each.parent.name.startswith(".")]
    check(len(stores) == 1, f"{len(stores)} stores in {under}")
    return stores[0]


def ledger(place: Place, under: str = "stores") -> dict[str, Any]:
    """The documents' counts of the only store; they must add up."""
    documents = json.loads((store_of(place, under) / "ledger.json").read_text())["documents"]
    dropped = sum(documents["dropped"].values())
    check(documents["read"] == documents["kept"] + dropped, f"read is not kept + dropped: {documents}")
    result: dict[str, Any] = documents
    return result


def rejected(place: Place, under: str = "stores") -> list[dict[str, Any]]:
    lines = (store_of(place, under) / "rejected.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def prepared_texts(place: Place, under: str = "stores") -> list[str]:
    """The training documents of the only store, read through its tokens."""
    from tokenizers import Tokenizer

    store = store_of(place, under)
    tokenizer = Tokenizer.from_file(str(store / "tokenizer" / "tokenizer.json"))
    manifest = json.loads((store / "manifest.json").read_text())
    width = "<u2" if tokenizer.get_vocab_size() <= 1 << 16 else "<u4"
    texts: list[str] = []
    for shard in manifest["parts"]["train"]["shards"]:
        path = store / "train" / shard["name"]
        tokens = np.fromfile(path.with_suffix(".tokens"), width)
        start = 0
        for end in np.fromfile(path.with_suffix(".ends"), "<u8"):
            texts.append(tokenizer.decode([int(token) for token in tokens[start:end]], skip_special_tokens=True))
            start = int(end)
    return texts


def has_whole_model(place: Place, run: str = "run") -> bool:
    return (place / run / "model" / "config.json").is_file() and (place / run / "result.json").is_file()


def logged_losses(place: Place, run: str = "run") -> list[float]:
    lines = (place / run / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def check_trained(place: Place) -> None:
    """A whole model was left, and its losses are finite."""
    check(has_whole_model(place), "no model was left")
    check(bool(np.isfinite(logged_losses(place)).all()), f"losses {logged_losses(place)}")
