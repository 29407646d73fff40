"""Principle 7: the name of an objective, format, optimizer, schedule, tracker or exporter is only in its registry.

Whoever must know something of one asks what it declares. Files that translate the names of other tools have those
names in tables, and are named here.
"""

import ast
from pathlib import Path

import pytest

import artel.objectives
from artel.config import run_from
from artel.errors import InputError
from artel.objectives.base import Objective
from artel.registry import CALLBACKS, EXPORTERS, FORMATS, OBJECTIVES, OPTIMIZERS, SCHEDULES, TRACKERS, Registry
from artel.text.formats.format import Format
from artel.training.metrics.trackers import Tracker
from artel.training.optim.specs import OptimizerSpec

PACKAGE = Path(artel.__file__).parent
REGISTRIES = {
    "objective": OBJECTIVES, "format": FORMATS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "track": TRACKERS,
    "exporter": EXPORTERS, "callbacks": CALLBACKS,
}  # fmt: skip
SPLITS = ("pipeline", "tensor", "context", "expert", "mode")  # how a strategy splits a model: nobody else's affair
TRANSLATORS = ("config/converters/", "config/other_names.py", "parallel/deepspeed/config")
SOURCES = {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}
OTHERS = {name: tree for name, tree in SOURCES.items() if name != "registry.py" and not name.startswith(TRANSLATORS)}


def strings(node):
    """The texts of a constant, or of a tuple, list or set of them."""
    members = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {each.value for each in members if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def last_name(node):
    """`optimizer` of `run.train.optimizer`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def comparisons(tree):
    """(line, key, name) of each comparison of what a registry's key holds with a name of that registry."""
    for node in ast.walk(tree):
        sides = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            patterns = [case.pattern for case in node.cases]
            sides = [node.subject, *(each.value for each in patterns if isinstance(each, ast.MatchValue))]
        for key in {last_name(side) for side in sides} & set(REGISTRIES):
            for name in set().union(*map(strings, sides)) & set(REGISTRIES[key].names):
                yield node.lineno, key, name


def tables(tree):
    """(line, names) of each dictionary or Literal that lists names of one registry."""
    for node in ast.walk(tree):
        listed = set()
        if isinstance(node, ast.Dict) and node.keys:
            listed = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Subscript) and last_name(node.value) == "Literal":
            listed = strings(node.slice)
        for registry in REGISTRIES.values():
            if len(listed) > 1 and listed <= set(registry.names):
                yield node.lineno, sorted(listed)


def test_no_name_is_compared_outside_its_file_and_its_registry():
    comparisons_elsewhere = [
        f"{file}:{line} {key} {name}" for file, tree in OTHERS.items() for line, key, name in comparisons(tree)
    ]
    assert comparisons_elsewhere == []


def test_no_other_table_lists_the_names_of_a_registry():
    assert [f"{file}:{line} {names}" for file, tree in OTHERS.items() for line, names in tables(tree)] == []


def test_no_other_package_asks_for_the_class_of_an_objective():
    everything = [getattr(artel.objectives, name) for name in artel.objectives.__all__]
    classes = {each.__name__ for each in everything if isinstance(each, type) and issubclass(each, Objective)}
    places = [
        f"{name}:{node.lineno}"
        for name, tree in OTHERS.items()
        if not name.startswith("objectives/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and last_name(node.func) == "isinstance" and last_name(node.args[1]) in classes
    ]
    assert places == []


def test_no_other_package_asks_which_strategy_it_has():
    """The loop and the setup ask a strategy, or its plan, what they must know (`holds_full_model`, `can_generate`)."""
    strategies = {"DeepSpeedStrategy", "FullyShardedDataParallel", "PipelineParallel", "SharedSequences", "Strategy"}
    places = [
        f"{name}:{node.lineno}"
        for name, tree in OTHERS.items()
        if not name.startswith("parallel/")
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name | ast.Attribute) and last_name(node) in strategies)
        or (isinstance(node, ast.Attribute) and node.attr == "dims" and last_name(node.value) == "strategy")
        or (isinstance(node, ast.Attribute) and last_name(node.value) == "dims" and node.attr in SPLITS)
    ]
    assert places == []


def test_the_checks_see_what_they_look_for():
    code = (
        'if run.train.optimizer == "adamw" or "jsonl" in run.track: pass\nx = {"causal": 1, "masked": 2}[run.objective]'
    )
    tree = ast.parse(code)
    assert {(key, name) for _, key, name in comparisons(tree)} == {("optimizer", "adamw"), ("track", "jsonl")}
    assert list(tables(tree)) == [(2, ["causal", "masked"])]


@pytest.mark.parametrize(
    ("registry", "kind"),
    [(OBJECTIVES, type), (FORMATS, Format), (OPTIMIZERS, OptimizerSpec), (SCHEDULES, object), (TRACKERS, type),
     (EXPORTERS, type)],
)  # fmt: skip
def test_each_name_stands_for_something(registry, kind):
    assert all(isinstance(registry[name], kind) for name in registry.names)


def test_objectives_and_trackers_are_declared_whole():
    for name in OBJECTIVES.names:
        objective = OBJECTIVES[name]
        assert issubclass(objective, Objective)
        assert objective.auto_class.startswith("AutoModel")
        assert set(objective.learns_from) <= {kind for each in FORMATS.names for kind in FORMATS[each].yields}
    assert all(issubclass(TRACKERS[name], Tracker) for name in TRACKERS.names)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"train.optimizer: unknown name 'adamv'\n.*did you mean adamw"):
        OPTIMIZERS["adamv"]
    with pytest.raises(InputError, match="write one of: linear, cosine, constant, wsd"):
        SCHEDULES["zzz"]
    tree = {"data": {"sources": [{"path": "a.txt", "format": "jsonlines"}]}, "train": {"schedule": "wds"}}
    with pytest.raises(InputError) as error:
        run_from(tree, {}, {(): "run.yaml"})
    assert {problem.where.partition(": ")[2] for problem in error.value.problems} == {
        "data.sources.0.format", "train.schedule"
    }  # fmt: skip
    assert "did you mean wsd?" in str(error.value)


def test_a_name_is_registered_once():
    registry = Registry("track", {"console": "somewhere:Console"})
    registry.register("mine")(object)
    registry.register("mine")(object)  # the same module, imported once more
    with pytest.raises(InputError, match="track: 'console' is registered already"):
        registry.register("console")(object)
    assert registry.module_of("mine") == __name__
    assert registry.module_of("console") is None
