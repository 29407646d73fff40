"""Checkpoints: damaged, moved, linked elsewhere, of another run; a run goes on from a whole one, or says why not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import xxhash
from mutations import change_bytes, change_json, change_safetensors
from safetensors.numpy import load_file

from hostile.case import Family, Place, Steps, check, ends, fails, refused, special, works
from hostile.given import given
from hostile.results import has_whole_model

family = Family("checkpoints")

AGAIN = ("train", "run.yaml")
"""Goes on from step 3 of 4."""


def checkpoints(place: Place) -> Path:
    """Those of a run of four steps, `run`, that was killed in its last one; the newest step's folder."""
    place.take("trained", ".")
    shutil.rmtree(place / "run/model")
    (place / "run/result.json").unlink()
    shutil.rmtree(newest(place))
    for name in ("latest", "best"):
        (place / "run/checkpoints" / name).unlink()
        (place / "run/checkpoints" / name).symlink_to(newest(place).name)
    return newest(place)


def newest(place: Place) -> Path:
    return sorted((place / "run/checkpoints").glob("step-*"))[-1]


def goes_on(change: Callable[[Place, Path], object], right: set[int], place: Place) -> Steps:
    """Status 0 is right only with a whole model of finite weights at step 4."""
    step = checkpoints(place)
    change(place, step)
    done = yield ends(right, *AGAIN)
    if done.status == 0:
        check(has_whole_model(place), "no model was left")
        check(json.loads((place / "run/result.json").read_text())["model_step"] == 4, "it is not of step 4")
        tensors = load_file(place / "run/model/model.safetensors")
        check(all(bool(np.isfinite(tensor).all()) for tensor in tensors.values()), "weights are not finite")


def _summed(step: Path, name: str, content: bytes) -> None:
    """Write a file of a checkpoint with its right checksum, so that what is read behind it is reached."""
    (step / name).write_bytes(content)
    sums = json.loads((step / "checksums.json").read_text())
    (step / "checksums.json").write_text(json.dumps(sums | {name: xxhash.xxh3_128_hexdigest(content)}))


def _state(**values: Any) -> Callable[[Place, Path], object]:
    def change(place: Place, step: Path) -> None:
        state = json.loads((step / "state.json").read_text()) | values
        _summed(step, "state.json", json.dumps(state).encode())

    return change


def _linked(name: str, target: str) -> Callable[[Place, Path], object]:
    def change(place: Place, step: Path) -> None:
        path = place / "run/checkpoints" / name
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return change


def _latest_is_a_folder(place: Place, step: Path) -> None:
    (step.parent / "latest").unlink()
    (step.parent / "latest").mkdir()
    place.write("run/checkpoints/latest/mine.txt", "mine")


def _moved_out(place: Place, step: Path) -> None:
    (place / "run/checkpoints").rename(place / "elsewhere")
    (place / "run/checkpoints").symlink_to("../elsewhere")
    place.own(place / "elsewhere")


def _special(name: str, make: Callable[[Path], object]) -> Callable[[Place, Path], object]:
    return lambda place, step: special(step / name, make)


_CHANGES: dict[str, Callable[[Place, Path], object]] = {
    "weights-cut": lambda place, step: os.truncate(step / "model.safetensors", 100),
    "weights-away": lambda place, step: (step / "model.safetensors").unlink(),
    "checksums-away": lambda place, step: (step / "checksums.json").unlink(),
    "checksums-of-brackets": lambda place, step: (step / "checksums.json").write_text("[" * 100_000),
    "step-below-nothing": _state(step=-5),
    "step-1e18": _state(step=10**18),
    "store-of-another": _state(store="0" * 32),
    "latest-is-a-folder": _latest_is_a_folder,
    "latest-leads-to-nothing": _linked("latest", "step-000000999"),
    "latest-leads-out": _linked("latest", "../../../etc"),
    "latest-leads-to-itself": _linked("latest", "latest"),
    "behind-a-link": _moved_out,
    "weights-are-a-fifo": _special("model.safetensors", os.mkfifo),
    "state-is-a-fifo": _special("state.json", os.mkfifo),
    "weights-are-a-folder": _special("model.safetensors", lambda path: path.mkdir()),
    "step-of-nothing": lambda place, step: (step.parent / "step-000000999").mkdir(),
    "step-of-a-name-that-forges": lambda place, step: (step.parent / "step-\nFORGED\x1b[2J").mkdir(),
    "step-of-1e30": lambda place, step: shutil.copytree(step, step.parent / f"step-{10**30}"),
    "leftover-of-a-kill": lambda place, step: shutil.copytree(step, step.parent / ".step-000000004.partial-1"),
}  # fmt: skip
family.each("{}", goes_on, _CHANGES, {0, 1, 2})


