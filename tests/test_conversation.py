"""A conversation with a model: what is kept of it, what is forgotten, settings, streaming."""

import json
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from artel.errors import InputError
from artel.generation.generate import Sampling, generate_from_ids
from artel.inference import ChatSettings, open_model
from artel.tokens.tokenizer.chat_template import CHATML, prompt_ids, turn_end
from support.chat_models import (
    MARKS,
    as_messages,
    learned_by_heart,
    llama,
    never_ending,
    said,
    saved,
    talk_with,
    trained_tokenizer,
)
from support.messages import logged


@pytest.fixture(scope="session")
def in_letters(tmp_path_factory) -> Path:
    """A model whose tokenizer has the template but no such tokens: it spells <|im_end|>."""
    return learned_by_heart(tmp_path_factory.mktemp("chat") / "letters", [], CHATML)


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> Path:
    """A model whose tokenizer has neither: its answers follow on `Assistant:` and a space of its own."""
    return learned_by_heart(tmp_path_factory.mktemp("chat") / "plain", [], None)


@pytest.mark.parametrize(
    ("model", "note"), [("with_marks", "written as chatml"), ("in_letters", ""), ("plain", "written as plain")]
)
def test_a_model_that_learned_to_answer_answers_and_stops(model, note, request):
    notes = logged()
    talk = talk_with(request.getfixturevalue(model), temperature=0.0, repetition_penalty=1.0)
    assert note in "".join(notes)
    assert len(notes) == bool(note)
    assert said(talk.answer("Who are you?")) == "I am a tiny model."
    talk.reset()
    talk.system = "Speak Russian."
    assert said(talk.answer("Who are you?")) == "Я маленькая модель."
    talk.reset()
    talk.system = ""
    assert [said(talk.answer(text)) for text in ("My name is Ann.", "What is my name?")] == ["Hello, Ann!", "Ann."]
    assert all(exchange.finished for exchange in talk.exchanges)
    assert len(notes) == bool(note)


def test_history_is_what_the_prompt_holds(with_marks):
    answers = {}
    for history in (0, 1):
        talk = talk_with(with_marks, temperature=0.0, repetition_penalty=1.0, history=history)
        answers[history] = [said(talk.answer(text)) for text in ("My name is Ann.", "What is my name?")]
        assert len(talk.messages) == 4  # all of it is kept, whatever goes into the prompt
    assert answers == {0: ["Hello, Ann!", "I do not know."], 1: ["Hello, Ann!", "Ann."]}


def test_equal_seeds_repeat_and_retry_replaces(endless):
    talks = [talk_with(endless, new_tokens=12, seed=seed) for seed in (7, 7, 8)]
    texts = [[said(talk.answer(text)) for text in ("Hi", "Hi again")] for talk in talks]
    assert texts[0] == texts[1] != texts[2]
    talk = talks[0]
    assert said(talk.retry()) == talk.exchanges[-1].answer != texts[0][1]
    assert [exchange.message for exchange in talk.exchanges] == ["Hi", "Hi again"]
    assert not talk.exchanges[-1].finished
    talk.reset()
    assert said(talk.answer("Hi")) == texts[0][0]


def test_a_stopped_answer_keeps_what_was_written(endless):
    talk = talk_with(endless)
    pieces = talk.answer("Hi")
    taken = [next(pieces) for _ in range(3)]
    pieces.close()
    assert talk.messages == as_messages([("user", "Hi"), ("assistant", said(taken))])


def test_an_answer_that_is_cut_off_names_what_was_too_short(tmp_path):
    notes = logged()
    talk = talk_with(never_ending(tmp_path / "short", 120), new_tokens=200, temperature=0.0)
    said(talk.answer("Hi"))
    assert notes[-1].startswith("cut off after ")
    assert notes[-1].endswith("tokens (prompt and answer fill the model's 120 positions)")
    talk.settings = replace(talk.settings, new_tokens=5)
    said(talk.answer("Hi"))
    assert notes[-1] == "cut off after 5 tokens (setting new_tokens)"


def test_the_oldest_exchanges_leave_a_full_window(tmp_path):
    tokenizer = trained_tokenizer(MARKS)
    notes = logged()
    folder = saved(tmp_path / "small", llama(tokenizer, max_position_embeddings=120), tokenizer)
    talk = talk_with(folder, system="Speak Russian.", new_tokens=40, top_k=0, temperature=1.0)
    for number in range(5):
        said(talk.answer(f"Message {number}"))
    left = [note for note in notes if "exchanges dropped" in note]
    assert left, notes
    assert left[0].startswith("the context of 120 tokens is full; earlier exchanges dropped: 1 of")
    assert not any("the answer is limited" in note for note in notes)  # exchanges leave before the answer loses room
    said(talk.answer("a " * 80))  # over the half, under the whole: the answer has less room
    assert any("tokens: the context has 120" in note for note in notes)
    before = talk.messages
    with pytest.raises(InputError, match="the model accepts 120"):
        talk.answer("a " * 200)
    assert talk.messages == before


