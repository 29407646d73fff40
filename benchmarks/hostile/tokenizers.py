"""Tokenizers: files that are none, expressions that never end, tokens of another's vocabulary."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from mutations import change_json
from tokenizers import Tokenizer, models, pre_tokenizers

from hostile.case import Command, Family, Place, Steps, check, ends, refused, special, works
from hostile.given import given, read_table
from hostile.results import ledger, prepared_texts

family = Family("tokenizers")

FROM = {"tokenizer": {"train": None, "from": "tokenizer"}}
GENERATE = ("--prompt", "a word", "--max-new-tokens", "5")


def tokenizer(place: Place) -> Path:
    """A user's tokenizer in `tokenizer`."""
    place.take_foreign("model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        place.write(f"tokenizer/{name}", (place / "model" / name).read_bytes())
    return place / "tokenizer/tokenizer.json"


def edit(place: Place, change: Callable[[dict[str, Any]], object], name: str = "tokenizer.json") -> None:
    for folder in ("tokenizer", "model"):
        path = place / folder / name
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))


def prepared(change: Callable[[Place], object], right: set[int], place: Place) -> Steps:
    """A run that takes the tokenizer, and a model that has it."""
    tokenizer(place)
    change(place)
    done = yield ends(right, "prepare", place.run(FROM), seconds=60)
    if done.status == 0:
        check(ledger(place)["kept"] > 0, ledger(place))
    yield ends(right, "generate", "model", *GENERATE, seconds=60)


def _edit(change: Callable[[dict[str, Any]], object], name: str = "tokenizer.json") -> Callable[[Place], object]:
    return lambda place: edit(place, change, name)


def _files(content: bytes | str) -> Callable[[Place], object]:
    return lambda place: [place.write(f"{folder}/tokenizer.json", content) for folder in ("tokenizer", "model")]


def _special(make: Callable[[Path], object]) -> Callable[[Place], object]:
    return lambda place: [special(place / folder / "tokenizer.json", make) for folder in ("tokenizer", "model")]


def _token(content: str, number: int, **more: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags, **more}


_REFUSED: dict[str, Callable[[Place], object]] = {
    "cut": lambda place: _files((place / "tokenizer/tokenizer.json").read_bytes()[:900])(place),
    "of-an-array": _files("[1]"),
    "of-brackets": _files("[" * 100_000),
    "fifo": _special(os.mkfifo),
    "dev-zero": _special(lambda path: path.symlink_to("/dev/zero")),
    "merge-of-what-is-not-there": _edit(lambda tree: tree["model"]["merges"].append(["nothing", "there"])),
    "vocabulary-of-nothing": _edit(lambda tree: tree["model"].update(vocab={}, merges=[])),
    "ids-beyond-32-bits": _edit(lambda tree: tree["model"]["vocab"].update({"zz": 2**40})),
    "model-of-no-type": _edit(lambda tree: tree["model"].update(type="Evil")),
}  # fmt: skip
family.each("{}", prepared, _REFUSED, {2})
_EITHER: dict[str, Callable[[Place], object]] = {
    "adds-10000-tokens": _edit(lambda tree: tree["added_tokens"].extend(
        _token(f"<t{number}>", 10_000 + number) for number in range(10_000))),
    "hole-in-the-ids": _edit(lambda tree: tree["model"]["vocab"].update({"zz": 50_000})),
    "special-that-forges": _edit(lambda tree: tree["added_tokens"].append(_token("\nartel: FORGED\x1b[2J", 298))),
    "special-that-is-empty": _edit(lambda tree: tree["added_tokens"].append(_token("", 298))),
    "without-an-end": _edit(lambda tree: [tree.pop(key, None) for key in ("eos_token", "bos_token")],
                            "tokenizer_config.json"),
    "own-code-beside": lambda place: place.write(
        "tokenizer/tokenization_evil.py", f"open({str(place.trap)!r}, 'w')\n"),
}  # fmt: skip
family.each("{}", prepared, _EITHER, {0, 2})
for _table, _file, _right in (("refused", "tokenizer.json", {2}), ("either", "tokenizer.json", {0, 2}),
                              ("config", "tokenizer_config.json", {0, 2})):  # fmt: skip
    for _name, _keys in read_table(family, _table).items():
        family.add(_name, prepared, _edit(lambda tree, keys=_keys: tree.update(keys), _file), _right)


