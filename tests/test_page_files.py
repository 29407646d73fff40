"""The files of the chat page: no way from text to HTML, nothing from elsewhere, words in both languages."""

import hashlib
import json
import re
from pathlib import Path

import pytest

import artel.inference

PAGE = Path(artel.inference.__file__).parent / "serve" / "page"
TEXTS = {file.name: file.read_text(encoding="utf-8") for file in sorted(PAGE.iterdir()) if file.is_file()}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js") and name not in ("en.js", "ru.js")}
ALL_SCRIPTS = "\n".join(SCRIPTS.values())
# Whatever reads a text as HTML or as code.
READS_HTML = (
    r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|HTMLUnsafe|createContextualFragment|DOMParser|srcdoc|document\.write"
    r"|\beval\b|new Function|javascript:|cssText|setAttribute\(\"on"
)


def test_the_library_is_the_published_one_with_its_licence():
    """dist/browser/markdown-it.esm.min.mjs of markdown-it 15.0.3. It gives tokens; its own HTML is never asked for."""
    published = "d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30"
    assert hashlib.sha256((PAGE / "vendor" / "markdown-it.js").read_bytes()).hexdigest() == published
    assert "Permission is hereby granted" in (PAGE / "vendor" / "LICENSE").read_text(encoding="utf-8")
    assert re.findall(r"\.render\w*\(", TEXTS["markdown.js"]) == []


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_reads_text_as_html_or_code(name):
    assert re.findall(READS_HTML, TEXTS[name]) == []


def test_the_checks_see_what_they_look_for():
    assert {"index.html", "style.css", "main.js", "markdown.js", "en.js", "ru.js"} <= set(TEXTS)
    for code in ("a.innerHTML = b", "a.insertAdjacentHTML('x', b)", "eval(b)", "document.write(b)", "a.srcdoc = b"):
        assert re.search(READS_HTML, code)


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_comes_from_elsewhere(name):
    """The one address is the name of SVG's namespace, which nobody fetches."""
    addresses = set(re.findall(r"(?:https?:)?//[\w-]+(?:\.[\w-]+)+(?=[/:\s'\"`)])[^\s'\"`)]*", TEXTS[name]))
    assert addresses <= {"http://www.w3.org/2000/svg"}


def test_no_script_or_style_stands_in_the_html():
    """The Content-Security-Policy would refuse it."""
    html = TEXTS["index.html"]
    assert re.findall(r"<script(?![^>]*\ssrc=\"/page/)|<style|\sstyle=|\son\w+=", html) == []


def words_of(language: str) -> dict[str, str]:
    return json.loads(TEXTS[f"{language}.js"].removeprefix("export default ").rstrip().removesuffix(";"))


def test_both_languages_have_the_same_words_with_the_same_values():
    english, russian = words_of("en"), words_of("ru")
    assert list(english) == list(russian) == sorted(english)
    values = {name: sorted(re.findall(r"\{(\w+)\}", text)) for name, text in english.items()}
    assert values == {name: sorted(re.findall(r"\{(\w+)\}", text)) for name, text in russian.items()}
    latin_alone = {name for name, text in russian.items() if not re.search("[а-яё]", text, re.IGNORECASE)}
    assert latin_alone == {"top_k", "top_p"}


def test_each_word_is_used_and_each_that_is_used_is_there():
    words = set(words_of("en"))
    marked = set(re.findall(r"data-(?:word|label|title|placeholder)=\"(\w+)\"", TEXTS["index.html"]))
    assert marked <= words
    named = set(re.findall(r"\bt\(\"(\w+)\"", ALL_SCRIPTS)) | set(re.findall(r"\bbutton\(\"(\w+)\"", ALL_SCRIPTS))
    assert named <= words
    in_quotes = set(re.findall(r"\"(\w+)\"", ALL_SCRIPTS))
    fields = {"temperature", "top_p", "top_k", "max_tokens", "seed"}
    made = {f"about_{name}" for name in fields} | {f"view_{name}" for name in ("chat", "text", "mask", "question")}
    assert words - marked - named - in_quotes - made - fields == set()


def test_each_element_that_a_script_asks_for_is_in_the_html():
    ids = re.findall(r"\sid=\"([\w-]+)\"", TEXTS["index.html"])
    assert len(ids) == len(set(ids))
    asked = set(re.findall(r"byId\(\"([\w-]+)\"\)", ALL_SCRIPTS))
    assert asked <= set(ids)