def test_save_writes_a_conversation_that_a_chat_source_reads(endless, tmp_path):
    talk = talk_with(endless, system="Be brief.", new_tokens=5)
    with pytest.raises(InputError, match="nothing has been said"):
        talk.save(str(tmp_path / "no.jsonl"))
    answer = said(talk.answer("Привет"))
    for _ in range(2):  # again over the first
        talk.save(str(tmp_path / "talk.jsonl"))
    expected = {"messages": as_messages([("system", "Be brief."), ("user", "Привет"), ("assistant", answer)])}
    assert [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()] == [expected]
    assert [file.name for file in tmp_path.iterdir()] == ["talk.jsonl"]
    with pytest.raises(InputError, match="exists already"):
        talk.save(str(tmp_path))
    for path, says in (("~nosuchuser/talk.jsonl", "no such home folder"), ("a\0b", "has a NUL")):
        with pytest.raises(InputError, match=says):
            talk.save(path)


def test_load_goes_on_with_what_save_wrote(with_marks, tmp_path):
    greedy = {"temperature": 0.0, "repetition_penalty": 1.0}
    talk = talk_with(with_marks, **greedy)
    said(talk.answer("My name is Ann."))
    talk.save("talk.jsonl")
    said(talk.answer("What is my name?"))
    other = talk_with(with_marks, system="Speak Russian.", **greedy)
    other.load("talk.jsonl")
    assert other.messages == talk.messages[:2]  # without the system message of the conversation before
    assert said(other.answer("What is my name?")) == "Ann."
    other.save("talk.jsonl")
    assert json.loads(Path("talk.jsonl").read_text()) == {"messages": talk.messages}
    with_system = {"messages": as_messages([("system", "Be brief."), ("user", "a"), ("assistant", "b")]), "id": 1}
    Path("more.jsonl").write_text(json.dumps(with_system))
    other.load("more.jsonl")
    assert (other.system, other.messages) == ("Be brief.", with_system["messages"])
    with_system["messages"][1]["content"] = "a\u2028b"  # which is a line's end to str.splitlines
    Path("more.jsonl").write_text(json.dumps(with_system, ensure_ascii=False), encoding="utf-8")
    other.load("more.jsonl")
    assert other.messages == with_system["messages"]
    with pytest.raises(InputError, match="exists already"):
        other.save("more.jsonl")  # it has more than a conversation

    wrong = {
        "": "has 0 lines",
        "[1]": "not one conversation",
        "{": "not JSON",
        '{"messages": [{"role": "user"}]}': "no messages with role and content",
        '{"messages": []}': "do not alternate",
        json.dumps({"messages": as_messages([("user", "a")])}): "do not alternate",
        json.dumps({"messages": as_messages([("assistant", "a"), ("user", "b")])}): "do not alternate",
        json.dumps(with_system) + "\n" + json.dumps(with_system): "has 2 lines",
    }
    before = other.messages
    for text, says in wrong.items():
        Path("wrong.jsonl").write_text(text)
        with pytest.raises(InputError, match=says):
            other.load("wrong.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        other.load("none.jsonl")
    assert other.messages == before


def test_what_was_said_is_answered_alike_whatever_the_engine_keeps(endless):
    """Several answers in one conversation, each from a cache of the turns before and by `generate_from_ids`."""
    talk = talk_with(endless, new_tokens=20, seed=3, temperature=0.8, repetition_penalty=1.3)
    opened = open_model(str(endless))
    for number, message in enumerate(("Who are you?", "What is my name?", "a " * 50)):
        ids = prompt_ids(opened.tokenizer, CHATML, [*talk.messages, {"role": "user", "content": message}])
        sampling = Sampling(20, 0.8, 40, 0.6, 3 + number, 1.3)
        end = turn_end(opened.tokenizer, CHATML)
        alone = said(generate_from_ids(opened.model, opened.tokenizer, ids, sampling, None, end))
        assert said(talk.answer(message)) == alone.strip()
    talk.set("new_tokens", "5000")  # more than the engine has room for
    pieces = talk.answer("Hi")
    assert next(pieces)
    pieces.close()
    talk.close()
    talk.set("new_tokens", "20")
    talk.reset()
    ids = prompt_ids(opened.tokenizer, CHATML, [{"role": "user", "content": "Hi"}])
    sampling = Sampling(20, 0.8, 40, 0.6, 3, 1.3)
    alone = said(generate_from_ids(opened.model, opened.tokenizer, ids, sampling, None, end))
    assert said(talk.answer("Hi")) == alone.strip()


def test_settings():
    settings = ChatSettings()
    assert settings.with_value("new_tokens", "1_000").new_tokens == 1000
    assert settings.with_value("temperature", "0.25").temperature == 0.25
    wrong = {
        ("temprature", "1"): "did you mean temperature?",
        ("new-tokens", "5"): "did you mean new_tokens?",
        ("colour", "1"): "settings are: history",
        ("top_k", "many"): "'many' is not a number",
        ("history", "1.5"): "not a whole number",
        ("top_p", "1.5"): "use 0 to 1",
        ("temperature", "1e999"): "too large",
        ("new_tokens", "0"): "use 1 to 100,000,000",
    }
    for (name, value), message in wrong.items():
        with pytest.raises(InputError) as error:
            settings.with_value(name, value)
        assert message in str(error.value)
    with pytest.raises(InputError) as error:
        ChatSettings(top_p=float("nan"), seed=-1)
    assert len(error.value.problems) == 2


def test_answers_are_streamed(endless):
    talk = talk_with(endless, new_tokens=30)
    pieces = list(talk.answer("Hi"))
    assert len(pieces) > 10
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(accumulate(pieces)))
    assert said(pieces) == talk.exchanges[-1].answer
