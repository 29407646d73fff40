"""Token stores and imported tokens: manifests that lie, shards that are cut, names that lead out."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
import xxhash
import yaml
from mutations import change_bytes, change_json

from hostile.case import TINY, Family, Place, Steps, check, ends, refused, special, works
from hostile.given import add_rows, given
from hostile.results import check_trained, store_of

family = Family("stores")


def run(place: Place) -> str:
    """A run file that trains from `store`."""
    tree = {**TINY, "data": {"from_store": "store", "block": 32}, "tokenizer": {"train": None}}
    place.write("run.yaml", yaml.safe_dump(tree))
    return "run.yaml"


def signed(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, with the checksums of its files and its own made right."""
    manifest = orjson.loads((store / "manifest.json").read_bytes())
    change(manifest)
    for part in ("train", "validation"):
        for shard in manifest["parts"][part]["shards"]:
            for name, entry in shard["files"].items():
                path = store / part / name
                if path.is_file() and isinstance(entry, dict):
                    entry |= {"bytes": path.stat().st_size, "xxh3_128": xxhash.xxh3_128_hexdigest(path.read_bytes())}
    manifest.pop("checksum", None)
    manifest["checksum"] = xxhash.xxh3_128_hexdigest(orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS))
    (store / "manifest.json").write_bytes(orjson.dumps(manifest))


def used(change: Callable[[Path], object], right: set[int], place: Place) -> Steps:
    """A store of others is verified, shown, and trained from."""
    store = place.take_foreign("store")
    change(store)
    yield ends(right, "data", "verify", "store")
    done = yield ends(right, "train", run(place))
    if done.status == 0:
        check_trained(place)


