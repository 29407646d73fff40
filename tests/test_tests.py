"""How the tests are divided and what they may import."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest


def imported(file):
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_no_file_imports_from_a_test_file():
    """What two of them need lies in support/."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    assert len(files) > 100
    assert [f"{file.name}: {name}" for file in files for name in imported(file) if name.startswith("test_")] == []


def test_who_starts_ranks_is_marked():
    """`make test` starts no process group."""
    unmarked = []
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.Assign) and "mark.processes" in ast.unparse(node) for node in module.body):
            continue
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                calls = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
                marks = " ".join(map(ast.unparse, node.decorator_list))
                if calls & {"run_ranks", "torchrun"} and "mark.processes" not in marks:
                    unmarked.append(f"{file.name}: {node.name}")
    assert unmarked == []


# Clocks and private names ------------------------------------------------------------

TESTS = Path(__file__).parent
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time"}
CLOCKS |= {f"{clock}_ns" for clock in CLOCKS}
PATCHES = {"setattr", "setitem", "delattr", "delitem", "patch", "object", "dict"}


def of_artel(tree: ast.AST) -> set[str]:
    """Names that a file imports from artel."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "artel":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or "artel" for alias in node.names if alias.name.partition(".")[0] == "artel"}
    return names


def dotted(node: ast.expr) -> list[str]:
    """["a", "b", "c"] of the expression a.b.c; [] of any other."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


def is_clock(node: ast.AST) -> bool:
    """A call of one of the clocks of `time`, by its module or by its name."""
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func)
    return (name[:1] == ["time"] and name[-1] in CLOCKS) or (len(name) == 1 and name[0] in CLOCKS - {"time"})


def sleeps(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func)[-1:] == ["sleep"]:
            yield node.lineno


def compared_clocks(tree: ast.AST) -> Iterator[int]:
    """Comparisons that hold a clock, or a name to which something with a clock in it was assigned."""
    timed = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(map(is_clock, ast.walk(node.value)))
        for names in node.targets
        for target in ast.walk(names)
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            inner = list(ast.walk(node))
            if any(map(is_clock, inner)) or any(isinstance(part, ast.Name) and part.id in timed for part in inner):
                yield node.lineno


def private_patches(tree: ast.AST) -> Iterator[int]:
    """Patches of a private name or of a constant of artel: the code should have a parameter there."""
    artel = of_artel(tree)
    for node in ast.walk(tree):
        path: list[str] = []
        if isinstance(node, ast.Call) and dotted(node.func)[-1:] and dotted(node.func)[-1] in PATCHES and node.args:
            target, *more = node.args
            if isinstance(target, ast.Constant) and str(target.value).startswith("artel."):
                path = str(target.value).split(".")
            elif dotted(target)[:1] and dotted(target)[0] in artel:
                path = dotted(target)
                if more and isinstance(more[0], ast.Constant):
                    path = [*path, str(more[0].value)]
        elif isinstance(node, ast.Assign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and dotted(target)[:1] and dotted(target)[0] in artel:
                    path = dotted(target)
        if any(name.startswith("_") or name.isupper() for name in path[1:]):
            yield node.lineno


CHECKS = {
    "waits a fixed time: use support.waiting.wait_until": sleeps,
    "compares clocks: count, or pass a clock": compared_clocks,
    "patches a private name or constant of artel: give the code a parameter": private_patches,
}


def test_no_test_sleeps_compares_clocks_or_patches_what_is_private():
    problems = []
    for file in sorted(TESTS.rglob("*.py")):
        if file.name == "waiting.py":
            continue
        tree = ast.parse(file.read_text())
        for problem, check in CHECKS.items():
            for line in check(tree):
                problems.append(f"{file.relative_to(TESTS)}:{line} {problem}")
    assert problems == []


@pytest.mark.parametrize(
    ("check", "code"),
    [
        (sleeps, "time.sleep(1)"),
        (sleeps, "sleep(1)"),
        (compared_clocks, "assert time.monotonic() - a < 3"),
        (compared_clocks, "a = perf_counter() - b\nassert a < 3"),
        (private_patches, "monkeypatch.setattr('artel.x._Y', 1)"),
        (private_patches, "from artel import x\nmonkeypatch.setattr(x, '_Y', 1)"),
        (private_patches, "from artel import x\npatch.object(x, 'Y')"),
        (private_patches, "from artel import x as z\nz._Y = 1"),
        (private_patches, "from artel import x\nmonkeypatch.setitem(x._Y, 'cpu', 8)"),
    ],
)
def test_each_of_them_is_seen(check, code):
    assert list(check(ast.parse(code)))
