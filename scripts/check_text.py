"""Checks of the repository's own files, run by `make lint`: tests, registries, converters and docs.

    PYTHONPATH=tests python scripts/check_text.py

Prints a line for each problem, with its place, and exits with 1 if there are any. The checks read text only: what
artel does is tested in tests/.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import make_docs
from packaging.requirements import Requirement
from typer.main import get_command

import artel.objectives
from artel.cli.main import app
from artel.config import RunConfig, parse_run
from artel.config.suggest import all_keys
from artel.errors import InputError
from artel.objectives.base import Objective
from artel.registry import CALLBACKS, EXPORTERS, FORMATS, OBJECTIVES, OPTIMIZERS, SCHEDULES, TRACKERS
from printed.table import kind_of, printed

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS, DOCS = ROOT / "src/artel", ROOT / "tests", ROOT / "docs"


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def dotted(node: ast.AST) -> list[str]:
    """Return ["a", "b", "c"] for the expression a.b.c, and [] for any other."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


def last_name(node: ast.AST) -> str | None:
    """Return `optimizer` for `config.train.optimizer`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


# Tests ---------------------------------------------------------------------------------

CLOCKS = {
    f"{clock}{unit}" for clock in ("monotonic", "perf_counter", "process_time", "thread_time") for unit in ("", "_ns")
}
PATCHES = {"setattr", "setitem", "delattr", "delitem", "patch", "object", "dict"}


def tests_import_no_test_file() -> Iterator[str]:
    for file in TESTS.rglob("*.py"):
        for node in ast.walk(parsed(file)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.startswith("test_") for name in names):
                yield f"{place(file, node.lineno)}: imports from a test file; move what both need to tests/support"


def tests_that_start_ranks_are_marked() -> Iterator[str]:
    """`make test` starts no process group."""
    for file in TESTS.glob("test_*.py"):
        body = parsed(file).body
        if any(isinstance(node, ast.Assign) and "mark.processes" in ast.unparse(node) for node in body):
            continue
        for test in (node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
            calls = {last_name(call.func) for call in ast.walk(test) if isinstance(call, ast.Call)}
            if calls & {"run_ranks", "torchrun"} and "mark.processes" not in " ".join(
                map(ast.unparse, test.decorator_list)
            ):
                yield f"{place(file, test.lineno)}: {test.name} starts processes; add @pytest.mark.processes"


def tests_do_not_depend_on_time() -> Iterator[str]:
    for file in TESTS.rglob("*.py"):
        tree = parsed(file)
        timed = {
            name.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and has_clock(node.value)
            for target in node.targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and dotted(node.func)[-1:] == ["sleep"] and file.name != "waiting.py":
                yield f"{place(file, node.lineno)}: waits a fixed time; use support.waiting.wait_until"
            elif isinstance(node, ast.Compare) and file.name != "waiting.py":
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                if has_clock(node) or names & timed:
                    yield f"{place(file, node.lineno)}: compares clocks; count something, or pass a clock"


def has_clock(node: ast.AST) -> bool:
    calls = (dotted(call.func) for call in ast.walk(node) if isinstance(call, ast.Call))
    return any(name == ["time", "time"] or (name and name[-1] in CLOCKS) for name in calls)


def tests_patch_no_private_name() -> Iterator[str]:
    """A patched private name or constant of artel should be a parameter."""
    for file in TESTS.rglob("*.py"):
        tree = parsed(file)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        of_artel = {
            alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else "artel")
            for node in imports
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).partition(".")[0] == "artel"
        }
        for node in ast.walk(tree):
            for path in patched(node):
                is_artel = path[0] in of_artel or path[0] == "'artel"
                if is_artel and any(name.startswith("_") or name.isupper() for name in path[1:]):
                    yield f"{place(file, node.lineno)}: patches {'.'.join(path)}; give the code a parameter"


def patched(node: ast.AST) -> Iterator[list[str]]:
    """Yield the dotted names that a statement or call sets. A name given as text begins with an apostrophe."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (dotted(target) for target in targets if isinstance(target, ast.Attribute) and dotted(target))
    elif isinstance(node, ast.Call) and last_name(node.func) in PATCHES and node.args:
        target, *more = node.args
        if isinstance(target, ast.Constant):
            yield f"'{target.value}".split(".")
        elif dotted(target):
            yield [*dotted(target), *(str(more[0].value) for _ in more[:1] if isinstance(more[0], ast.Constant))]


# Registries: principle 7 ------------------------------------------------------------------

