"""The commands that README, docs and the recipes' headers print, found where they stand.

A command is a line of a ```bash block, a line of an indented block that begins with one of PROGRAMS, or a span in
backticks that begins with one and has an argument. `…` in a span stands for what is said beside it: such a span is a
part of a command, and not one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "src" / "artel" / "config" / "recipes"
PROGRAMS = ("accelerate", "artel", "bash", "deepspeed", "docker", "git", "kubectl", "make", "mpirun", "pip", "pytest",
            "python", "ray", "sbatch", "sky", "srun", "torchrun", "vllm")  # fmt: skip
_BEGINS = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)}) ")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Printed:
    """A command as it is printed, without the remark behind it."""

    document: str
    line: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.document}:{self.line}"


def documents() -> list[Path]:
    """All files whose commands are run."""
    names = ("README.md", "README.ru.md", "CONTRIBUTING.md", "CHANGELOG.md")
    pages = [*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))]
    return [*pages, *sorted(RECIPES.glob("*.yaml")), ROOT / "scripts/demo.sh"]


def printed_in(path: Path) -> list[Printed]:
    """The commands of a document, in its order."""
    text = path.read_text(encoding="utf-8")
    name = path.stem if path.suffix == ".yaml" else path.relative_to(ROOT).as_posix()
    read = {".md": _of_page, ".yaml": _of_recipe, ".sh": lambda text: _lines(text, 0, every=False)}[path.suffix]
    places = sorted(read(text))
    return [Printed(name, text.count("\n", 0, at) + 1, command) for at, command in places]


def _blanked(text: str) -> str:
    """The page with its blocks emptied, each character still where it was."""
    return _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _of_page(text: str) -> Iterator[tuple[int, str]]:
    for block in _FENCE.finditer(text):
        if block[1] == "bash":
            yield from _lines(block[2], block.start(2), every=True)
    rest = _blanked(text)
    for block in re.finditer(r"(?:^    \S.*\n)+", rest, re.MULTILINE):
        yield from _lines(block[0], block.start(), every=False)
    for span in _SPAN.finditer(rest):
        words = re.sub(r"\n *", " ", span[1])
        if _BEGINS.match(words) and "…" not in words:
            yield span.start(), words


def _of_recipe(text: str) -> Iterator[tuple[int, str]]:
    """Of the header alone; `#` stands before each of its lines."""
    header = re.match(r"(?:#.*\n)*", text)
    assert header is not None
    yield from _lines(re.sub(r"^#", " ", header[0], flags=re.MULTILINE), 0, every=False)


def _lines(block: str, start: int, *, every: bool) -> Iterator[tuple[int, str]]:
    for line in re.finditer(r"(?:[^\n]*\\\n)*[^\n]+", block):
        command = re.sub(r"\s+#.*$", "", re.sub(r"\\\n *", "", line[0])).strip()
        if command and (every or _BEGINS.match(command)):
            yield start + line.start(), command
