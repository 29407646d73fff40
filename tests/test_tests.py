"""How the tests are divided and what they may import."""

import ast
from pathlib import Path


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
