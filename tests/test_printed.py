"""The tables of printed/, by which every printed command is run; scripts/check_text.py finds those without a place."""

import re
import subprocess
import tomllib

import yaml

from artel.config import parse_run
from printed.commands import ROOT, documents
from printed.running import words_of
from printed.table import STEPS, WALKS, extra_of, page, printed


def test_no_step_is_of_a_command_that_is_not_printed():
    assert STEPS.keys() <= {command.text for command in printed()}
    assert len(STEPS) == sum(len(walk.steps) for walk in WALKS)


def test_what_does_not_run_as_printed_says_why():
    for step in STEPS.values():
        assert bool(step.instead) == bool(step.why), step.text


def test_commands_of_a_walk_stand_in_the_order_that_they_are_printed_in():
    places = {}
    for number, command in enumerate(printed()):
        places.setdefault(command.text, number)
    for walk in WALKS:
        numbers = [places[step.text] for step in walk.steps]
        assert numbers == sorted(numbers), walk.name


def test_extras_of_pip_are_those_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra_of(command.text) for command in printed()} - {None, ""}
    assert "all" in named
    assert named <= extras.keys()


def test_make_has_the_targets_that_are_printed():
    targets = [command.text.split()[1:] for command in printed() if command.text.startswith("make ")]
    assert ["demo"] in targets
    for words in targets:
        subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)


def test_every_shell_takes_a_command_alike(tmp_path):
    """zsh refuses a word with * or ? that matches no file; {a, b} and [a] are more than a word to every shell."""
    for command in printed():
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", command.text)
        assert not re.search(r"[*?{}\[\]]", bare), f"{command.where}: quote what the shell would read: {command.text}"
        if command.text in STEPS:
            assert words_of(command.text, tmp_path)[0], command.where


def test_what_is_appended_behind_a_redirection_reaches_the_command(tmp_path):
    words, output = words_of("artel train demo --json > runs/demo.json train.steps=2 'a b'", tmp_path)
    assert words == ["artel", "train", "demo", "--json", "train.steps=2", "a b"]
    assert output == "runs/demo.json"


def test_every_block_of_yaml_is_a_run_file():
    blocks = {
        f"{path.relative_to(ROOT)}: {block}": yaml.safe_load(block)
        for path in documents()
        if path.suffix == ".md" and path.name != "extending.md"  # test_extending.py runs it
        for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    }
    assert len(blocks) > 3
    for where, tree in blocks.items():
        parse_run(tree, {}, {(): where})


def test_the_page_of_figures_is_up_to_date():
    assert (ROOT / "benchmarks/printed.md").read_text(encoding="utf-8") == page(), "run: python benchmarks/printed.py"
