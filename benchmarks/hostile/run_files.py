"""Run files and overrides: values out of all bounds, YAML that is more than values, names that lead elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from random import Random
from typing import Any

import yaml
from mutations import bomb, change_yaml

from hostile.case import TINY, Family, Place, Steps, check, ends, fails, given, refused, source, works
from hostile.made import CHATS, json_lines

family = Family("run files")

CHAIN = ("config", "check")


def wrong(changes: dict[str, Any], says: tuple[str, ...], both: bool, place: Place) -> Steps:
    """Refused by `config check`; `both`: and by `train`, with the same words."""
    run = place.run(changes)
    first = yield refused("config", "check", run, says=says)
    if not both:
        return
    second = yield refused("train", run, says=says)
    missing = set(_messages(first.err)) ^ set(_messages(second.err))
    check(not missing, f"check and train do not say the same: {sorted(missing)}")


def _messages(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("artel: ")]


def _train(**keys: Any) -> dict[str, Any]:
    return {"train": keys}


def _model(**keys: Any) -> dict[str, Any]:
    return {"model": {"config": keys}}


_WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "batch-1e18": (_train(batch=10**18), ("train.batch",)),
    "threads-1e6": (_train(threads=10**6), ("train.threads",)),
    "steps-1e30": (_train(steps=10**30), ("train.steps",)),
    "warmup-far-beyond-the-end": (_train(steps=30, warmup=2000), ("train.warmup",)),
    "rate-of-nan": (_train(learning_rate=float("nan")), ("train.learning_rate",)),
    "clip-nan": (_train(clip=float("nan")), ("train.clip",)),
    "seed-beyond-64-bits": ({"seed": 2**70}, ("seed",)),
    "vocab-1e12": ({"tokenizer": {"train": {"vocab": 10**12}}}, ("tokenizer.train.vocab",)),
    "special-that-is-empty": ({"tokenizer": {"train": {"special": [""]}}}, ("tokenizer.train.special",)),
    "block-1e12": ({"data": {"block": 10**12}}, ("data.block",)),
    "workers-1e9": ({"prepare": {"workers": 10**9}}, ("prepare.workers",)),
    "max-bad-of-two": ({"data": {"max_bad": 2}}, ("data.max_bad",)),
    "validation-nan": ({"data": {"validation": float("nan")}}, ("data.validation",)),
    "regex-that-is-none": ({"data": {"clean": {"drop_lines": ["("]}}}, ("data.clean.drop_lines",)),
    "run-of-300": ({"run": "r" * 300}, ("run",)),
    "run-below-dev-null": ({"run": "/dev/null/run"}, ("run",)),
    "store-of-300": ({"data": {"store": "s" * 300}}, ("data.store",)),
    "store-below-a-file": ({"data": {"store": "run.yaml/stores"}}, ("data.store",)),
    "layers-by-a-wrong-name": (_model(n_layers=2), ("n_layers",)),
    "heads-that-do-not-divide": (_model(n_embd=100, n_head=3), ("model.config",)),
    "layers-below-nothing": (_model(n_layer=-1), ("model.config",)),
    "layers-two-in-letters": (_model(n_layer="two"), ("model.config",)),
    "layers-1e9": (_model(n_layer=10**9), ("model",)),
    "activation-that-is-none": (_model(activation_function="os.system"), ("model.config",)),
    "model-of-a-tetrabyte": (_model(n_layer=96, n_embd=12288, n_head=96), ("model.config",)),
    "model-type-of-escapes": (_model(model_type="\x1b[2J\nFORGED"), ("model.config",)),
    "masked-by-gpt2": ({"objective": "masked"}, ("model.config",)),
    "tokenizer-that-is-not-there": ({"tokenizer": {"train": None, "from": "./nowhere"}}, ("tokenizer.from",)),
    "model-that-is-not-there": ({"model": {"config": None, "from": "./nowhere"}}, ("nowhere",)),
    "text-that-is-not-there": (source("nowhere.txt"), ("data.sources.0.path",)),
    "tensor-of-three": ({"parallel": {"tensor": 3}}, ("parallel",)),
    "pipeline-of-more-than-layers": ({"parallel": {"pipeline": 64}}, ("parallel",)),
    "deepspeed-file-that-is-not-there": ({"parallel": {"deepspeed": "nowhere.json"}}, ("nowhere.json",)),
    "three-of-a-kind": ({"train": {"batch": 0, "warmup": -1}, "seed": "x"}, ("train.batch", "train.warmup", "seed")),
    "tracker-with-a-path": ({"track": ["../../executed"]}, ("track",)),
}
_BOTH = ("batch-1e18", "vocab-1e12", "layers-by-a-wrong-name", "heads-that-do-not-divide", "masked-by-gpt2",
         "model-of-a-tetrabyte", "tokenizer-that-is-not-there", "three-of-a-kind", "store-of-300")  # fmt: skip
for _name, (_changes, _says) in _WRONG.items():
    family.add(_name, wrong, _changes, _says, _name in _BOTH)


def text_of_a_run(content: bytes | str, verb: tuple[str, ...], place: Place) -> Steps:
    """A file that is no run."""
    place.write("run.yaml", content)
    yield refused(*verb, "run.yaml")


_TREE = yaml.safe_dump(TINY)
_TEXTS: dict[str, bytes | str] = {
    "bomb-of-aliases": bomb() + _TREE,
    "alias-of-itself": "a: &a [*a]\n" + _TREE,
    "code-by-a-tag": "run: !!python/object/apply:os.system ['touch ../executed']\n",
    "module-by-a-tag": "run: !!python/module:os\n",
    "dates-as-keys": _TREE + "2026-01-01: 5\n",
    "numbers-as-keys": _TREE + "5: 5\ntrue: x\nnull: y\n",
    "list-as-a-key": _TREE + "? [a, b]\n: 5\n",
    "key-given-twice": _TREE + "seed: 1\nseed: 2\n",
    "brackets-10000": "run: " + "[" * 10_000,
    "number-of-5000-digits": _TREE + "seed: " + "9" * 5000 + "\n",
    "nul": _TREE.encode() + b"\0",
    "utf-16": _TREE.encode("utf-16"),
    "no-utf-8": _TREE.encode() + b"# \xff\n",
    "key-that-forges": _TREE + '"\\nartel: FORGED \\e[2J": 1\n',
    "value-that-forges": _TREE + 'objective: "\\nartel: FORGED \\e[2J"\n',
    "of-nothing": b"",
    "of-a-word": "word\n",
    "of-20-mb": "# " + "x" * 20_000_000 + "\nseed: nothing\n",
}  # fmt: skip
for _name, _content in _TEXTS.items():
    family.add(f"text-{_name}", text_of_a_run, _content, CHAIN)
for _name, _content in {
    "code-by-a-tag": "output_dir: !!python/object/apply:os.system ['touch ../executed']\n",
    "brackets": b"[" * 100_000,
    "json-of-nan": b'{"inputs_path": NaN, "epochs": 1e999}',
    "nothing-known": "a: 1\n",
}.items():
    family.add(f"convert-{_name}", text_of_a_run, _content, ("config", "convert"))


def special_file(make: Callable[[Place], object], verb: tuple[str, ...], place: Place) -> Steps:
    """A run file that is no file."""
    make(place)
    yield refused(*verb, "run.yaml")


for _name, _make in {
    "fifo": lambda place: os.mkfifo(place / "run.yaml"),
    "dev-zero": lambda place: (place / "run.yaml").symlink_to("/dev/zero"),
    "link-to-itself": lambda place: (place / "run.yaml").symlink_to("run.yaml"),
    "folder": lambda place: (place / "run.yaml").mkdir(),
}.items():
    family.add(f"file-is-a-{_name}", special_file, _make, CHAIN)
    family.add(f"file-of-others-is-a-{_name}", special_file, _make, ("config", "convert"))


def override(arguments: tuple[str, ...], place: Place) -> Steps:
    """An override that is none."""
    yield refused("config", "check", place.run(), *arguments)


for _name, _arguments in {
    "of-nothing": ("=",), "without-a-key": ("=5",), "with-two-dots": ("train..steps=5",),
    "into-a-list-of-1e9": ("data.sources.1000000000.path=x",), "below-nothing": ("data.sources.-1.path=x",),
    "1e400": ("train.steps=1e400",), "with-a-flag": ("--train.steps", "10"), "code": ("run=!!python/name:os.system",),
    "that-forges": ("train.\nartel: FORGED\x1b[2J=1",), "of-brackets": ("seed=" + "[" * 5000,),
    "twice-and-wrong": ("seed=1", "seed=x"), "of-half-a-letter": (os.fsdecode(b"seed=\xff"),),
    "100000-letters": ("train.steps=" + "9" * 100_000,),
}.items():  # fmt: skip
    family.add(f"override-{_name}", override, _arguments)


def no_recipe(name: str, place: Place) -> Steps:
    yield refused("config", "check", name)
    yield refused("recipes", "cp", name, "mine.yaml")
    check(not (place / "mine.yaml").exists(), "a file was written")


for _name in ("../../../etc/passwd", "\nFORGED\x1b[2J", "a" * 5000, ".", "/dev/zero", "demo/../demo"):
    family.add(f"recipe-named-{ascii(_name)[1:12].replace('/', '-')}", no_recipe, _name)


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
    recipe_copied_over_a_file=given(
        refused("recipes", "cp", "demo", "run.yaml"), files={"run.yaml": "mine\n"}, run=None
    ),
    converter_that_is_a_module_of_the_system=given(
        refused("prepare", "run.yaml"), files={"a.jsonl": '{"a": 1}\n'},
        run=[{"objective": "chat", **source("a.jsonl", format="chat", converter="os:system")}],
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


for _name, _statement in _RAISING.items():
    family.add(f"own-code-{_name}", own_code, _statement, quick=False)


def many(content: str, arguments: tuple[str, ...], place: Place) -> Steps:
    """A file of thousands of entries takes time in proportion."""
    place.write("a.yaml", content)
    yield ends({0, 2}, *arguments, "a.yaml", seconds=120)


_SET = "  - {{path: d{}.jsonl, type: chat_template, roles: {{user: [a]}}}}\n"
_SETS = f"base_model: m\ndatasets:\n{''.join(map(_SET.format, range(5000)))}"
_KEYS = "".join(f"key{number}: 1\n" for number in range(20_000))
family.add("axolotl-of-5000-data-sets", many, _SETS, ("config", "convert"))
family.add("20000-unknown-keys", many, _KEYS, ("config", "check"))
