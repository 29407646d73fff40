"""The site: it builds without a warning, no link of it is dead, and it is the same in both languages."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from selectolax.lexbor import LexborHTMLParser

from artel.registry import OBJECTIVES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))


def pages_in(nav: list) -> Iterator[str]:
    for entry in nav:
        (value,) = entry.values()
        yield from pages_in(value) if isinstance(value, list) else [value]


def settings(name: str) -> dict:
    return tomllib.loads((ROOT / name).read_text(encoding="utf-8"))["project"]


def test_both_languages_have_the_same_pages_in_the_same_order():
    english, russian = settings("zensical.toml"), settings("zensical.ru.toml")
    assert list(pages_in(english["nav"])) == list(pages_in(russian["nav"]))
    assert english["theme"]["features"] == russian["theme"]["features"]


def test_every_page_stands_in_the_navigation():
    from make_docs import REFERENCE, pages_of

    pages = {page for page in pages_of("en") if page.endswith(".md")} | {f"reference/{page}" for page in REFERENCE}
    assert pages == set(pages_in(settings("zensical.toml")["nav"]))


@pytest.mark.parametrize("name", ["docs/metrics.md", "docs/ru/metrics.md"])
def test_every_metric_of_an_objective_has_its_definition(name):
    page = (ROOT / name).read_text(encoding="utf-8")
    for objective in OBJECTIVES.names:
        for metric in OBJECTIVES[objective].metric_directions:
            assert f"`{metric}`" in page, f"{name} does not define {metric} of {objective}"


def test_both_languages_define_the_same_metrics():
    english, russian = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/metrics.md", "docs/ru/metrics.md"))
    first_cells = re.compile(r"^\| (`[^|]+`) \|", re.MULTILINE)
    assert first_cells.findall(english)
    assert first_cells.findall(russian) == first_cells.findall(english)


@pytest.mark.slow
def test_no_link_is_dead(site):
    trees = {path: LexborHTMLParser(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    anchors = {path: {node.id for node in tree.css("[id]")} for path, tree in trees.items()}
    assert len(trees) > 100
    dead = []
    for path, tree in trees.items():
        for node in tree.css("a[href], img[src], link[href], script[src]"):
            address, anchor = urldefrag(node.attributes.get("href") or node.attributes.get("src") or "")
            if ":" in address or path.name == "404.html":
                continue
            target = (path.parent / unquote(address)).resolve() if address else path
            if not target.is_file() or (anchor and target in anchors and unquote(anchor) not in anchors[target]):
                dead.append(f"{path.relative_to(site)}: {address}#{anchor}")
    assert not dead, "\n".join(dead)


def test_nothing_is_fetched_from_elsewhere(site):
    for path in site.rglob("*.html"):
        tree = LexborHTMLParser(path.read_text(encoding="utf-8"))
        for node in tree.css("img[src], script[src], link[rel=stylesheet]"):
            address = node.attributes.get("src") or node.attributes.get("href") or ""
            assert not address.startswith(("http:", "https:", "//")), f"{path.name}: {address}"


def test_what_is_not_translated_says_so(site):
    assert "только по-английски" in (site / "ru/architecture.html").read_text(encoding="utf-8")
    assert "только по-английски" not in (site / "ru/index.html").read_text(encoding="utf-8")