REGISTRIES = {
    "objective": OBJECTIVES, "format": FORMATS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "track": TRACKERS,
    "exporter": EXPORTERS, "callbacks": CALLBACKS,
}  # fmt: skip
TRANSLATORS = ("config/converters/", "config/other_names.py", "parallel/deepspeed/config", "registry.py")
SPLITS = ("pipeline", "tensor", "context", "expert", "mode")  # how a strategy splits a model
STRATEGIES = {"DeepSpeedStrategy", "FullyShardedDataParallel", "PipelineParallel", "SharedSequences", "Strategy"}


def sources() -> Iterator[tuple[str, Path]]:
    """Yield the files that must not know registered names. Translators of other tools' names have them in tables."""
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        if not name.startswith(TRANSLATORS):
            yield name, file


def names_are_compared_in_their_own_file_only() -> Iterator[str]:
    for _, file in sources():
        for node in ast.walk(parsed(file)):
            sides: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
            elif isinstance(node, ast.Match):
                patterns = [case.pattern for case in node.cases]
                sides = [node.subject, *(each.value for each in patterns if isinstance(each, ast.MatchValue))]
            for key in {last_name(side) for side in sides} & REGISTRIES.keys():
                for name in set().union(*map(strings, sides)) & {*REGISTRIES[str(key)].names}:
                    yield f"{place(file, sides[0].lineno)}: compares {key} with {name!r}; ask what its entry declares"


