"""How the tests are built."""

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
