"""Questions: Natural Questions, SQuAD and made-up ones; answers stand where they say, bad ones cost themselves."""

import gzip
import json
import re
from collections import Counter

import orjson
import pytest

from artel.config import SourceConfig
from artel.errors import InputError
from artel.text import Question
from artel.text.formats.dummy import read_dummy_questions
from artel.text.formats.questions import read_nq, read_squad
from support.reading import bad, read, written

DOCUMENT = "The Mother - wikipedia <P> Tracy McConnell met him . </P> <P> Later they wed . </P>"
SHORT = {"start_token": 5, "end_token": 7}
LONG = {"start_token": 4, "end_token": 11, "candidate_index": 0}
NONE = {"start_token": -1, "end_token": -1, "candidate_index": -1}


def gold(question: Question):
    return [question.context[start:end] for start, end in question.answers]


# Natural Questions


def nq(folder, *entries, name="nq.jsonl", **source):
    lines = "".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in entries)
    return read(read_nq, written(folder, name, lines), format="nq", **source)


def annotation(yes_no="NONE", short=(), long=NONE):
    return {"yes_no_answer": yes_no, "short_answers": list(short), "long_answer": long}


def example(*annotations, **more):
    candidates = [{"start_token": start, "end_token": end, "top_level": top}
                  for start, end, top in ((5, 7, False), (4, 11, True), (11, 17, True))]  # fmt: skip
    return {"document_text": DOCUMENT, "question_text": "who is the mother", "annotations": list(annotations),
            "long_answer_candidates": candidates, "example_id": -7, **more}  # fmt: skip


@pytest.mark.parametrize("part", ["train", "dev"])
def test_simplified_nq_of_the_official_files(shared_data, part):
    file = shared_data / f"qa/nq_simplified_1_{part}.jsonl"
    (record,) = read(read_nq, file, format="nq")
    entry = orjson.loads(file.read_bytes())
    words = entry["document_text"].split(" ")
    (annotated,) = entry["annotations"]
    assert gold(record.fields) == [
        " ".join(words[answer["start_token"] : answer["end_token"]]) for answer in annotated["short_answers"]
    ]
    assert record.fields.answer_class == {"train": "unknown", "dev": "short"}[part]
    assert record.fields.id == str(entry["example_id"])
    assert len(record.fields.candidates) == len(entry["long_answer_candidates"]) > 30
    assert record.group == record.fields.context == entry["document_text"]
    assert record.text == f"{entry['question_text']}\n{entry['document_text']}"
    assert record.origin == f"{file.name}:1"


def test_every_word_span_of_a_real_document_is_its_words(shared_data, tmp_path):
    entry = orjson.loads((shared_data / "qa/nq_simplified_1_dev.jsonl").read_bytes())
    words = entry["document_text"].split(" ")
    spans = [(start, start + 3) for start in range(0, len(words) - 3, 7)] + [(len(words) - 1, len(words))]
    short = [{"start_token": start, "end_token": end} for start, end in spans]
    (record,) = nq(tmp_path, {**entry, "annotations": [annotation(short=short)]})
    assert gold(record.fields) == [" ".join(words[start:end]) for start, end in spans]


def test_nq_documents_with_answers_as_text(shared_data):
    file = shared_data / "qa/nq_documents_5.jsonl"
    records = read(read_nq, file, format="nq")
    entries = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    assert [gold(record.fields) for record in records] == [entry["answers"] for entry in entries]
    assert [record.fields.answer_class for record in records] == ["short", "short", "unknown", "unknown", "unknown"]
    assert [record.fields.id for record in records] == ["1", "2", "3", "4", "5"]


LONG_TEXT = "<P> Tracy McConnell met him . </P>"


