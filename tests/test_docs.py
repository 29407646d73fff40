"""The documents match the program: both READMEs alike, every command and link exists, the key list is up to date."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from printed.table import kind_of, printed

ROOT = Path(__file__).resolve().parents[1]


def blocks(name):
    """The commands and run files of a page. A Russian page asks for its reports in Russian, and is alike otherwise."""
    text = re.sub(r"(?m)^(artel report .*) --language ru$", r"\1", (ROOT / name).read_text(encoding="utf-8"))
    return re.findall(r"```(?:bash|yaml)\n(.*?)```", text, re.DOTALL)


def headings(name):
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"^(#+) ", text, re.MULTILINE)


def test_both_readmes_have_the_same_headings_and_commands():
    assert headings("README.md") == headings("README.ru.md")
    assert blocks("README.md") == blocks("README.ru.md")
    assert blocks("README.md")[0].startswith("make demo")
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(ROOT / "docs/ru") for path in (ROOT / "docs/ru").rglob("*.md"))
)
def test_a_translated_page_has_the_headings_and_commands_of_the_english_one(page):
    assert headings(f"docs/ru/{page}") == headings(f"docs/{page}")
    assert blocks(f"docs/ru/{page}") == blocks(f"docs/{page}")


def test_every_verb_in_the_readme_is_there():
    from typer.main import get_command

    from artel.cli.main import app

    verbs = set(re.findall(r"^artel (\w+)", "\n".join(blocks("README.md")), re.MULTILINE))
    assert verbs
    assert verbs <= set(get_command(app).commands)


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert link.startswith("http") or (page.parent / link).exists(), link


def test_the_list_of_keys_is_up_to_date():
    sys.path.insert(0, str(ROOT / "scripts"))
    from make_docs import TARGET, run_file_page

    assert TARGET.read_text(encoding="utf-8") == run_file_page(), "run: make docs"


@pytest.mark.parametrize(("name", "yes", "no"), [("docs/install.md", "yes", "no"), ("docs/ru/install.md", "да", "нет")])
def test_the_table_of_extras_is_that_of_the_project(name, yes, no):
    page = (ROOT / name).read_text(encoding="utf-8")
    rows = re.findall(rf"^\| `(\w+)` \| ([^|]+) \| [^|]+ \| ({yes}|{no}) \|$", page, re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    requirements = {extra: [Requirement(line) for line in lines] for extra, lines in extras.items()}
    (all_extras,) = requirements.pop("all")
    assert {extra for extra, _, in_all in rows if in_all == yes} == all_extras.extras
    del requirements["dev"]
    packages = {extra: ", ".join(line.name for line in lines) for extra, lines in requirements.items()}
    assert {extra: named for extra, named, _ in rows} == packages


def test_the_architecture_lists_every_package():
    packages = set(
        re.findall(r"^\| `(\w+)/` \|", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert packages == {path.parent.name for path in (ROOT / "src/artel").glob("*/__init__.py")}


def test_each_principle_names_its_code_and_the_tests_that_prove_it():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+)\. \*\*[^|]+\| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 13))
    for number, code, tests in rows:
        for file in re.findall(r"`([^`]+)`", code):
            assert (ROOT / "src/artel" / file).is_file(), (number, file)
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert named, number
        for file, function in named:
            assert f"\ndef {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (number, file, function)


def test_every_printed_command_is_run():
    for command in printed():
        assert kind_of(command.text), (
            f"{command.where}: {command.text}\nis printed and not run: give it a Step in tests/printed/walks*.py"
        )
