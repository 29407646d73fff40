"""Run files and overrides: values out of all bounds, YAML that is more than values, names that lead elsewhere."""

from __future__ import annotations

import json
import os
from random import Random
from typing import Any

import yaml
from mutations import bomb, change_yaml

from hostile.case import TINY, Family, Place, Steps, check, ends, fails, refused, source, works
from hostile.given import add_rows, given, read_table
from hostile.made import CHATS, json_lines

family = Family("run files")

CHECK = refused("config", "check", "run.yaml")


def wrong(changes: dict[str, Any], says: list[str], place: Place) -> Steps:
    """Refused by `config check`, and by `train` in the same words."""
    run = place.run(changes)
    first = yield refused("config", "check", run, says=tuple(says))
    second = yield refused("train", run, says=tuple(says))
    missing = set(_messages(first.err)) ^ set(_messages(second.err))
    check(not missing, f"check and train do not say the same: {sorted(missing)}")


def _messages(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("artel: ")]


family.each("{}", wrong, read_table(family, "refused_alike"))
add_rows(family, "refused", CHECK)
_TREE = yaml.safe_dump(TINY)
for _name, _content in {
    "bomb-of-aliases": bomb() + _TREE,
    "alias-of-itself": "a: &a [*a]\n" + _TREE,
    "utf-16": _TREE.encode("utf-16"),
    "no-utf-8": _TREE.encode() + b"# \xff\n",
}.items():
    family.add(f"text-{_name}", given(CHECK, files={"run.yaml": _content}, run=None))


def changed(seed: int, place: Place) -> Steps:
    """A run file with other values, bytes or YAML: refused, or a run that is written down as itself."""
    place.write("run.yaml", change_yaml(_TREE.encode(), Random(f"run:{seed}")))
    done = yield ends({0, 2}, "config", "check", "run.yaml")
    if done.status == 0:
        place.write("again.yaml", done.out)
        again = yield works("config", "check", "again.yaml")
        check(again.out == done.out, "written down and read again it is another run")


for _seed in range(8):
    family.add(f"changed-{_seed:02}", changed, _seed)


@family.case
def deepspeed_file_that_is_hostile(place: Place) -> Steps:
    place.write("ds.json", b"[" * 100_000)
    yield refused("train", place.run({"parallel": {"deepspeed": "ds.json"}}))
    place.write("ds.json", json.dumps({"train_batch_size": 10**30, "zero_optimization": {"stage": -1}}))
    yield refused("train", place.run({"parallel": {"deepspeed": "ds.json"}}))


_CHAT = source("chat.jsonl", format="chat") | {"objective": "chat", "chat": {"template": "nowhere.jinja"}}
family.table(
    template_that_is_not_there=given(
        refused("config", "check", "run.yaml", says=("nowhere.jinja",)), files={"chat.jsonl": json_lines(CHATS)},
        run=[_CHAT],
    ),
)  # fmt: skip


@family.case
def slurm_options_that_break_lines(place: Place) -> Steps:
    forged = f"\ntouch {place.trap}\n#"
    for arguments in (("--partition", f"gpu{forged}"), ("--option", f"qos=high{forged}"),
                      ("--time", f"1:00{forged}"), ("--option", f"{forged}=x")):  # fmt: skip
        done = yield ends({0, 2}, "launch", "slurm", place.run(), "--dry-run", *arguments)
        check(f"\ntouch {place.trap}" not in done.out, f"a line of the script: {done.out}")


@family.case
def slurm_run_named_by_a_shell(place: Place) -> Steps:
    name = "a $(touch executed) `touch executed`;touch executed.yaml"
    done = yield ends({0, 2}, "launch", "slurm", place.run(name=name), "--dry-run")
    place.write(
        "script.sh", "srun() { :; }; sbatch() { :; }; scontrol() { :; }; python() { :; }; artel() { :; }\n" + done.out
    )
    os.system(f"cd {place.work} && timeout 5 bash script.sh >/dev/null 2>&1")
    check(not list(place.work.rglob("executed*")), "the run file's name was run")


_RAISING = {
    "exit": "sys.exit(0)",
    "base-exception": "raise Base('gone')",
    "exception-without-a-text": "raise Textless()",
}
_OWN = """\
import sys
class Base(BaseException): pass
class Textless(RuntimeError):
    def __str__(self): raise ValueError("none")
"""
_CALLBACK = """\
from artel.registry import CALLBACKS
@CALLBACKS.register("mine")
class Mine:
    def __init__(self, *_): pass
    def __call__(self, run):
        {}
"""


def own_code(statement: str, place: Place) -> Steps:
    """A callback, a plugin and a file of functions that raise: each is named in words, and nothing ends with 0."""
    place.write("mine.py", _OWN + _CALLBACK.format(statement))
    run = place.run({"plugins": ["mine"], "callbacks": ["mine"]})
    yield fails("train", run, says=("mine.py:10: your own code failed",))
    place.write("mine.py", f"{_OWN}{statement}\n")
    yield refused("train", run, says=("'mine' cannot be imported", "mine.py:5"))
    place.take("model")
    place.write("script.txt", "hello\n")
    yield refused("chat", "model", "--tools", "mine.py", "--script", "script.txt", says=("cannot be run", "mine.py:5"))


family.each("own-code-{}", own_code, _RAISING, quick=False)


def many(content: str, arguments: tuple[str, ...], place: Place) -> Steps:
    """A file of thousands of entries takes time in proportion."""
    place.write("a.yaml", content)
    yield ends({0, 2}, *arguments, "a.yaml", seconds=120)


_SET = "  - {{path: d{}.jsonl, type: chat_template, roles: {{user: [a]}}}}\n"
_SETS = f"base_model: m\ndatasets:\n{''.join(map(_SET.format, range(5000)))}"
_KEYS = "".join(f"key{number}: 1\n" for number in range(20_000))
family.add("axolotl-of-5000-data-sets", many, _SETS, ("config", "convert"))
family.add("20000-unknown-keys", many, _KEYS, ("config", "check"))