@pytest.mark.parametrize(
    ("annotations", "answer_class", "answers"),
    [
        ([annotation(short=[SHORT], long=LONG)], "short", ["Tracy McConnell"]),
        ([annotation(long=LONG)], "long", [LONG_TEXT]),
        ([annotation(long={"candidate_index": 1})], "long", [LONG_TEXT]),
        ([annotation()], "unknown", []),
        ([annotation("YES", long=LONG)], "yes", [LONG_TEXT]),
        ([annotation("NO", long=LONG)], "no", [LONG_TEXT]),
        ([annotation("NO")], "no", []),
        ([annotation(), annotation(), annotation(long=LONG), annotation(), annotation()], "unknown", []),
        ([annotation(), annotation(short=[SHORT], long=LONG), annotation(long=LONG)], "short", ["Tracy McConnell"]),
        ([annotation(short=[SHORT]), annotation(short=[{"start_token": 8, "end_token": 9}, SHORT])],
         "short", ["Tracy McConnell", "him"]),
    ],
)  # fmt: skip
def test_classes_of_nq(tmp_path, annotations, answer_class, answers):
    (record,) = nq(tmp_path, example(*annotations))
    assert (record.fields.answer_class, gold(record.fields)) == (answer_class, answers)
    assert record.fields.candidates == ((4, 11), (11, 17), (5, 7))
    assert record.fields.id == "-7"


def test_original_nq_gives_what_the_simplified_one_does(tmp_path):
    entry = example(annotation(short=[SHORT], long=LONG))
    tokens = [{"token": word, "html_token": word.startswith("<")} for word in DOCUMENT.split(" ")]
    original = {key: value for key, value in entry.items() if key != "document_text"} | {"document_tokens": tokens}
    simplified, same = nq(tmp_path, entry, original)
    assert simplified.fields == same.fields


def test_nq_with_ids_of_other_kinds(tmp_path):
    records = nq(tmp_path, *(example(annotation(), example_id=name) for name in ("x1", 18446744073709551615)))
    assert [record.fields.id for record in records] == ["x1", "18446744073709551615"]


@pytest.mark.parametrize(
    ("change", "reason", "said"),
    [
        ({"annotations": []}, "no_annotations", "empty"),
        (
            {"annotations": [annotation(short=[{"start_token": 5, "end_token": 99}])]},
            "answer_not_in_document",
            "5 to 9",
        ),
        ({"annotations": [annotation(short=[{"start_token": 5, "end_token": 5}])]}, "answer_not_in_document", "5 to 5"),
        ({"annotations": [annotation(short=[{"start_token": -3, "end_token": 5}])]}, "answer_not_in_document", "-3"),
        ({"annotations": [annotation(long={"candidate_index": 9})]}, "answer_not_in_document", "is 9"),
        ({"annotations": [annotation("MAYBE")]}, "no_field", "MAYBE"),
        ({"annotations": [{"yes_no_answer": "NONE"}]}, "no_field", r"it has: yes_no_answer"),
        ({"annotations": [3]}, "no_field", r"annotations\[0\] is int"),
        ({"annotations": [annotation(short=[{"start_token": "5", "end_token": 6}])]}, "no_field", "start_token: str"),
        ({"annotations": "none"}, "no_field", "annotations: str"),
        ({"question_text": None}, "no_field", "question_text: NoneType"),
        ({"question_text": " "}, "empty", "question"),
        ({"document_text": "\n", "annotations": [annotation()]}, "empty", "document"),
        ({"document_text": ["a"]}, "no_field", "document_text: list"),
        ({"example_id": True}, "no_field", "example_id: bool"),
        ({"long_answer_candidates": [{"start_token": 3}]}, "no_field", "end_token"),
    ],
)
def test_bad_nq(tmp_path, change, reason, said):
    records = nq(tmp_path, example(annotation()), {**example(annotation()), **change})
    assert bad(records) == [("nq.jsonl:2", reason)]
    assert re.search(said, records[1].detail)


@pytest.mark.parametrize(
    ("line", "reason", "said"),
    [
        ({"document_text": "a b", "question_text": "c"}, "no_annotations", "neither"),
        ({"question_text": "c", "answers": []}, "no_field", "it has: question_text, answers"),
        ({"document_text": "a b", "question_text": "c", "answers": ["z"]}, "answer_not_in_document", "'z'"),
        ({"document_text": "a b", "question_text": "c", "answers": [""]}, "answer_not_in_document", "answers: "),
        ({"document_text": "a b", "question_text": "c", "answers": [1]}, "no_field", r"answers\[0\] is int"),
        ({"document_text": "a b", "question_text": "c", "answers": "a"}, "no_field", "answers: str"),
        ('{"document_text": "a b", "question', "bad_json", "not JSON"),
        ("[]", "bad_json", "list"),
    ],
)
def test_bad_nq_documents(tmp_path, line, reason, said):
    records = nq(tmp_path, {"document_text": "a b", "question_text": "c", "answers": ["b", "z"]}, line)
    assert gold(records[0].fields) == ["b"]
    assert bad(records) == [("nq.jsonl:2", reason)]
    assert re.search(said, records[1].detail)


