"""Chat templates: programs in a file of others, which must neither take all memory, nor never end, nor get out."""

from __future__ import annotations

import json
import os
from typing import Any

from hostile.case import GB, Family, Place, Steps, check, ends, given, merged, refused, works
from hostile.made import CHATS, json_lines
from hostile.results import ledger

family = Family("templates")

KEYS = {
    "objective": "chat",
    "data": {"sources": [{"path": "a.jsonl", "format": "chat"}], "block": 64, "max_bad": 0.5},
    "tokenizer": {"train": {"vocab": 270}},
}
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def keys(**chat: Any) -> dict[str, Any]:
    return merged(KEYS, {"chat": chat})


def written(template: str, both: bool, place: Place) -> Steps:
    """As chat.template; `both`: and as the template of a model's folder."""
    place.write("a.jsonl", json_lines(CHATS))
    place.write("t.jinja", template)
    yield refused("prepare", place.run(keys(template="t.jinja")), memory=2 * GB, says=("template",))
    if not both:
        return
    place.take_foreign("model")
    config = json.loads((place / "model/tokenizer_config.json").read_text())
    place.write("model/tokenizer_config.json", json.dumps(config | {"chat_template": template}))
    place.write("script.txt", "hello\n")
    yield refused("chat", "model", "--script", "script.txt", "--new-tokens", 2, memory=2 * GB, says=("template",))


_NEST = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
for _name, _template in {
    "ten-billion-letters": "{{ 'a' * 10**10 }}",
    "power-of-powers": "{{ 9**9**9 }}",
    "nested-loops": _NEST,
    "nested-loops-of-letters": PLAIN
    + "{% for a in range(9999) %}{% for b in range(9999) %}{{ 'a' }}{% endfor %}{% endfor %}",
    "range-without-end": "{% for a in range(10**12) %}a{% endfor %}",
    "calls-itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "centres-a-letter": "{{ 'a'|center(10**10) }}",
    "formats-by-braces": "{{ '{:>10000000000}'.format(1) }}",
    "doubles": "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "list-of-1e10": "{{ ([0] * 10**10)|length }}",
    "replaces-letters": "{{ ('a' * 100000).replace('a', 'b' * 1000000) }}",
    "code-by-classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "code-by-globals": "{{ lipsum.__globals__['os'].system('touch ../executed') }}",
    "includes-a-file": "{% include '/etc/passwd' %}",
    "imports-a-file": "{% import 'os' as os %}{{ os.system('touch ../executed') }}",
    "syntax": "{% for m in messages %}",
    "name-of-nothing": "{{ nothing.at.all }}",
    "refuses-with-escapes": "{{ raise_exception('\\nartel: FORGED\\x1b[2J') }}",
    "divides-by-nothing": "{{ 1 // 0 }}",
    "forgets-the-answer": "{{ messages[0].content }}",
    "brackets-10000": "{{ " + "(" * 10_000 + ")" * 10_000 + " }}",
}.items():
    family.add(_name, written, _template, _name in ("ten-billion-letters", "nested-loops", "calls-itself"))


def file_is(make: Any, place: Place) -> Steps:
    place.write("a.jsonl", json_lines(CHATS))
    make(place)
    yield refused("prepare", place.run(keys(template="t.jinja")), says=("chat.template",))


for _name, _make in {
    "fifo": lambda place: os.mkfifo(place / "t.jinja"),
    "dev-zero": lambda place: (place / "t.jinja").symlink_to("/dev/zero"),
    "folder": lambda place: (place / "t.jinja").mkdir(),
    "book": lambda place: place.write("t.jinja", PLAIN + "words " * 5_000_000),
}.items():
    family.add(f"file-is-a-{_name}", file_is, _make)


def either(template: str, place: Place) -> Steps:
    """May be refused; where it is taken, each conversation is kept or dropped with a reason."""
    place.write("a.jsonl", json_lines(CHATS))
    place.write("t.jinja", template)
    done = yield ends({0, 2}, "prepare", place.run(keys(template="t.jinja")))
    if done.status == 0:
        check(ledger(place)["read"] == len(CHATS), ledger(place))


for _name, _template in {
    "control-characters": PLAIN.replace("assistant: ", "assistant:\x1b[2J "),
    "content-twice": "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    "date-of-today": PLAIN + "{{ strftime_now('%s') }}",
    "by-chance": PLAIN + "{{ range(100000)|random }}",
}.items():
    family.add(f"with-{_name}", either, _template)


_FORGED = [{"messages": [{"role": "\nartel: FORGED\x1b[2J", "content": "x"}]}]
family.table(
    plain_one_is_right=given(
        works("prepare", "run.yaml"), files={"a.jsonl": json_lines(CHATS), "t.jinja": PLAIN}, kept=len(CHATS),
        run=[keys(template="t.jinja")],
    ),
    roles_that_forge=given(
        refused("prepare", "run.yaml"), files={"a.jsonl": json_lines(_FORGED)}, run=[keys(template="plain")]
    ),
)  # fmt: skip


@family.case
def texts_that_are_templates(place: Place) -> Steps:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{number} {{{{ 'a' * 10**10 }}}}{{% include 'x' %}}"},
                {"role": "assistant", "content": f"answer {number} {{{{ 7 * 7 }}}}"},
            ]
        }
        for number in range(20)
    ]
    place.write("a.jsonl", json_lines(list(rows)))
    yield works("prepare", place.run(keys(template="plain"), {"data": {"block": 128}}))
    check(ledger(place)["kept"] == 20, ledger(place))


@family.case
def contents_of_wrong_kinds(place: Place) -> Steps:
    contents: list[Any] = [None, 5, [], {}, [None], [{"type": "image"}], {"a": {"a": {}}}, True]
    rows = [
        {"messages": [{"role": "user", "content": each}, {"role": "assistant", "content": each}]} for each in contents
    ]
    place.write("a.jsonl", json_lines([*rows, *CHATS]))
    yield works("prepare", place.run(keys(template="plain")))
    check(ledger(place)["kept"] >= len(CHATS), ledger(place))
