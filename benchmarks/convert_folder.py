"""The folder that benchmarks/convert.py reads: python benchmarks/convert_folder.py FOLDER CLONE…

CLONE is a git directory, bare or not, whose path ends in OWNER/NAME or OWNER+NAME, and then perhaps /repo or /.git. Of
its newest commit are taken: YAML files and shell scripts, and each fenced block of a Markdown page that calls
run_clm.py or run_mlm.py, as PAGE.1.sh and so on. Commits are added to FOLDER/commits.json.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

TAKEN = (".yml", ".yaml", ".sh")
PAGES = (".md", ".mdx", ".rst")
BLOCK = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
SCRIPTS = re.compile(r"run_(clm|mlm)(_flax)?\.py")


def git(clone: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(clone), *words], check=True, capture_output=True).stdout


def name_of(clone: Path) -> str:
    """OWNER/NAME."""
    parts = [part for part in clone.resolve().parts if part not in ("repo", ".git")]
    return parts[-1].replace("+", "/") if "+" in parts[-1] else "/".join(parts[-2:])


def blocks(page: str) -> list[str]:
    return [block for block in BLOCK.findall(page) if SCRIPTS.search(block)]


def take(clone: Path, folder: Path) -> int:
    """Write what there is to convert; how many files."""
    written = 0
    for path in git(clone, "ls-tree", "-r", "--name-only", "-z", "HEAD").decode().split("\0"):
        if not path.endswith(TAKEN + PAGES):
            continue
        try:
            text = git(clone, "show", f"HEAD:{path}").decode()
        except (subprocess.CalledProcessError, UnicodeDecodeError):  # not in the snapshot, or no text
            continue
        files = {path: text} if path.endswith(TAKEN) else {}
        if path.endswith(PAGES):
            files = {f"{path}.{number}.sh": block for number, block in enumerate(blocks(text), 1)}
        for name, content in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
            written += 1
    return written


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "commits.json"
    commits = json.loads(kept.read_text()) if kept.exists() else {}
    for clone in map(Path, sys.argv[2:]):
        name = name_of(clone)
        print(f"{name}: {take(clone, folder / name)} files")
        commits[name] = git(clone, "rev-parse", "HEAD").decode().strip()
    kept.write_text(json.dumps(commits, indent=1))


if __name__ == "__main__":
    main()
