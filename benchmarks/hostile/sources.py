"""Sources: what a path can name, and what can be in the way of the files behind it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.case import SMALL, Family, Place, Steps, as_another_user, check, ends, merged, refused, small, works
from hostile.given import LINES, add_rows, given, read_table
from hostile.made import json_lines
from hostile.results import ledger, prepared_texts, rejected

family = Family("sources")

ESCAPES = "\x1b[2J\x1b]0;title\x07"


def _socket_file(place: Place) -> None:
    listener = socket.socket(socket.AF_UNIX)
    place.ends.append(listener.close)
    folder = os.open(place.work, os.O_RDONLY)  # a socket's path has 108 letters at most
    listener.bind(f"/proc/self/fd/{folder}/a.txt")
    os.close(folder)


def _sparse(place: Place) -> None:
    with place.write("a.txt").open("wb") as file:
        file.truncate(300_000_000)


PREPARE = works("prepare", "run.yaml")
EITHER = ends({0, 2}, "prepare", "run.yaml")
REFUSED = refused("prepare", "run.yaml")
add_rows(family, "refused", REFUSED)
add_rows(family, "read", PREPARE)
_TWO = [{"path": "a.txt"}, {"path": "*.txt"}]
family.table(
    socket=given(REFUSED, make=_socket_file, text="a.txt"),
    sparse_file=given(REFUSED, make=_sparse, text="a.txt"),
    link_to_the_parent=given(
        EITHER, files={f"texts/{name}.txt": f"{name} {LINES}" for name in "abc"}, links={"texts/up": ".."},
        text="texts/**/*.txt", read=3,
    ),
    two_links_to_one_another=given(
        EITHER, files={f"texts/{name}/{name}.txt": f"{name} {LINES}" for name in "ab"},
        links={"texts/a/to": "../b", "texts/b/to": "../a"}, text="texts/**/*.txt", read=2,
    ),
    one_file_by_two_paths=given(
        PREPARE, files={"a.txt": LINES}, make=lambda place: os.link(place / "a.txt", place / "b.txt"), kept=1,
        run=[{"data": {"sources": _TWO}}, SMALL | {"data": {"validation": 0, "block": 8, "sources": _TWO}}],
    ),
    name_that_is_no_utf_8=given(
        EITHER, text="*.txt", kept=1,
        make=lambda place: Path(os.fsdecode(os.fsencode(place.work) + b"/\xff\xfe.txt")).write_text(LINES),
    ),
    three_thousand_empty_files=given(
        REFUSED.having(says=("no document is left",)), files={f"texts/{number}.txt": "" for number in range(3000)},
        text="texts",
    ),
)  # fmt: skip


@family.case
def cache_in_the_texts(place: Place) -> Steps:
    place.write("texts/a.txt", LINES)
    run = place.run(merged(small("texts"), {"data": {"store": ""}}))
    yield refused("prepare", run, environment={"ARTEL_CACHE": str(place / "texts/cache")})


@family.case
def path_with_a_secret(place: Place) -> Steps:
    done = yield ends({1, 2}, "prepare", place.run(small("http://name:S3CRET@127.0.0.1:9/a.txt")))
    check("S3CRET" not in done.err + done.out, done.err)


@family.case
def shell_in_the_path(place: Place) -> Steps:
    yield refused("prepare", place.run(small(f"$(touch {place.trap});`touch {place.trap}`|touch {place.trap}")))


@family.case
def unreadable_for_this_user(place: Place) -> Steps:
    place.write("a.txt", LINES).chmod(0)
    yield refused("prepare", place.run(small("a.txt")), prefix=as_another_user(place))


def _lines(number: int, word: str) -> str:
    return "".join(f"{word} line of number {at}\n" for at in range(number))


def changing(word: str, change: Callable[[Place], object], right: Callable[[Place], bool], place: Place) -> Steps:
    """A text that changes while it is read: all of one state, or words."""
    place.write("a.txt", _lines(60_000, "old"))
    place.changing.add("a.txt")
    actions = ((lambda err: word in err, lambda pid: change(place)),)
    done = yield ends({0, 1, 2}, "prepare", place.run(small("a.txt", document="line")), actions=actions)
    if done.status == 0:
        check(right(place), f"{ledger(place)} of two states")


family.add(
    "text-replaced-while-it-is-read", changing, "training the tokenizer",
    lambda place: place.write("a.txt", _lines(1000, "new")),
    lambda place: "".join(f"{text}\n" for text in prepared_texts(place))
    in {_lines(60_000, "old"), _lines(1000, "new")},
)  # fmt: skip
family.add(
    "text-cut-while-it-is-encoded", changing, "text into tokens", lambda place: os.truncate(place / "a.txt", 20_000),
    lambda place: ledger(place)["read"] in (60_000, _lines(60_000, "old")[:20_000].count("\n") + 1),
)  # fmt: skip
family.add(
    "text-removed-while-it-is-read", changing, "training the tokenizer",
    lambda place: (place / "a.txt").unlink(missing_ok=True), lambda place: ledger(place)["read"] == 60_000,
)  # fmt: skip


@family.slow
def text_that_grows_for_ever(place: Place) -> Steps:
    place.write("a.txt", _lines(2000, "old"))
    place.changing.add("a.txt")
    grow = f'while sleep 0.01; do echo more words of it >> {place / "a.txt"}; done & exec "$@"'
    done = yield ends({0, 1, 2}, "prepare", place.run(small("a.txt", document="line")), prefix=("sh", "-c", grow, "-"))
    if done.status == 0:
        check(ledger(place)["read"] >= 2000, ledger(place))


def _talk(number: int, *turns: Any) -> dict[str, Any]:
    """A row with a tool, and turns between a question and an answer."""
    weather = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    question = {"role": "user", "content": f"How warm is it, for the time {number}?"}
    answer = {"role": "assistant", "content": f"{number} degrees."}
    return {"tools": [weather], "messages": [question, *turns, answer]}


def _calls(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}


_RESULT = {"role": "tool", "content": "18"}


def _is_rejected(reason: str, turns: list[Any], place: Place) -> Steps:
    """The row is, with its line and reason; those beside it are kept."""
    rows = [_talk(1, _calls({"city": "Rome"}), _RESULT), _talk(2, *turns), _talk(3, _calls("{}"), _RESULT)]
    place.write("a.jsonl", json_lines(rows))
    chat = {"objective": "chat", "chat": {"template": "plain"}}
    long = {"data": {"block": 2048}, "model": {"config": {"n_positions": 2048}}}
    yield works("prepare", place.run(small("a.jsonl", format="chat"), chat, long))
    check(ledger(place)["kept"] == 2 and ledger(place)["dropped"] == {reason: 1}, ledger(place))
    check([row["origin"] for row in rejected(place)] == ["a.jsonl:2"], rejected(place))


family.each("tools-{}", _is_rejected, read_table(family, "bad_turns"))


def unclosed(name: str, delimiter: str, place: Place) -> Steps:
    """A quote that is never closed costs its own row, or none where the table has no quoting."""
    rows = [f"a row of words {number}{delimiter}x" for number in range(400)]
    rows[7] = f'"{rows[7]}'
    place.write(name, "\n".join([f"text{delimiter}label", *rows]) + "\n")
    yield works("prepare", place.run(small(name, format="csv")))
    check(ledger(place)["kept"] >= 399, ledger(place))
    check([row["origin"] for row in rejected(place)] in ([], [f"{name}:9"]), rejected(place))


family.add("unclosed-quote-in-csv", unclosed, "a.csv", ",")
family.add("unclosed-quote-in-tsv", unclosed, "a.tsv", "\t")


@family.case
def folder_of_files_that_are_not_read(place: Place) -> Steps:
    for name in ("a.fb2", "b.fb2", "c.zip", "d.odt", "e"):
        place.write(f"texts/{name}", b"PK\3\4")
    yield refused("prepare", place.run(small("texts")), says=(".fb2",))
    place.write("texts/f.txt", LINES)
    for verb in (("config", "check"), ("prepare",)):
        yield works(*verb, "run.yaml", says=("not read: 2 .fb2, ", "1 without a suffix"))


@family.case
def text_of_no_name(place: Place) -> Steps:
    place.write("mine.txt", LINES)
    for text in ("", " "):
        yield refused("new", "--text", text, "--learn", "write", "--from", "scratch", "--time", "1min",
                      says=("--text",))  # fmt: skip