# SQuAD


def squad(folder, content, name="squad.json", **more):
    text = content if isinstance(content, str | bytes) else json.dumps(content, ensure_ascii=False, indent=1)
    return read(read_squad, written(folder, name, text), format="squad", **more)


def one(*qas, context="Denver Broncos won ."):
    return {"data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}]}


def asked(name="q1", text="Broncos", start=7, **more):
    return {"answers": [{"answer_start": start, "text": text}], "question": "who won ?", "id": name, **more}


@pytest.mark.parametrize("language", ["ru", "en"])
def test_all_answers_of_xquad_are_found(shared_data, language):
    file = shared_data / f"qa/xquad.{language}.first36.json"
    records = read(read_squad, file, format="squad")
    entries = [
        (paragraph["context"], entry)
        for article in orjson.loads(file.read_bytes())["data"]
        for paragraph in article["paragraphs"]
        for entry in paragraph["qas"]
    ]
    assert len(records) == len(entries) == 925
    for record, (context, entry) in zip(records, entries, strict=True):
        assert gold(record.fields) == [answer["text"] for answer in entry["answers"]]
        assert record.fields.context == record.group == context
        assert record.fields.question == entry["question"]
        assert record.fields.id == entry["id"]
        assert record.origin == f"{file.name}:1 ({entry['id']})"
        assert record.fields.answer_class == "short"


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_lines_on_which_squads_questions_stand(tmp_path, ascii_only):
    names = ["в1", "a/b", 62310, 'q"1', "в1"]
    text = json.dumps(one(*(asked(name) for name in names)), ensure_ascii=ascii_only, indent=1).replace("/", "\\/")
    records = squad(tmp_path, text)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if '"id":' in line]
    assert [record.origin for record in records] == [
        f"squad.json:{line} ({name})" for line, name in zip(lines, names, strict=True)
    ]
    assert [record.fields.id for record in records] == [str(name) for name in names]


def test_squad_2_and_several_answers(tmp_path):
    several = asked("q2") | {
        "answers": [{"answer_start": 7, "text": "Broncos"}] * 2 + [{"answer_start": 0, "text": "Denver"}]
    }
    impossible = {"question": "why ?", "id": "q3", "is_impossible": True, "plausible_answers": []}
    records = squad(tmp_path, one(asked(is_impossible=False), several, impossible, asked("q4") | {"answers": []}))
    assert [(item.fields.answer_class, gold(item.fields)) for item in records] == [
        ("short", ["Broncos"]), ("short", ["Broncos", "Denver"]), ("unknown", []), ("unknown", []),
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "windows-1251"])
def test_squad_in_other_encodings_and_compressed(tmp_path, encoding):
    text = json.dumps(one(asked(text="победили", start=0), context="победили в Денвере"), ensure_ascii=False)
    records = squad(tmp_path, text.encode(encoding))
    records += squad(tmp_path, gzip.compress(text.encode()), "squad.json.gz")
    assert [gold(item.fields) for item in records] == [["победили"]] * 2


@pytest.mark.parametrize(
    ("content", "reason", "said"),
    [
        (one(asked(start=8)), "answer_not_in_context", r"'Broncos', but at 8 the context has 'roncos '; answer_start"),
        (one(asked(start=-1)), "answer_not_in_context", "nothing"),
        (one(asked(text="")), "answer_not_in_context", r"answers: \[\]"),
        (one(asked() | {"answers": [{"text": "a"}]}), "no_field", r"\.answers\[0\] has no field 'answer_start'"),
        (one(asked() | {"answers": [{"answer_start": 1}]}), "no_field", "no field 'text'"),
        (one(asked(start="7")), "no_field", "answer_start: str"),
        (one(asked() | {"answers": {"text": ["a"]}}), "no_field", "answers: dict"),
        (one({"question": "a", "id": "q1"}), "no_field", "'answers'.*it has: question, id"),
        (one({"answers": [], "id": "q1"}), "no_field", "'question'"),
        (one(asked(is_impossible="no")), "no_field", "is_impossible: str"),
        (one(asked(), context=" "), "answer_not_in_context", "the context has ''"),
        (one(asked() | {"answers": []}, context=" "), "empty", "document"),
        (one(asked() | {"question": ""}), "empty", "question"),
        ({"data": [{"paragraphs": [{"qas": [asked()]}]}]}, "no_field", r"\.paragraphs\[0\] has no field 'context'"),
    ],
)
def test_bad_squad_questions(tmp_path, content, reason, said):
    text = json.dumps(content, indent=1)
    records = squad(tmp_path, text)
    line = next(number for number, line in enumerate(text.splitlines(), 1) if '"id":' in line)
    assert bad(records) == [(f"squad.json:{line} (q1)", reason)]
    assert re.search(said, records[0].detail)