def names_are_listed_in_their_registry_only() -> Iterator[str]:
    for _, file in sources():
        for node in ast.walk(parsed(file)):
            listed: set[str] = set()
            if isinstance(node, ast.Dict):
                listed = {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
            elif isinstance(node, ast.Subscript) and last_name(node.value) == "Literal":
                listed = strings(node.slice)
            if len(listed) > 1 and any(listed <= {*registry.names} for registry in REGISTRIES.values()):
                yield f"{place(file, node.lineno)}: lists {sorted(listed)}; ask the registry"


def strings(node: ast.AST) -> set[str]:
    """Return the text of a constant, or the texts of a tuple, list or set of them."""
    members = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {each.value for each in members if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def packages_ask_no_class() -> Iterator[str]:
    """Other packages ask an objective or a strategy for what it declares, not for its class."""
    exported = [getattr(artel.objectives, name) for name in artel.objectives.__all__]
    objectives = {each.__name__ for each in exported if isinstance(each, type) and issubclass(each, Objective)}
    for name, file in sources():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and last_name(node.func) == "isinstance":
                if not name.startswith("objectives/") and last_name(node.args[1]) in objectives:
                    yield f"{place(file, node.lineno)}: asks for the class of an objective; ask what it declares"
            elif isinstance(node, ast.Name | ast.Attribute) and not name.startswith("parallel/"):
                of = last_name(node.value) if isinstance(node, ast.Attribute) else None
                asked = last_name(node)
                splits = (asked == "dims" and of == "strategy") or (asked in SPLITS and of == "dims")
                if asked in STRATEGIES or splits:
                    yield f"{place(file, node.lineno)}: asks which strategy there is; ask what it declares"


# What converters say of artel --------------------------------------------------------------

_OF_OTHER_TOOLS = ("model.config.", "model.name", "model.layers", "tokenizer.chat_template", "tokenizer.max_seq")


def texts_of_converters() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of the sentences in converters: all strings but docstrings and keys of tables."""
    for file in (PACKAGE / "config/converters").rglob("*.py"):
        tree = parsed(file)
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        keys = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                text = "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | keys:
                text = node.value
            if " " in text and "\n" not in text:
                yield place(file, node.lineno), text


def converters_name_what_exists() -> Iterator[str]:
    keys = {re.sub(r"\.0\b", "", key) for key in all_keys(RunConfig)}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    commands = get_command(app).commands  # type: ignore[attr-defined]
    texts = [*texts_of_converters()]
    if len(texts) < 300:
        yield f"src/artel/config/converters: only {len(texts)} sentences were found; check how they are searched"
    for where, text in texts:
        for key in re.findall(r"(?<![\w./])([a-z_]+(?:\.[a-z_]+)+)", text):
            is_ours = key.partition(".")[0] in sections and not key.endswith((".py", ".json", ".yaml", ".cfg"))
            if is_ours and key not in keys and not key.startswith(_OF_OTHER_TOOLS):
                yield f"{where}: {key} is not a key of the run file"
        for key, value in re.findall(r"\b([a-z_]+\.[a-z_.]+): ([a-z_0-9]+)\b", text):
            if key in keys and value not in ("the", "true"):
                base = {"data": {"sources": [{"path": "a.txt"}]}, "model": {"from": "m", "lora": {"rank": 16}}}
                try:
                    parse_run(base, {key: value}, {(): "run.yaml"})
                except InputError as error:
                    if any(key in problem.where for problem in error.problems):
                        yield f"{where}: {key} does not take {value}"
        for command in re.findall(r"\bartel ([a-z]+) (?:[A-Z]{3}|config |--)", text):
            if command not in commands:
                yield f"{where}: artel {command} is not a command"
        for name in re.findall(r"write objective: (\w+)", text):
            if name not in OBJECTIVES:
                yield f"{where}: {name} is not an objective"


# Docs ------------------------------------------------------------------------------------


def code_blocks(page: Path) -> list[str]:
    """Return the commands and run files of a page. A Russian page asks for reports in Russian; that is left out."""
    text = re.sub(r"(?m)^(artel report .*) --language ru$", r"\1", page.read_text(encoding="utf-8"))
    return re.findall(r"```(?:bash|yaml)\n(.*?)```", text, re.DOTALL)


def pages_have_the_commands_of_their_translation() -> Iterator[str]:
    pages = {ROOT / "README.ru.md": ROOT / "README.md"}
    lines = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    if lines > 120:
        yield f"README.md:{lines}: is longer than 120 lines; move something to docs/"
    pages |= {page: DOCS / page.relative_to(DOCS / "ru") for page in (DOCS / "ru").rglob("*.md")}
    for page, english in pages.items():
        own, others = code_blocks(page), code_blocks(english)
        if own != others:
            first = next((mine for mine, other in zip(own, others, strict=False) if mine != other), "their number")
            yield f"{place(page, 1)}: has other commands than {english.relative_to(ROOT)}: {first.splitlines()[0]}"


def links_lead_somewhere() -> Iterator[str]:
    for page in (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")):
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if not (link.startswith("http") or (page.parent / link).exists()):
                yield f"{place(page, 1)}: {link} leads nowhere"


def printed_commands_are_run() -> Iterator[str]:
    for command in printed():
        if not kind_of(command.text):
            yield f"{command.where}: {command.text} is printed and not run; add a Step to tests/printed/walks*.py"


def pages_follow_the_program() -> Iterator[str]:
    if make_docs.TARGET.read_text(encoding="utf-8") != make_docs.run_file_page():
        yield f"{place(make_docs.TARGET, 1)}: is out of date; run: make docs"
    page = DOCS / "architecture.md"
    text = page.read_text(encoding="utf-8")
    listed = {*re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    if listed != packages:
        yield f"{place(page, 1)}: lists other packages than src/artel: {sorted(listed ^ packages)}"
    rows = re.findall(r"^\| (\d+)\. \*\*[^|]+\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    if [int(number) for number, _, _ in rows] != [*range(1, 13)]:
        yield f"{place(page, 1)}: does not list the principles 1 to 12"
    for number, code, tests in rows:
        missing = [file for file in re.findall(r"`([^`]+)`", code) if not (PACKAGE / file).is_file()]
        proofs = re.findall(r"`(\w+\.py)::(\w+)`", tests)
        for file, function in proofs:
            found = next((folder / file for folder in (TESTS, ROOT / "scripts") if (folder / file).is_file()), None)
            if found is None or f"\ndef {function}(" not in found.read_text(encoding="utf-8"):
                missing.append(f"{file}::{function}")
        if missing or not proofs:
            yield f"{place(page, 1)}: principle {number} names what is not there: {missing or 'no test'}"


def extras_are_those_of_the_project() -> Iterator[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    requirements = {extra: [Requirement(line) for line in lines] for extra, lines in extras.items() if extra != "dev"}
    (all_extras,) = requirements.pop("all")
    expected = {
        (extra, ", ".join(line.name for line in lines), extra in all_extras.extras)
        for extra, lines in requirements.items()
    }
    for page, yes in ((DOCS / "install.md", "yes"), (DOCS / "ru/install.md", "да")):
        rows = re.findall(
            r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \| (yes|no|да|нет) \|$", page.read_text(encoding="utf-8"), re.MULTILINE
        )
        if wrong := {(extra, packages, in_all == yes) for extra, packages, in_all in rows} ^ expected:
            yield f"{place(page, 1)}: its extras differ from pyproject.toml: {sorted(row[0] for row in wrong)}"


CHECKS = (
    tests_import_no_test_file, tests_that_start_ranks_are_marked, tests_do_not_depend_on_time,
    tests_patch_no_private_name, names_are_compared_in_their_own_file_only, names_are_listed_in_their_registry_only,
    packages_ask_no_class, converters_name_what_exists, pages_have_the_commands_of_their_translation,
    links_lead_somewhere, printed_commands_are_run, pages_follow_the_program, extras_are_those_of_the_project,
)  # fmt: skip


def main() -> int:
    problems = [problem for check in CHECKS for problem in check()]
    print("\n".join([*problems, f"{len(CHECKS)} checks, {len(problems)} problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
