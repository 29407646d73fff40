"""Whatever a user's own code raises ends in words that name its function and line; sys.exit never ends artel."""

import sys

import pytest

import artel
from artel.errors import InputError, WorkError
from artel.text import ToolCall
from artel.text.tool_functions import read_functions
from support.runs import write_run

RAISING = {
    "exit": ("sys.exit(0)", "sys.exit was called: 0"),
    "base": ("raise Base('gone')", "Base: gone"),
    "textless": ("raise Textless()", "Textless: its message cannot be shown (ValueError)"),
    "plain": ("raise KeyError('city')", "KeyError: 'city'"),
}
HEAD = """\
import sys
class Base(BaseException): pass
class Textless(RuntimeError):
    def __str__(self): raise ValueError("none")
"""
CALLBACK = """\
from artel.registry import CALLBACKS
@CALLBACKS.register(__name__)
class Mine:
    def __init__(self, *_): pass
    def __call__(self, run):
        {}
"""
OPTIMIZER = """\
from artel.registry import OPTIMIZERS
from artel.training.optim.specs import OptimizerSpec
def build(groups, train, seed):
    {}
OPTIMIZERS.register(__name__)(OptimizerSpec(build=build, summary="mine", state_bytes=lambda train: 4.0))
"""
FORMAT = """\
from artel.registry import FORMATS
from artel.text.formats.format import Format
def read(file):
    {}
    yield
FORMATS.register(__name__)(Format(read=read, suffixes=(".mine",)))
"""
TRACKER = """\
from artel.registry import TRACKERS
from artel.training.metrics.trackers import Tracker
@TRACKERS.register(__name__)
class Mine(Tracker):
    def __init__(self, *_): pass
    def log_training(self, figures):
        {}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


def written(folder, code, statement):
    """Write a plugin with a name of its own; return the name and the line of its statement."""
    name = f"own_{folder.name.replace('-', '_')}"
    text = HEAD + code.format(statement)
    (folder / f"{name}.py").write_text(text)
    line = next(number for number, row in enumerate(text.splitlines(), 1) if row.strip() == statement)
    return name, f"{name}.py:{line}"


@pytest.mark.parametrize("kind", RAISING)
@pytest.mark.parametrize(
    ("code", "function", "changes"),
    [
        (CALLBACK, "__call__", lambda name: {"callbacks": [name]}),
        (OPTIMIZER, "build", lambda name: {"train": {"optimizer": name}}),
    ],
    ids=["callback", "optimizer"],
)
def test_a_plugin_that_fails_in_a_run(folder, code, function, changes, kind):
    statement, said = RAISING[kind]
    name, place = written(folder, code, statement)
    run = write_run(folder / "run.yaml", plugins=name, **changes(name))
    with pytest.raises(WorkError) as failed:
        artel.train(run)
    assert f"{place}: your own code failed: {said}, in {function} (" in str(failed.value)


@pytest.mark.parametrize("kind", RAISING)
def test_a_tracker_that_fails_is_left_out(folder, kind, capfd):
    statement, said = RAISING[kind]
    name, _ = written(folder, TRACKER, statement)
    run = write_run(folder / "run.yaml", plugins=name, track=["jsonl", name])
    artel.train(run)
    assert f"tracker {name} failed and is disabled from now on: {said}, in log_training (" in capfd.readouterr().err


@pytest.mark.parametrize("kind", RAISING)
def test_a_format_that_fails_where_text_is_prepared(folder, kind, command):
    """By the command line, in a process of its own: exit status 1, with the place in words."""
    statement, said = RAISING[kind]
    name, place = written(folder, FORMAT, statement)
    (folder / "text.mine").write_text("words")
    run = write_run(folder / "run.yaml", plugins=name, data={"sources": [{"path": "text.mine", "format": name}]})
    status, _, shown = command("prepare", run)
    assert status == 1
    assert f"{place}: your own code failed: {said}, in read (" in shown
    assert "fault of artel" not in shown


TOOL = '''\
def weather(city: str) -> str:
    """The weather.

    Args:
        city: The city.
    """
    {}
'''


@pytest.mark.parametrize("kind", RAISING)
def test_a_function_of_a_chat_that_fails_is_a_result(folder, kind):
    statement, said = RAISING[kind]
    name, place = written(folder, TOOL, statement)
    functions = read_functions(f"{name}.py")
    result = functions.run(ToolCall("weather", {"city": "Rome"}))
    assert result.startswith(f"error: {said}, in weather (")
    assert place in result


@pytest.mark.parametrize("kind", RAISING)
@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda folder, name: artel.train(write_run(folder / "run.yaml", plugins=name)), "cannot be imported"),
        (lambda _, name: read_functions(f"{name}.py"), "cannot be run"),
    ],
    ids=["plugin", "functions"],
)
def test_a_file_that_fails_as_it_is_imported(folder, kind, use, what):
    statement, said = RAISING[kind]
    name, place = written(folder, "{}\n", statement)
    with pytest.raises(InputError) as failed:
        use(folder, name)
    assert name in str(failed.value)
    assert f"{what}: {said}, in <module> (" in str(failed.value)
    assert place in str(failed.value)