@pytest.mark.parametrize(
    ("content", "path", "name"),
    [
        (one({"question": "a", "answers": []}), "data[0].paragraphs[0].qas[0]", "id"),
        ({"data": [{"paragraphs": [{"context": "a"}]}]}, "data[0].paragraphs[0]", "qas"),
        ({"data": [{"title": "a"}]}, "data[0]", "paragraphs"),
    ],
)
def test_squad_without_what_its_questions_stand_in(tmp_path, content, path, name):
    (record,) = squad(tmp_path, json.dumps(content))
    assert (record.origin, record.reason) == (f"squad.json:1 ({path})", "no_field")
    assert f"{path} has no field '{name}'" in record.detail


@pytest.mark.parametrize("content", ['{"version": 1}', "[1, 2]", '{"data": {"a": 1}}', b"\0\1\2" * 99])
def test_files_that_are_no_squad(tmp_path, content):
    (record,) = squad(tmp_path, content)
    assert (record.origin, record.reason) == ("squad.json", "binary" if isinstance(content, bytes) else "bad_json")


@pytest.mark.parametrize("content", [json.dumps(one(asked()))[:-9], ""])
def test_squad_that_is_cut_off(tmp_path, content):
    with pytest.raises(InputError, match=r"squad\.json:1:\d+: the JSON is cut off here"):
        squad(tmp_path, content)


def test_squad_is_bounded(tmp_path):
    text = json.dumps(one(asked()), indent=1).encode()
    for name, content in (("a.json", text), ("a.json.gz", gzip.compress(text))):
        with pytest.raises(InputError, match=r"data\.max_document"):
            squad(tmp_path, content, name, max_document=len(text) - 1)
    assert len(squad(tmp_path, text, max_document=len(text))) == 1
    (record,) = squad(tmp_path, gzip.compress(text)[:-20], "a.json.gz")
    assert record.reason == "truncated"


# Dummy questions


def dummy(count=2000):
    source = {"format": "dummy", "kind": "questions", "documents": count}
    return list(read_dummy_questions(SourceConfig.model_validate(source)))


def test_dummy_questions_depend_on_their_number_alone():
    assert dummy(50) == dummy(200)[:50]


def test_dummy_questions_are_answered_right():
    for record in dummy():
        question = record.fields
        who = re.findall("[A-Z][a-z]+", question.question)[0]
        facts = [f"{fact} ." for fact in question.context.removeprefix("news : ").removesuffix(" .").split(" . ")]
        assert 3 <= len(facts) <= 6
        people = [fact.split(" ")[0] for fact in facts]
        assert len(set(people)) == len(people)
        if question.answer_class == "unknown":
            assert who not in people
            assert question.answers == ()
            continue
        fact = facts[people.index(who)]
        (answer,) = gold(question)
        assert answer == (fact.split(" ")[-2] if question.answer_class == "short" else fact)
        (span,) = question.answers
        assert facts.index(fact) == question.context[: span[0]].count(" . ")
        if question.question.startswith("is "):
            assert question.answer_class == ("yes" if "happy" in fact else "no")


def test_dummy_questions_vary():
    questions = [record.fields for record in dummy()]
    classes = Counter(question.answer_class for question in questions)
    assert all(0.16 < classes[name] / len(questions) < 0.24 for name in ("yes", "no", "short", "long", "unknown"))
    asked_of = {(question.question.split(" ")[0], question.answer_class == "unknown") for question in questions}
    assert asked_of == {(word, unknown) for word in ("is", "where", "what") for unknown in (True, False)}
    places = Counter(question.context[: span[0]].count(" . ") for question in questions for span in question.answers)
    assert set(places) == set(range(6))
    assert len({question.context for question in questions}) > 1900
    words = {word for question in questions for word in (question.question + " " + question.context).split(" ")}
    assert len(words) < 60
