"""What a template makes of a run's conversations is checked before the first step, and shown by `artel data show`."""

import json
from datetime import date

import numpy as np
import pytest

from artel.errors import InputError
from artel.objectives import build_objective
from artel.planning import check_records
from artel.preparing import prepare
from artel.preparing.sample_text import SampleViews
from artel.reports.page import Language
from artel.tokens import TokenStore
from artel.tokens.tokenizer.chat_template import inserts_date
from support.chat_templates import FAMILIES
from support.messages import logged
from support.reading import message, rows_of
from support.stores import run_of

GPT2 = {"config": {"model_type": "gpt2"}}
ONE = [message("user", "a"), message("assistant", "One.")]
TWO = [*ONE, message("user", "b"), message("assistant", "Two.")]
FIRST_ONLY = [{**turn, "loss_weight": float(number == 1)} for number, turn in enumerate(TWO)]
THOUGHT = [{**turn, "reasoning_content": "Hm."} if turn["role"] == "assistant" else turn for turn in TWO]
SYSTEM = [message("system", "s"), *TWO]


def run_with(tmp_path, family, rows, **more):
    folder = tmp_path / "tokenizer"
    FAMILIES[family].tokenizer().save(folder)
    rows = [row if isinstance(row, dict) else {"messages": row} for row in rows]
    source = {"path": str(rows_of(tmp_path, rows, "a.jsonl")), "format": "chat"}
    return run_of(tmp_path, objective="chat", model=GPT2, tokenizer={"from": str(folder)},
                  data={"block": 1000, "sources": [source], "validation": 0.0}, **more)  # fmt: skip


def _but_the_day(notes):
    return [note for note in notes if "strftime_now" not in note]


@pytest.mark.slow
def test_a_run_that_never_learns_the_end_of_a_turn_is_refused_with_the_row_and_the_templates_line(tmp_path):
    run = run_with(tmp_path, "gpt_oss", [FIRST_ONLY])
    with pytest.raises(InputError) as refused:
        prepare(run)
    (problem,) = refused.value.problems
    assert problem.where == "chat.template"
    assert f"In {tmp_path}/a.jsonl:1 '<|end|>' follows the answer, but generation stops at '<|return|>'" in problem.what
    (number,) = (at for at, line in enumerate(FAMILIES["gpt_oss"].template.splitlines(), 1)
                 if "final<|message|>' + message.content + '<|end|>'" in line)  # fmt: skip
    assert f"; the tokenizer's chat template:{number} writes it: {{{{- '<|start|>assistant<|channel|>" in problem.what
    with pytest.raises(InputError):
        prepare(run)  # nothing is left of it that a second start would take
    assert prepare(run_with(tmp_path, "gpt_oss", [FIRST_ONLY, TWO])).is_new  # one end that is learned is enough


def test_a_store_without_a_target_is_refused(tmp_path):
    run = run_with(tmp_path, "qwen2_5", [ONE])
    prepared = prepare(run)
    flags = next(prepared.folder.glob("train/*.flags"))
    np.zeros(flags.stat().st_size, np.uint8).tofile(flags)
    store = TokenStore(prepared.folder)
    with pytest.raises(InputError, match=r"no token of the 1 training samples is a target; the first is .*a.jsonl:1"):
        build_objective(run, prepared.tokenizer()).check_store(store)


@pytest.mark.parametrize(
    ("family", "conversation", "turn", "says"),
    [
        ("qwen3", THOUGHT, 1, "its reasoning, or the tags around it, are dropped"),
        ("gpt_oss", THOUGHT, 1, "its reasoning, or the tags around it, are dropped"),
        ("mistral_nemo", SYSTEM, 1, "the text before it changes"),
        ("deepseek_r1", ONE, 1, "the generation prompt begins a thought"),
        ("gemma4", TWO, 1, "the generation prompt begins a thought"),
        ("yandexgpt5", TWO, 1, "only the last turn of each conversation is a target"),
    ],
)
def test_a_template_that_writes_a_history_otherwise_is_told(tmp_path, family, conversation, turn, says):
    run = run_with(tmp_path, family, [conversation])
    prepared = prepare(run)
    (note,) = _but_the_day(prepared.notes())
    assert f"first in {tmp_path}/a.jsonl:1, turn {turn} of the assistant" in note
    assert says in note
    in_russian = Language("ru").phrase(note)
    assert in_russian.startswith("Шаблон чата, диалогов: 1 из первых 1 (первый — ")
    assert says not in in_russian
    assert _but_the_day(check_records(run)) == [note]  # `artel config check` says it too


def calling(parameters, *arguments, **more):
    """A conversation whose turns call `get_weather` with these arguments."""
    calls = [{"function": {"name": "get_weather", "arguments": one}} for one in arguments]
    tools = [{"name": "get_weather", "parameters": parameters}]
    return {"tools": tools, "messages": [message("user", "a"), {"role": "assistant", "tool_calls": calls, **more}]}


CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (calling(CITY, {"city": "a"}, {"days": 3}), "1 of 3 calls in the first 2 conversations do not fit the "
         "parameters that their tool declares, the first {origin}: get_weather lacks city"),
        (calling(CITY, {"town": "a"}, {"city": "a", "town": "b", "at": 1}), "2 of 3 calls in the first 2 conversations "
         "do not fit the parameters that their tool declares, the first {origin}: get_weather lacks city and has "
         "undeclared parameters: town"),
        (calling(CITY, {"city": "a", "x": 1, "y": 2}), "1 of 2 calls in the first 2 conversations do not fit the "
         "parameters that their tool declares, the first {origin}: get_weather has undeclared parameters: x, y"),
        (calling({**CITY, "additionalProperties": True}, {"city": "a", "x": 1}), None),
        (calling({"type": "object", "properties": {}}, {"x": 1}), None),
        (calling({}, {"x": 1}), None),
        (calling({"type": "object", "properties": {"a": {}}, "required": "a"}, {"a": 1}), None),
        (calling(CITY, {"town": "a"}, loss_weight=0) | {"messages": [
            *calling(CITY, {"town": "a"}, loss_weight=0)["messages"], message("tool", ""), message("assistant", "b")]},
         None),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit_their_parameters_are_counted_and_learned(tmp_path, row, says):
    good = calling(CITY, {"city": "Omsk", "days": 1})
    run = run_with(tmp_path, "qwen2_5", [good, row])
    notes = check_records(run)
    expected = [] if says is None else [says.format(origin=f"{tmp_path}/a.jsonl:2")]
    assert notes == expected
    for note in notes:
        in_russian = Language("ru").phrase(note)
        assert in_russian.startswith("Вызовы в первых 2 диалогах: ")
        assert "declare" not in in_russian


@pytest.mark.parametrize("family", ["llama3", "qwen2_5", "granite4", "olmo2", "command_r", "kimi_k2"])
def test_templates_that_keep_what_they_wrote_have_nothing_to_tell(tmp_path, family):
    assert _but_the_day(prepare(run_with(tmp_path, family, [SYSTEM])).notes()) == []


def test_an_end_that_also_stands_before_calls_is_told(tmp_path):
    run = run_with(tmp_path, "gigachat3", [ONE])
    model = tmp_path / "model"
    model.mkdir()
    mark, end = FAMILIES["gigachat3"].tokenizer().hf.convert_tokens_to_ids(["<|message_sep|>\n\n", "</s>"])
    run = run.model_copy(update={"model": run.model.model_copy(update={"from_": str(model)})})
    for saved, count in ((end, 0), ([end, mark], 1)):
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": saved}))
        notes = check_records(run)
        assert len(notes) == count, notes
    assert "'<|message_sep|>\\n\\n'" in notes[0]
    assert "the call would be cut off" in notes[0]
    in_russian = Language("ru").phrase(notes[0])
    assert in_russian.startswith("Генерация останавливается на '<|message_sep|>\\n\\n'")
    assert "call" not in in_russian


def test_what_is_learned_is_counted_by_turns_and_their_ends(tmp_path):
    run = run_with(tmp_path, "gpt_oss", [TWO, ONE])
    prepared = prepare(run)
    store = prepared.open()
    samples = SampleViews(run, store, store.train, prepared.tokenizer())
    two, one = (next(samples.views(number)) for number in (0, 1))
    assert [end for _, end in two.turns] == ["", "<|return|>"]
    assert "2 turns, 1 without the end <|return|>" in two.describe_learned()
    assert one.describe_learned().endswith("of them learned: 1 turn, with its end <|return|>")
    assert two.to_json()["turns"][1]["end"] == "<|return|>"
    assert sum(turn["tokens"] for turn in two.to_json()["turns"]) == two.to_json()["learned"]


def test_texts_with_the_day_of_preparing_are_told_and_dated(tmp_path):
    """By what templates write, not by their words: a template may call strftime_now for a date that it leaves out."""
    dated = {name for name in FAMILIES if "strftime_now" in FAMILIES[name].template}
    assert {"llama3", "mistral_small", "gpt_oss"} <= dated
    for name in FAMILIES:
        assert inserts_date(FAMILIES[name].tokenizer(), FAMILIES[name].template) == (name in dated), name
    assert not inserts_date(
        FAMILIES["llama3"].tokenizer(), "{% set day = strftime_now('%d') %}{{ messages[0].content }}"
    )


def test_a_store_has_the_day_that_its_texts_have(tmp_path):
    run = run_with(tmp_path, "llama3", [TWO] * 3)
    before = date.today()
    told = logged()
    store = TokenStore(prepare(run).folder)
    day = date.fromisoformat(store.manifest["day"])
    assert before <= day <= date.today()
    assert any("The chat template writes today's date (strftime_now)" in note for note in told), told
    ids = store.train.sample(0).ids.tolist()
    assert f"{day:%d %b %Y}" in FAMILIES["llama3"].tokenizer().hf.decode(ids)
    (note,) = [note for note in told if "strftime_now" in note]
    assert Language("ru").phrase(note).startswith("Шаблон чата пишет в подготовленные тексты сегодняшнюю дату")
    assert any("strftime_now" in note for note in check_records(run_with(tmp_path, "llama3", [ONE] * 3)))


def test_a_store_without_a_date_in_its_texts_has_none(tmp_path):
    run = run_with(tmp_path, "qwen3", [TWO] * 3)
    assert "day" not in TokenStore(prepare(run).folder).manifest
