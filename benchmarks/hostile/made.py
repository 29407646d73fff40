"""What many cases begin with, made once by artel itself: a run with its model, checkpoint and store; an adapter; …"""

from __future__ import annotations

import json

from hostile.case import Case, Place, Steps, merged, works
from hostile.results import store_of
from hostile.runner import Runner

CHATS = [
    {"messages": [{"role": "user", "content": f"word {number}"}, {"role": "assistant", "content": f"again {number}"}]}
    for number in range(40)
]
ENCODER = {
    "objective": "masked",
    "model": {"config": {"model_type": "roberta", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "intermediate_size": 16}},
}  # fmt: skip


def json_lines(rows: list[object]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def make(runner: Runner, name: str) -> None:
    """Put what a name stands for on the shelf: trained, encoder or adapter; `model` and `store` are of the first.

    Each but the last two is a whole folder: run.yaml, run/, stores/.
    """
    steps = {"trained": _trained, "encoder": _encoder, "adapter": _adapter}[name]
    verdict = runner.judge(Case("made", name, steps, quick=True))
    assert not verdict.faults, f"{name}: {verdict.faults}\n{verdict.err}"


def _trained(place: Place) -> Steps:
    yield works("train", place.run({"train": {"steps": 4}, "checkpoint": {"every": 1, "keep": 4}}))
    (place.shelf / "model").symlink_to("trained/run/model")
    (place.shelf / "store").symlink_to(f"trained/stores/{store_of(place).name}")
    place.work.rename(place.shelf / "trained")


def _encoder(place: Place) -> Steps:
    yield works("train", place.run(ENCODER))
    place.work.rename(place.shelf / "encoder")


def _adapter(place: Place) -> Steps:
    place.write("a.jsonl", json_lines(CHATS))
    place.take("model", "base")
    changes = {"objective": "chat", "data": {"sources": [{"path": "a.jsonl", "format": "chat"}], "block": 64}}
    lora = {"model": {"config": None, "from": "base", "lora": {"rank": 2}}, "tokenizer": {"train": None}}
    yield works("train", place.run(merged(changes, {"chat": {"template": "plain"}}), lora))
    place.work.rename(place.shelf / "adapter")
