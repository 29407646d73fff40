"""From sources to a token store: find it by its key, or make it.

All text work of a run is here, and it is over before any process group exists. Processes that start together meet at
a file lock: the first makes the store, the others find it. A store appears whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import xxhash

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.storage import cache_folder, lock, new_folder, remove_leftovers
from artel.text import (
    Document,
    Dropped,
    Ledger,
    NearDuplicates,
    Rejected,
    check_sources,
    read_documents,
    source_fingerprint,
)
from artel.tokens import StoreWriter, Tokenizer, TokenStore, load_tokenizer, train_tokenizer
from artel.tokens.store import FORMAT

# Documents encoded together: enough to keep all cores of `tokenizers` busy, little enough to stay under 100 MB.
_CHUNK_DOCUMENTS = 256
_CHUNK_CHARACTERS = 4_000_000

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A store ready to be read, and whether this call made it."""

    folder: Path
    made: bool

    def open(self) -> TokenStore:
        return TokenStore(self.folder)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(str(self.folder / "tokenizer"))

    def ledger(self) -> dict[str, Any]:
        return orjson.loads((self.folder / "ledger.json").read_bytes())


def prepare(run: RunConfig, tell: Tell = lambda _: None) -> Prepared:
    """The token store of a run: found when its inputs were seen before, else made. Raises InputError, WorkError."""
    check_sources(run.data)
    stores = Path(run.data.store) if run.data.store else cache_folder() / "stores"
    key = store_key(run)
    folder = stores / key
    if _is_whole(folder):
        return Prepared(folder, made=False)
    with lock(stores / f"{key}.lock", lambda: tell("waiting for another process that prepares the same text")):
        if _is_whole(folder):
            return Prepared(folder, made=False)
        remove_leftovers(stores)
        with new_folder(folder) as partial:
            _make(run, partial, key, tell)
    return Prepared(folder, made=True)


def store_key(run: RunConfig) -> str:
    """One short text for everything that the store's content depends on; cheap, no file is read."""
    data = run.data.model_dump(mode="json", exclude={"block", "store", "max_bad"})
    # Samples that stand alone are cut when they are made; blocks are cut when they are read.
    cut = {
        "masked": [run.data.block] if any(source.yields == "pairs" for source in run.data.sources) else None,
        "span_qa": [run.data.block, run.span_qa.question, run.span_qa.stride, run.span_qa.unknown_windows],
        "chat": [run.data.block, run.chat.model_dump(mode="json"), _template_file(run)],
        "preference": [run.data.block, run.chat.template, run.preference.loss == "kto", _template_file(run)],
    }
    inputs = {
        "format": FORMAT,
        "data": data,
        "files": source_fingerprint(run.data),
        "tokenizer": run.tokenizer.model_dump(mode="json"),
        "tokenizer_files": _tokenizer_files(run),
        "objective": [run.objective, cut.get(run.objective)],
    }
    return xxhash.xxh3_128_hexdigest(orjson.dumps(inputs, option=orjson.OPT_SORT_KEYS))


def tokenizer_name(run: RunConfig) -> str | None:
    """The folder or hub id that the tokenizer is taken from; None when it is trained."""
    if run.tokenizer.train is not None:
        return None
    return run.tokenizer.from_ or run.model.from_


def _tokenizer_files(run: RunConfig) -> list[Any]:
    name = tokenizer_name(run)
    if name is None or not Path(name).is_dir():
        return [name]
    wanted = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "chat_template")
    files = sorted(file for file in Path(name).iterdir() if file.name.startswith(wanted))
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _template_file(run: RunConfig) -> list[Any]:
    file = Path(run.chat.template)
    return [file.stat().st_size, file.stat().st_mtime_ns] if file.is_file() else []


def _is_whole(folder: Path) -> bool:
    return (folder / "manifest.json").is_file()


def _make(run: RunConfig, folder: Path, key: str, tell: Tell) -> None:
    # The objectives are imported late: they stand on torch, and a store that is found needs neither.
    from artel.objectives import objective_of, objective_type

    kind = objective_type(run)
    near = NearDuplicates(run.data.dedup.near, tell) if run.data.dedup.near is not None else None
    tokenizer = _tokenizer(run, kind.encoder, kind.special_tokens(run), near, tell)
    objective = objective_of(run, tokenizer)
    tokenizer.save(folder / "tokenizer")
    ledger = Ledger()
    writer = StoreWriter(folder, tokenizer.vocabulary)
    tell("turning text into tokens")
    for documents in _chunks(read_documents(run.data, ledger, near)):
        for document, made in zip(documents, objective.samples(documents), strict=True):
            record = document.record
            if isinstance(made, Rejected | Dropped):
                ledger.take_back(document, made)
                continue
            ledger.changed.update(made.counted)
            writer.add(document.part, made.samples, len(record.text.encode("utf-8")), record.origin, made.source)
    ledger.judge(run.data.max_bad)
    ledger.check()
    about = {"key": key, "objective": run.objective, "tokenizer": tokenizer.fingerprint}
    manifest = writer.close({**about, "vocabulary": tokenizer.vocabulary})
    _check_parts(run, manifest)
    counts = {name: {part: found[name] for part, found in manifest["parts"].items()} for name in ("tokens", "samples")}
    report = {**ledger.to_json(), **counts}
    (folder / "ledger.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))


def _tokenizer(run: RunConfig, encoder: bool, special: list[str], near: NearDuplicates | None, tell: Tell) -> Tokenizer:
    name = tokenizer_name(run)
    if name is not None:
        return load_tokenizer(name, "tokenizer.from" if run.tokenizer.from_ else "model.from")
    from artel.config import TokenizerTraining

    tell("training the tokenizer")
    documents = read_documents(run.data, Ledger(), near)  # the same documents come again, and are counted, when encoded
    texts = (document.record.text for document in documents if document.part == "train")
    wanted = run.tokenizer.train or TokenizerTraining()
    wanted = wanted.model_copy(update={"special": list(dict.fromkeys([*special, *wanted.special]))})
    return train_tokenizer(texts, wanted, encoder=encoder)


def _chunks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in groups that are encoded together; a group ends early when it has many characters."""
    while True:
        chunk: list[Document] = []
        characters = 0
        for document in islice(documents, _CHUNK_DOCUMENTS):
            chunk.append(document)
            characters += len(document.record.text)
            if characters >= _CHUNK_CHARACTERS:
                break
        if not chunk:
            return
        yield chunk


def _check_parts(run: RunConfig, manifest: dict[str, Any]) -> None:
    parts = manifest["parts"]
    if run.data.validation != 0.0 and parts["validation"]["samples"] == 0:
        documents = parts["train"]["documents"]
        raise InputError(
            [Problem("data.validation", f"none of the {documents:,} documents fell into the validation part",
                     "write data.validation: 0, a larger fraction or a path; or cut the text into more documents "
                     "(data.sources.0.document=paragraph)")]
        )  # fmt: skip
    if run.data.validation != 1.0 and parts["train"]["samples"] == 0:
        raise InputError(
            [Problem("data.sources", "no training sample could be made of them", "see what was dropped, and raise "
                     "data.max_bad or mend it")]
        )  # fmt: skip
