"""Cases that are data: what is there, commands, and what holds once they worked. Many are rows of a family's YAML file.

A row has the arguments of `given` by name, except:

- `do`: commands in place of those that all rows of a table share, each as `refused train run.yaml`, or as a list. The
  first word is `works`, `refused` or `fails`, or the exit statuses that are right, as `0|2`.
- `says`, `memory`, `environment` and the other fields of a Command, which its commands then have.
- `slow: true`: it takes more than a fork or two and a few seconds.

Beside plain YAML there are `!times [TEXT, COUNT]`, `!join [TEXT, …]`, and `!bytes TEXT` with a letter a byte.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from hostile.case import Command, Family, Place, Steps, check, edit_json, ends, small, special
from hostile.results import ledger

LINES = "".join(f"a line of words, number {number}\n" for number in range(400))
_VERDICTS = {"works": {0}, "fails": {1}, "refused": {2}}


class _Loader(yaml.SafeLoader):
    """Reads the three tags of these files."""


def _times(loader: _Loader, node: yaml.SequenceNode) -> str | bytes:
    text, count = loader.construct_sequence(node, deep=True)
    return text * count


def _join(loader: _Loader, node: yaml.SequenceNode) -> str | bytes:
    first, *rest = loader.construct_sequence(node, deep=True)
    return type(first)().join([first, *rest])


_Loader.add_constructor("!times", _times)
_Loader.add_constructor("!join", _join)
_Loader.add_constructor("!bytes", lambda loader, node: loader.construct_scalar(node).encode("latin-1"))


def read_table(family: Family, table: str) -> dict[str, Any]:
    """The rows of a table of a family's YAML file, by name; a list is a tuple, for `Family.each`."""
    file = Path(__file__).parent / f"{family.name.replace(' ', '_')}.yaml"
    rows = yaml.load(file.read_text(encoding="utf-8"), _Loader)[table]
    return {name: tuple(row) if isinstance(row, list) else row for name, row in rows.items()}


def add_rows(
    family: Family, table: str, *commands: Command, name: str = "{}", content: str = "", **shared: Any
) -> None:
    """Add a case for each row of a table, with the commands and the keys that all of them share.

    `name`: of a case, `{}` stands for the row's. `content`: a row that is no mapping is what this file holds.
    """
    for key, keys in read_table(family, table).items():
        own = keys if isinstance(keys, dict) else {"files": {content: keys}}
        row = shared | own
        if "files" in own:
            row["files"] = shared.get("files", {}) | own["files"]
        if own.get("run"):
            row["run"] = [*shared.get("run", ()), *own["run"]]
        quick = not row.pop("slow", False)
        does = [_command(words) for words in row.pop("do", ())] or commands
        options = {option.name: row.pop(option.name) for option in fields(Command) if option.name in row}
        options |= {option: tuple(value) for option, value in options.items() if isinstance(value, list)}
        steps = given(*(command.having(**options) for command in does), **row)
        family.add(name.replace("{}", key), steps, quick=quick)


def _command(words: str | list[str]) -> Command:
    verdict, *arguments = shlex.split(words) if isinstance(words, str) else words
    return ends(_VERDICTS.get(verdict) or set(map(int, verdict.split("|"))), *arguments)


def given(
    *commands: Command,
    take: str = "",
    foreign: Sequence[str] = (),
    files: Mapping[str, bytes | str] | None = None,
    lines: Sequence[str] = (),
    fifos: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
    folders: Sequence[str] = (),
    edits: Mapping[str, Mapping[str, Any]] | None = None,
    make: Callable[[Place], object] = lambda place: None,
    run: Sequence[Mapping[str, Any]] | None = (),
    text: str | Mapping[str, Any] | None = None,
    appended: str = "",
    kept: int | None = None,
    read: int | None = None,
    absent: Sequence[str] = (),
    then: Callable[[Place], object] = lambda place: None,
) -> Callable[[Place], Steps]:
    """Return the steps of a case that is data.

    `take` is artel's own folder of the shelf, unpacked; `foreign` are a user's. `files`, `lines` (files that hold
    LINES), `fifos`, `links` (to what) and `folders` are made, in place of what is there; `edits` are keys of JSON
    files. `run`: changes of run.yaml, None for no such file; `text`: the path or keys of a small source that it reads;
    `appended` to it. `kept`, `read`: documents in the ledger, where the last command worked, and then `then` is called.
    `absent`: what must not be there in the end.
    """

    def steps(place: Place) -> Steps:
        if take:
            place.take(take, ".")
        for name in foreign:
            place.take_foreign(*name.split(">"))
        for name, content in (files or {}).items():
            place.write(name, content)
        for name in lines:
            place.write(name, LINES)
        for name in folders:
            special(place / name, lambda path: path.mkdir(parents=True))
        for name in fifos:
            special(place / name, os.mkfifo)
        for name, target in (links or {}).items():
            special(place / name, lambda path, target=target: path.symlink_to(target))
        for name, values in (edits or {}).items():
            edit_json(place / name, **values)
        make(place)
        if run is not None and not take:
            keys = {"path": text} if isinstance(text, str) else text
            place.run(*([small(**keys)] if keys is not None else []), *run)
        if appended:
            with (place / "run.yaml").open("a", encoding="utf-8") as file:
                file.write(appended)
        done = None
        for command in commands:
            done = yield command
        for name in absent:
            check(not os.path.lexists(place / name), f"{name} was written")
        if done is not None and done.status == 0:
            if kept is not None:
                check(ledger(place)["kept"] == kept, ledger(place))
            if read is not None:
                check(ledger(place)["read"] == read, ledger(place))
            then(place)

    return steps