@family.case
def cut_texts_are_refused_or_whole(place: Place) -> Steps:
    tokenizer(place)
    edit(place, lambda tree: tree.update(truncation={
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}))  # fmt: skip
    text = "a text of many more words than three, which a tokenizer that cuts would cut"
    place.write("a.txt", text)
    keys = {"data": {"sources": [{"path": "a.txt"}], "validation": 0, "block": 8}}
    done = yield ends({0, 2}, "prepare", place.run(FROM, keys))
    if done.status == 0:
        check(prepared_texts(place) == [text], prepared_texts(place))


_FOLDERS: dict[str, dict[str, bytes | str]] = {
    "sentencepiece-of-garbage": {"tokenizer.model": bytes(range(256)) * 40, "config.json": '{"model_type": "llama"}'},
    "pickle": {"tokenizer.pkl": b"cos\nsystem\n(S'touch executed'\ntR."},
    "vocab-txt-of-bytes": {"vocab.txt": bytes(range(256)), "tokenizer_config.json": '{"tokenizer_class": "Evil"}'},
}
for _name, _content in _FOLDERS.items():
    _files_of = {f"tokenizer/{file}": content for file, content in _content.items()}
    family.add(f"folder-of-{_name}", given(refused("prepare", "run.yaml"), files=_files_of, run=[FROM]))


def changed(seed: int, place: Place) -> Steps:
    """Values or bytes changed: refused, or texts that come back."""
    path = tokenizer(place)
    path.write_bytes(change_json(path.read_bytes(), Random(f"tokenizer:{seed}")))
    done = yield ends({0, 2}, "prepare", place.run(FROM))
    if done.status == 0:
        check(ledger(place)["kept"] > 0, ledger(place))


for _seed in range(6):
    family.add(f"changed-{_seed:02}", changed, _seed)


family.table(is_a_file=given(refused("prepare", "run.yaml"), files={"tokenizer": "{}"}, run=[FROM]))


@family.case
def of_another_vocabulary_than_the_model(place: Place) -> Steps:
    tokenizer(place)
    place.write("a.txt", "\n".join(f"words {number} of it" for number in range(500)))
    sources = {"data": {"sources": [{"path": "a.txt", "document": "line"}]}}
    yield works("prepare", place.run(sources, {"tokenizer": {"train": {"vocab": 310}}, "run": "other"}))
    (store,) = (each for each in (place / "stores").iterdir() if each.is_dir())
    keys = {"tokenizer": {"train": None, "from": str(store / "tokenizer")}}
    yield ends({0, 2}, "train", place.run(keys, {"model": {"config": None, "from": "model"}}))


def of_words(lines: list[str], verdict: Callable[..., Command], says: str, place: Place) -> Steps:
    """Texts under a vocabulary of four words."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", "a", "word", "of", "it"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "</s>"])
    place.write("tokenizer/tokenizer.json", backend.to_str())
    roles = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    place.write("tokenizer/tokenizer_config.json", json.dumps(roles))
    place.write("a.txt", "\n".join(lines))
    texts = {"data": {"sources": [{"path": "a.txt", "document": "line"}], "validation": 0}}
    yield verdict("prepare", place.run(FROM, texts), says=(says,))


_UNKNOWN = ["სახლი", "წყალი", "მზე"] * 9
family.add("words-that-are-all-unknown", of_words, _UNKNOWN, refused, "documents get the same ids")
family.add("a-word-that-is-unknown", of_words, ["a word of it", "a mill of it"], works, "are unknown")
