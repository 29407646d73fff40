"""Registries: what they hold, and names that they do not know."""

import pytest

from artel.config import parse_run
from artel.errors import InputError
from artel.objectives.base import Objective
from artel.registry import EXPORTERS, FORMATS, OBJECTIVES, OPTIMIZERS, SCHEDULES, TRACKERS, Registry
from artel.text.formats.format import Format
from artel.training.metrics.trackers import Tracker
from artel.training.optim.specs import OptimizerSpec


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
        parse_run(tree, {}, {(): "run.yaml"})
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
    assert registry.get_module("mine") == __name__
    assert registry.get_module("console") is None