def _special(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda store: special(store / name, make)


def _tokens(value: int) -> Callable[[Path], object]:
    def change(store: Path) -> None:
        path = store / "train/00000.tokens"
        np.full(path.stat().st_size // 2, value, "<u2").tofile(path)
        signed(store, lambda manifest: None)

    return change


def _ends(change_ends: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], object]:
    def change(store: Path) -> None:
        path = store / "train/00000.ends"
        change_ends(np.fromfile(path, "<u8")).astype("<u8").tofile(path)
        signed(store, lambda manifest: None)

    return change


def _part(**values: Any) -> Callable[[Path], object]:
    return lambda store: signed(store, lambda manifest: manifest["parts"]["train"].update(values))


def _manifest(content: bytes) -> Callable[[Path], object]:
    return lambda store: (store / "manifest.json").write_bytes(content)


def _shard_named(name: str) -> Callable[[Path], object]:
    def change(manifest: dict[str, Any]) -> None:
        shard = manifest["parts"]["train"]["shards"][0]
        shard["files"] = {key.replace(shard["name"], name): entry for key, entry in shard["files"].items()}
        shard["name"] = name

    return lambda store: signed(store, change)


_REFUSED: dict[str, Callable[[Path], object]] = {
    "tokens-cut": lambda store: os.truncate(store / "train/00000.tokens", 100),
    "tokens-away": lambda store: (store / "train/00000.tokens").unlink(),
    "manifest-away": lambda store: (store / "manifest.json").unlink(),
    "manifest-of-nothing": _manifest(b""),
    "manifest-of-brackets": _manifest(b"[" * 100_000),
    "manifest-is-a-fifo": _special("manifest.json", os.mkfifo),
    "tokens-are-a-fifo": _special("train/00000.tokens", os.mkfifo),
    "shard-that-leads-out": _shard_named("../../outside"),
    "shard-that-forges": _shard_named("\nFORGED\x1b[2J"),
    "tokens-1e18": _part(tokens=10**18),
    "tokens-below-nothing": _part(tokens=-5),
    "type-of-another-width": lambda store: signed(store, lambda manifest: manifest.update(dtype="uint64")),
    "format-of-tomorrow": lambda store: signed(store, lambda manifest: manifest.update(format=10**9)),
    "tokenizer-away": lambda store: shutil.rmtree(store / "tokenizer"),
}
family.each("{}", used, _REFUSED, {2})


def _origins(store: Path) -> None:
    (store / "train/00000.origins").write_text("\x1b[2J\rartel: FORGED\n" * 99)
    signed(store, lambda manifest: None)


family.add("as-it-was-made", used, lambda store: None, {0})
_EITHER: dict[str, Callable[[Path], object]] = {
    "tokens-beyond-the-vocabulary": _tokens(65_000),
    "ends-that-fall": _ends(lambda ends_of: ends_of[::-1]),
    "ends-beyond-the-tokens": _ends(lambda ends_of: ends_of + 2**40),
    "ends-of-nothing": _ends(lambda ends_of: ends_of * 0),
    "ledger-away": lambda store: (store / "ledger.json").unlink(),
    "origins-that-forge": _origins,
    "tokenizer-of-nothing": lambda store: (store / "tokenizer/tokenizer.json").write_bytes(b""),
}  # fmt: skip


def either(change: Callable[[Path], object], place: Place) -> Steps:
    """May be found by one verb and not by another; trained from only to a finite loss."""
    store = place.take_foreign("store")
    change(store)
    yield ends({0, 2}, "data", "verify", "store")
    yield ends({0, 2}, "data", "show", "store")
    done = yield ends({0, 1, 2}, "train", run(place))
    if done.status == 0:
        check_trained(place)


family.each("{}", either, _EITHER)


def _changed(name: str, change_file: Callable[[bytes, Random], bytes], seed: str) -> Callable[[Path], object]:
    return lambda store: (store / name).write_bytes(change_file((store / name).read_bytes(), Random(seed)))


for _seed, _name in enumerate(("tokens", "ends", "origins")):
    family.add(f"manifest-changed-{_seed}", either, _changed("manifest.json", change_json, f"store:{_seed}"))
    family.add(f"shard-changed-{_seed}", used, _changed(f"train/00000.{_name}", change_bytes, f"shard:{_seed}"), {2})


@family.case
def in_the_cache_damaged_later(place: Place) -> Steps:
    run = place.run()
    yield works("prepare", run)
    os.truncate(store_of(place) / "train/00000.tokens", 10)
    yield ends({0, 2}, "prepare", run)
    yield works("prepare", run)
    yield works("data", "verify", store_of(place).relative_to(place.work))


def prepared_again(change: Callable[[Place], object], place: Place) -> Steps:
    run = place.run()
    yield works("prepare", run)
    change(place)
    yield ends({0, 2}, "prepare", run)


def _lock_is_a_folder(place: Place) -> None:
    (lock,) = (place / "stores").glob("*.lock")
    lock.unlink()
    (lock / "mine").mkdir(parents=True)


def _named(below: str) -> Callable[[Place], object]:
    def change(place: Place) -> None:
        store = store_of(place)
        shutil.rmtree(store)
        place.write(f"{store.relative_to(place.work)}{below}", "mine")

    return change


family.add("lock-that-is-a-folder", prepared_again, _lock_is_a_folder)
family.add("name-that-another-file-has", prepared_again, _named(""))
family.add("name-that-a-foreign-folder-has", prepared_again, _named("/mine.txt"))
family.table(folder_is_a_file=given(refused("prepare", "run.yaml"), files={"stores": "mine"}))


def while_training(change: Callable[[Place], object], place: Place) -> Steps:
    """A file that is mapped into memory and becomes shorter ends a process by SIGBUS: words would be better."""
    actions = ((lambda err: "steps of" in err, lambda pid: change(place)),)
    yield ends({0, 1, 2}, "train", place.run({"train": {"steps": 200}}), actions=actions)


family.each("{}-while-training", while_training, {
    "removed": lambda place: shutil.rmtree(place / "stores", ignore_errors=True),
    "cut": lambda place: os.truncate(store_of(place) / "train/00000.tokens", 0),
})  # fmt: skip

# Imported tokens

_NPY = np.arange(5000, dtype="<u2") % 250


def imported(files: dict[str, bytes], path: str, place: Place) -> Steps:
    """Refused, and nothing is left."""
    place.take_foreign("model")
    for name, content in files.items():
        place.write(name, content)
    yield refused("data", "import", path, "made", "--tokenizer", "model")
    check(not (place / "made/manifest.json").exists(), "a store was written")


_INDEX = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 1) + struct.pack("<iqqq", 5000, 0, 0, 1)
for _name, _files in {
    "of-nothing": {"a.bin": b""},
    "of-half-a-token": {"a.bin": _NPY.tobytes()[:-1]},
    "beyond-the-vocabulary": {"a.bin": (_NPY + 60_000).tobytes()},
    "index-of-nothing": {"a.bin": _NPY.tobytes(), "a.idx": b""},
    "index-that-lies": {"a.bin": _NPY.tobytes(), "a.idx": _INDEX.replace(struct.pack("<i", 5000), b"\xff\xff\xff\x7f")},
    "index-of-1e18": {"a.bin": _NPY.tobytes(), "a.idx": b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 10**18, 10**18)},
    "header-of-llm-c-that-lies": {"a.bin": struct.pack("<256i", 20240520, 1, 2**30, *[0] * 253) + _NPY.tobytes()},
}.items():  # fmt: skip
    family.add(f"import-{_name}", imported, _files, "a.bin")


_IMPORT = refused("data", "import", "a.bin", "made", "--tokenizer", "model")
family.table(
    import_of_a_fifo=given(_IMPORT, foreign=["model"], make=lambda place: os.mkfifo(place / "a.bin"), run=None),
    import_over_a_folder=given(
        _IMPORT, refused("data", "import", "a.bin", "model", "--tokenizer", "model"), foreign=["model"],
        files={"a.bin": _NPY.tobytes(), "made/mine.txt": "mine"}, run=None,
    ),
)  # fmt: skip


add_rows(family, "paths", name="verify-{}", run=None)
