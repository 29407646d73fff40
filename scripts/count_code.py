"""Count the code of a commit: python scripts/count_code.py [COMMIT]. Prints the table of benchmarks/lighter.md."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter

SECTIONS = ("Section", "NamingSection")  # the classes that a section of the run file derives from


def read_commit(commit: str) -> dict[str, str]:
    """Return the text of every Python file of `commit` by its path."""
    archive = subprocess.run(["git", "archive", commit], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [member for member in tar if member.isfile() and member.name.endswith(".py")]
        return {member.name: tar.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]


def count(files: dict[str, str]) -> dict[str, int]:
    """Return the counts of `files` (path → text), each under the words it has in the table."""
    counts = {
        f"lines of {folder}": sum(len(text.splitlines()) for path, text in files.items() if path.startswith(folder))
        for folder in ("src/", "tests/", "benchmarks/", "scripts/")
    }
    source = {path: text for path, text in files.items() if path.startswith("src/")}
    lengths = [len(text.splitlines()) for text in source.values()]
    counts |= {"files of src/": len(source), "files of src/ over 450 lines": sum(length > 450 for length in lengths),
               "files of src/ under 60 lines": sum(length < 60 for length in lengths)}  # fmt: skip
    nodes = [node for text in source.values() for node in ast.walk(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    top = [node for text in source.values() for node in ast.parse(text).body]
    public = [node for node in top if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"]
    words = Counter(re.findall(r"\w+", "\n".join(source.values())))
    private = [node for node in functions if node.name[0] == "_" and not node.name.startswith("__")]
    counts |= {"public functions and classes": len(public),
               "private functions named in one place": sum(words[node.name] == 2 for node in private)}  # fmt: skip
    documented = [*functions, *classes, *(ast.parse(text) for text in source.values())]
    docstrings = [text for node in documented if (text := ast.get_docstring(node))]
    first_words = Counter(text.split()[0] for text in docstrings)
    counts["docstrings"] = len(docstrings)
    counts |= {f"docstrings that begin with {word}": first_words[word]
               for word in ("What", "Whether", "How", "Where", "Which", "Of", "Return", "Raise", "True")}  # fmt: skip
    sections = [node for node in classes if {ast.unparse(base) for base in node.bases} & {*SECTIONS}]
    keys = [node for section in sections for node in section.body
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
            and not (isinstance(node.target, ast.Name) and node.target.id.startswith("_"))]  # fmt: skip
    options = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Option"]
    return counts | {"keys of the run file": len(keys), "options of commands": len(options)}


if __name__ == "__main__":
    for name, value in count(read_commit(sys.argv[1] if len(sys.argv) > 1 else "HEAD")).items():
        print(f"{name:42}{value:8,}")
