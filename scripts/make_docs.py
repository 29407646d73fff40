"""Make the site, `site/`, in English and Russian, docs/run-file.md and the tables of docs/convert.md: `make docs`.

Zensical builds one site for a language from one folder of pages, so the pages are put together first, in build/docs:
those of docs/, those of benchmarks/ that they link to, and the reference, which is made from the code. A page that
docs/ru does not have stands in the Russian site in English, and says so. A page that it has keeps the English page's
anchors, so that `checkpoints.md#another-length` leads to the same section in both languages.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from converted_keys import with_tables
from reference import REFERENCE

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "run-file.md"
CONVERT = (ROOT / "docs" / "convert.md", ROOT / "docs" / "ru" / "convert.md")
LANGUAGES = {"en": "zensical.toml", "ru": "zensical.ru.toml"}
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
NOT_TRANSLATED = '!!! note "Эта страница пока только по-английски"'
_BLOCK = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def run_file_page() -> str:
    """The page: every key of the run file with its default and its line of help."""
    command = [sys.executable, "-m", "artel", "config", "explain"]
    keys = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"# Every key of the run file\n\nMade by `make docs` from `artel config explain`.\n\n```text\n{keys}```\n"


def pages_of(language: str) -> dict[str, Path]:
    """Each page and picture of a site: its path there, and the file that it comes from."""
    docs, translated = ROOT / "docs", ROOT / "docs/ru"
    files = [path for path in docs.rglob("*") if path.is_file() and not path.is_relative_to(translated)]
    pages = {path.relative_to(docs).as_posix(): path for path in files}
    pages |= {f"benchmarks/{path.name}": path for path in (ROOT / "benchmarks").glob("*.md")}
    pages |= {f"benchmarks/{path.name}": path for path in (ROOT / "benchmarks").glob("*.png")}
    pages |= {name: ROOT / name for name in BESIDE}
    if language == "ru":
        files = [path for path in translated.rglob("*") if path.is_file()]
        pages |= {path.relative_to(translated).as_posix(): path for path in files}
    return pages


def with_links(text: str, page: str, source: Path, places: dict[Path, str]) -> str:
    """The text of a page with its links to files of the repository as links within the site.

    What the site does not have, as code, stands there without a link.
    """

    def turned(link: re.Match[str]) -> str:
        words, (path, hash_sign, anchor) = link[1], link[2].partition("#")
        if not path or ":" in path:
            return link[0]
        place = places.get(Path(os.path.normpath(source.parent / path)))
        if place is None:
            return words
        return f"[{words}]({os.path.relpath(place, Path(page).parent)}{hash_sign}{anchor})"

    parts = _CODE.split(text)
    return "".join(part if at % 2 else _LINK.sub(turned, part) for at, part in enumerate(parts))


def with_anchors(text: str, english: str) -> str:
    """A translated page whose headings have the anchors of the English page's headings, which are as many."""
    from markdown.extensions.toc import slugify, unique

    used: set[str] = set()
    anchors = iter([unique(slugify(heading, "-"), used) for heading in _HEADING.findall(_BLOCK.sub("", english))])
    parts = _BLOCK.split(text)
    return "".join(
        part if at % 2 else _HEADING.sub(lambda heading: f"{heading[0]} {{ #{next(anchors)} }}", part)
        for at, part in enumerate(parts)
    )


def assemble(language: str, root: Path) -> None:
    """Fill root/build/docs/LANGUAGE."""
    folder = root / "build/docs" / language
    shutil.rmtree(folder, ignore_errors=True)
    pages = pages_of(language)
    places = {ROOT / "README.md": "index.md", ROOT / "README.ru.md": "index.md"}
    for page, source in pages.items():
        places[source] = page
        places[ROOT / "docs" / page] = page  # also from a page in Russian, where only the English one exists
    for page, source in pages.items():
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copyfile(source, target)
            continue
        text = with_links(source.read_text(encoding="utf-8"), page, source, places)
        if source.is_relative_to(ROOT / "docs/ru"):
            text = with_anchors(text, (ROOT / "docs" / page).read_text(encoding="utf-8"))
        elif language == "ru":
            text = _marked(text)
        target.write_text(text, encoding="utf-8")
    for page, make in REFERENCE.items():
        target = folder / "reference" / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_marked(make()) if language == "ru" else make(), encoding="utf-8")


def _marked(text: str) -> str:
    """A page of the Russian site that is in English."""
    head, _, rest = text.partition("\n")
    return f"{head}\n\n{NOT_TRANSLATED}\n{rest}"


def build(language: str, root: Path) -> None:
    """Build one language's site in root/site. Raises SystemExit with what was said when that is a warning."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", LANGUAGES[language]]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    if done.returncode or "Warning" in said:
        raise SystemExit(said)


def make_site(root: Path = ROOT) -> None:
    """Make root/site in all languages; the pages are the clone's."""
    shutil.rmtree(root / "site", ignore_errors=True)
    for language, settings in LANGUAGES.items():
        if root != ROOT:
            shutil.copyfile(ROOT / settings, root / settings)
        assemble(language, root)
        build(language, root)


def main() -> None:
    options = argparse.ArgumentParser(description="Make docs/run-file.md and the site.")
    options.add_argument("--run-file", action="store_true", help="docs/run-file.md and docs/convert.md alone")
    chosen = options.parse_args()
    TARGET.write_text(run_file_page(), encoding="utf-8")
    for page in CONVERT:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    if chosen.run_file:
        return
    make_site()
    print(f"{ROOT / 'site/index.html'}: open it in a browser")


if __name__ == "__main__":
    main()
