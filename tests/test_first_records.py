"""`artel config check` reads the first records and refuses what `artel prepare` would refuse in them."""

import pytest

from artel.config import TokenizerTraining, load_run
from artel.errors import InputError
from artel.planning import check_records
from artel.preparing import prepare
from artel.tokens import train_tokenizer
from support.chat_templates import FAMILIES
from support.labels import ROWS, label_run
from support.reading import message, rows_of
from support.runs import artel
from support.stores import run_of

ASKED, ANSWERED = message("user", "How warm?"), message("assistant", "Three degrees.")
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "get", "arguments": {}}}]}
TOOLS = [{"name": "get", "parameters": {}}]


def chat_run(folder, rows, family="gemma3", **changes):
    FAMILIES[family].tokenizer().save(folder / "tokenizer")
    source = {"path": str(rows_of(folder, rows)), "format": "chat"}
    data = {"block": 400, "sources": [source], **changes}
    model = {"config": {"model_type": "gpt2"}}
    return run_of(folder, objective="chat", model=model, tokenizer={"from": str(folder / "tokenizer")}, data=data)


def refused(work, run):
    with pytest.raises(InputError) as error:
        work(run)
    return [(problem.where, problem.what) for problem in error.value.problems]


def question(number):
    return {"messages": [message("user", f"How warm is it on day {number}?"), ANSWERED]}


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": [ASKED, CALL, message("tool", "3"), ANSWERED], "tools": TOOLS}],
        [*map(question, range(14)), *([{"messages": [ASKED, message("assistant", "")]}] * 13)],
        [question(1), {"messages": [ASKED, ASKED, ANSWERED, message("tool", "3"), ANSWERED]}],
        [{"messages": [{**message, "weight": 0} for message in question(number)["messages"]]} for number in range(3)],
        [{"messages": [ASKED, message("assistant", "word " * 900)]}],
    ],
    ids=["calls that the template writes none of", "half are unusable", "a row for no template", "nothing learned",
         "longer than a block"],
)  # fmt: skip
def test_conversations_are_refused_as_prepare_refuses_them(tmp_path, rows):
    run = chat_run(tmp_path, rows)
    assert refused(check_records, run) == refused(prepare, run)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: [row | {"text": ""} for row in rows],
        lambda rows: rows[::20] + [row | {"text": " "} for row in rows[:10]],
        lambda rows: [row | {"label": "food"} for row in rows],
    ],
    ids=["no text", "empty texts", "one label"],
)
def test_labels_are_refused_as_prepare_refuses_them_before_there_is_a_tokenizer(tmp_path, spoil):
    run = load_run(str(label_run(tmp_path / "run.yaml", spoil(ROWS["single"]()))))
    assert refused(check_records, run) == refused(prepare, run)


def test_names_that_cut_words_are_refused_as_prepare_refuses_them(tmp_path):
    rows = [{"text": f"Anna {number} lives in Rome.", "entities": [[1, 3, "PER"]]} for number in range(30)]
    source = {"path": str(rows_of(tmp_path, rows)), "format": "entities"}
    tokenizer = train_tokenizer(iter([rows[0]["text"]] * 40), TokenizerTraining(vocab=270), encoder=True)
    tokenizer.save(tmp_path / "tokenizer")
    changes = {"model": {"config": {"model_type": "bert"}}, "tokenizer": {"from": str(tmp_path / "tokenizer")}}
    run = run_of(tmp_path, objective="tokens", tokens={"labels": ["PER"]}, data={"sources": [source]}, **changes)
    assert refused(check_records, run) == refused(prepare, run)


def test_what_max_bad_allows_is_told(tmp_path):
    run = chat_run(tmp_path, [*map(question, range(120)), {"messages": [ASKED, message("assistant", "")]}])
    (note,) = check_records(run)
    assert note.startswith(f"1 of 121 records cannot be used, the first {tmp_path}/a.jsonl:121: message 2 (assistant)")


@pytest.mark.slow
def test_of_long_texts_the_first_are_read_and_none_is_refused(tmp_path):
    long = [{"messages": [ASKED, message("assistant", f"{number} " * 20_000)]} for number in range(10, 60)]
    run = chat_run(tmp_path, [{"messages": [ASKED, message("assistant", "")]}, *long], block=10)
    (note,) = check_records(run)
    assert note.startswith("1 of the first ")


def test_of_long_texts_without_a_usable_record_the_first_thousand_are_read(tmp_path):
    """They count for no text: all of a file of any size was read, and told of as more than there were."""
    rows = [{"body": f"{number} " * 400} for number in range(3000)]
    run = run_of(tmp_path, data={"sources": [{"path": str(rows_of(tmp_path, rows))}]})
    (note,) = check_records(run)
    assert note.startswith(f"1,000 of the first 1,000 records cannot be used, the first {tmp_path}/a.jsonl:1: ")


def test_texts_elsewhere_are_left_to_prepare(tmp_path):
    source = {"path": "http://localhost:1/a.jsonl", "format": "chat"}
    run = chat_run(tmp_path, [question(1)], sources=[source])
    assert check_records(run) == ["remote sources are not checked yet: artel prepare fetches and reads them"]


@pytest.mark.slow
def test_the_command_refuses_records_and_a_wrong_model_in_one_round(tmp_path):
    file = label_run(tmp_path / "run.yaml", [row | {"text": ""} for row in ROWS["single"](40)])
    done = artel("config", "check", file, "model.config.hidden_size=33")
    assert done.returncode == 2
    assert "cannot be used, more than data.max_bad" in done.stderr
    assert "33" in done.stderr
    rows = ROWS["single"](401)
    noted = artel("config", "check", label_run(tmp_path / "run.yaml", [*rows[1:], rows[0] | {"text": ""}]))
    assert noted.returncode == 0, noted
    assert noted.stderr.endswith(": no problems found (see the notes above)\n")
    assert "1 of 401 records cannot be used" in noted.stderr
    good = artel("config", "check", label_run(tmp_path / "run.yaml", ROWS["single"](40)))
    assert (good.returncode, good.stderr.splitlines()[-1]) == (0, f"{tmp_path / 'run.yaml'}: no problems found"), good