def changed(name: str, change: Callable[[bytes, Random], bytes], summed: bool, seed: int, place: Place) -> Steps:
    def damage(place: Place, step: Path) -> None:
        content = change((step / name).read_bytes(), Random(f"{name}:{seed}"))
        _summed(step, name, content) if summed else (step / name).write_bytes(content)

    yield from goes_on(damage, {0, 1, 2}, place)


for _seed in range(2):
    for _file, _way in (("state.json", change_json), ("optimizer.safetensors", change_safetensors),
                        ("model.safetensors", change_safetensors)):  # fmt: skip
        family.add(f"changed-{_file.split('.')[0]}-{_seed}", changed, _file, _way, True, _seed)
    family.add(f"bytes-changed-{_seed}", changed, "model.safetensors", change_bytes, False, _seed)


def _not_a_number(place: Place) -> None:
    step = checkpoints(place)
    whole = (step / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little") + 8
    nan = np.full((len(whole) - size) // 4, np.nan, "<f4").tobytes()
    _summed(step, "model.safetensors", whole[:size] + nan)


def _none_whole(place: Place) -> None:
    checkpoints(place)
    for step in (place / "run/checkpoints").glob("step-*"):
        (step / "model.safetensors").write_bytes(b"")


def _folder_is_a_file(place: Place) -> None:
    checkpoints(place)
    shutil.rmtree(place / "run/checkpoints")
    place.write("run/checkpoints", "mine")


_WORDS = ends({1, 2}, *AGAIN)
family.table(
    weights_of_nan_are_not_gone_on_with=given(_WORDS, make=_not_a_number, run=None),
    none_is_whole=given(_WORDS, make=_none_whole, run=None),
    folder_is_a_file=given(_WORDS, make=_folder_is_a_file, run=None),
    of_another_model=given(refused(*AGAIN, "model.config.n_embd=32"), make=checkpoints, run=None),
    of_another_text=given(refused(*AGAIN, "data.sources.0.documents=90"), make=checkpoints, run=None),
    goes_on_as_it_was=given(
        works(*AGAIN), make=checkpoints, run=None,
        then=lambda place: check(has_whole_model(place), "no model was left"),
    ),
)  # fmt: skip


@family.case
def of_deepspeed_that_is_none(place: Place) -> Steps:
    place.write("ds/latest", "global_step5")
    place.write("ds/global_step5/mp_rank_00_model_states.pt", b"cos\nsystem\n(S'touch ../executed'\ntR.")
    yield refused("export", "ds", "exported")
    place.write("ds/latest", "../../outside")
    yield refused("export", "ds", "exported")
    yield refused("train", place.run(), "--from-deepspeed", "ds")


@family.case
def disk_without_room_for_one(place: Place) -> Steps:
    from hostile.limits import small_disk

    small_disk(place, "disk", "100k")
    yield ends({1, 2}, "train", place.run({"run": "disk/run", "model": {"config": {"n_embd": 64}}}))
    check(not list((place / "disk").rglob("model/config.json")), "half a model was left")


@family.slow
def that_cannot_be_written_later(place: Place) -> Steps:
    from hostile.limits import small_disk

    disk = small_disk(place, "disk", "3m")
    fill = (
        lambda err: "untimely" in err or "steps of" in err,
        lambda pid: (disk / "fill").write_bytes(bytes(2_800_000)),
    )
    keys = {"run": "disk/run", "train": {"steps": 300}, "checkpoint": {"every": 5, "keep": 300}}
    place.changing.add("disk/fill")
    yield fails("train", place.run(keys), actions=(fill,))
