"""Prompts of reasoning-gym: the same on every machine, scored by the reward of the same name."""

import pytest

from artel.config import DataConfig, RewardTerm
from artel.errors import InputError
from artel.registry import REWARDS
from artel.rewards import Completion
from artel.text import Ledger, check_sources, read_documents
from artel.text.sources.find import list_sources
from support.reading import items_of, rows_of

gym = pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")


def data_of(*tasks, **more):
    sources = [{"format": "gym", "gym": task, **source} for task, source in tasks]
    return DataConfig.model_validate({"sources": sources, **more})


def scores(task, records, answer):
    term = RewardTerm.model_validate(f"gym:{task}")
    reward = REWARDS[term.reward](term.model_extra[term.reward])
    return reward([Completion("p", answer(record), record.fields.columns, 1, False) for record in records])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("task", ["countdown", "ransom_note", "list_functions", "word_ladder"])
def test_rows_do_not_depend_on_the_process_and_right_answers_earn_everything(task, monkeypatch):
    """The order of a set decides the prompts of ransom_note, the global generator those of list_functions."""
    data = data_of(({"task": task, "samples": 6, "seed": 3}, {}))
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    records = list(items_of(data))
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert list(items_of(data)) == records
    assert [record.origin for record in records] == [f"gym:{task}:{index}" for index in range(6)]
    assert all(record.fields.columns.keys() == {"answer", "metadata"} for record in records)
    assert scores(task, records, lambda record: f"<answer>{record.fields.columns['answer']}</answer>") == [1.0] * 6
    assert max(scores(task, records, lambda record: "zzz")) < 0.5


@pytest.mark.slow
@pytest.mark.processes
def test_several_tasks_are_counted_each_and_split():
    data = data_of(
        ({"task": "countdown", "samples": 8, "options": {"max_numbers": 4}}, {"mapping": {"prompt": "question"}}),
        ("leg_counting", {"rows": "[5:25]", "name": "legs"}),
        validation=0.25,
    )
    check_sources(data)
    ledger = Ledger()
    documents = list(read_documents(data, ledger))
    counts = {name: entry["kept"] for name, entry in ledger.to_json()["sets"].items()}
    assert counts == {"gym:countdown": 8, "legs": 20}
    assert 0 < sum(document.split == "validation" for document in documents) < 28
    first = documents[0].record.fields
    question = gym.create_dataset("countdown", size=8, seed=0, max_numbers=4)[0]["question"]
    assert (first.text.split(), first.messages) == (question.split(), ())


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ("countdwn", "task", "did you mean countdown"),
        ({"task": "countdown", "options": {"min_numbers": 0}}, "options", "CountdownConfig"),
        ({"task": "countdown", "options": {"zzz": 0}}, "options", "zzz"),
    ],
    ids=str,
)
def test_wrong_settings_are_reported_with_their_key(settings, key, message):
    with pytest.raises(InputError) as caught:
        check_sources(data_of((settings, {})))
    (problem,) = caught.value.problems
    assert problem.where == f"data.sources.0.gym.{key}"
    assert message in f"{problem.what} {problem.fix}"


def test_validation_texts_beside_generated_prompts_are_prompts(tmp_path):
    file = rows_of(tmp_path, [{"question": "1 + 1?", "answer": "2"}])
    (_, source), _ = list_sources(data_of(("countdown", {}), validation=str(file)))
    assert (source.format, source.yields) == ("prompts", "prompts")
