"""Texts with names, and words with tags: CoNLL's columns and rows of JSON; bad ones are told by file and line."""

import gzip
import json
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.registry import FORMATS
from artel.text import DroppedRecord, Record, TaggedText
from support.reading import bad, checked, items, items_of, read, read_rows, rows_of, written

REAL = Path(__file__).parents[2] / "shared" / "data" / "encoders" / "factrueval_dev.jsonl"
TEXT = "Anna Karenina went to Moscow."
SPANS = [(0, 13, "PER"), (22, 28, "LOC")]


def conll(folder, content, name="a.conll", **source):
    return read(FORMATS["conll"].read, written(folder, name, content), format="conll", **source)


entities = partial(read_rows, FORMATS["entities"].read, "entities")


def tagged(item):
    """(text, spans) of a record."""
    assert isinstance(item, Record), item
    assert isinstance(item.fields, TaggedText)
    assert item.text == item.fields.text
    return item.text, list(item.fields.spans)


def named(item):
    text, spans = tagged(item)
    return [(text[start:end], label) for start, end, label in spans]


# CoNLL's columns


CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
German JJ B-NP B-MISC
call NN I-NP O
. . O O

Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER

-DOCSTART- -X- -X- O

BRUSSELS NNP B-NP B-LOC
"""


UNIVERSAL = """# sent_id = 1
# text = Мама мыла раму.
1\tМама\tмама\tNOUN\t_\t_\t2\tnsubj\t_\t_
2\tмыла\tмыть\tVERB\t_\t_\t0\troot\t_\t_
3-4\tраму\t_\t_\t_\t_\t_\t_\t_\t_
3\tраму\tрама\tNOUN\t_\t_\t2\tobj\t_\tSpaceAfter=No
3.1\tбы\tбы\tAUX\t_\t_\t_\t_\t_\t_
4\t.\t.\tPUNCT\t_\t_\t2\tpunct\t_\t_
"""


def test_conll_2003_is_a_record_a_sentence(tmp_path):
    first, second, third = conll(tmp_path, CONLL_2003)
    assert tagged(first) == ("EU rejects German call .", [(0, 2, "ORG"), (11, 17, "MISC")])
    assert named(second) == [("Peter Blackburn", "PER")]
    assert [item.origin for item in (first, second, third)] == ["a.conll:3", "a.conll:9", "a.conll:14"]
    assert first.group == second.group == first.text, "sentences of a document go into the same split"
    assert third.group == third.text


@pytest.mark.parametrize(
    "tags",
    [
        "B-PER I-PER O B-LOC B-LOC",  # BIO (IOB2)
        "I-PER I-PER O I-LOC B-LOC",  # IOB1: B- only between neighbours
        "B-PER E-PER O S-LOC S-LOC",  # BIOES
        "B-PER L-PER O U-LOC U-LOC",  # BILOU
    ],
)
def test_every_scheme_gives_what_it_means(tmp_path, tags):
    words = ["Anna", "Karenina", "left", "Moscow", "Petersburg"]
    content = "\n".join(f"{word}\t{tag}" for word, tag in zip(words, tags.split(), strict=True))
    (item,) = conll(tmp_path, content)
    assert named(item) == [("Anna Karenina", "PER"), ("Moscow", "LOC"), ("Petersburg", "LOC")]


@pytest.mark.parametrize("name", ["a.conll", "b.bio", "c.iob", "d.conll.gz"])
def test_columns_are_told_by_their_ending_where_the_format_is_rows(tmp_path, name):
    content = CONLL_2003.encode()
    file = written(tmp_path, name, gzip.compress(content) if name.endswith(".gz") else content)
    checked(file, format="entities")
    assert [named(item) for item in items(file, format="entities")][1] == [("Peter Blackburn", "PER")]
    for format in ("entities", "conll"):
        with pytest.raises(InputError, match=r"'ner' is not a column of conll"):
            checked(file, format=format, tags="ner")


@pytest.mark.parametrize(
    ("row", "override"),
    [
        ({"id": 3, "body": "Anna left.", "label": []}, "data.sources.1.field=body"),
        ({"text": "Anna left.", "names": [[0, 4, "PER"]]}, "data.sources.1.tags=names"),
        ({"text": "Anna left."}, "data.sources.1.tags=NAME"),
        ({"tokens": ["Anna", "left"], "my tags": ["B-PER", "O"]}, "'data.sources.1.tags=my tags'"),
    ],
)
def test_a_missing_field_gets_the_override_to_write(tmp_path, row, override):
    good = rows_of(tmp_path, [{"text": "Anna left.", "label": []}], name="good.jsonl")
    sources = [{"path": str(file), "format": "entities"} for file in (good, rows_of(tmp_path, [row]))]
    _, rejected = items_of(DataConfig.model_validate({"sources": sources}))
    assert f"; name it: {override}" in rejected.detail


@pytest.mark.parametrize(
    ("name", "content", "source", "expected"),
    [
        ("a.conll", "1\tSchartau\tB-PER\tO\n2\tsagte\tO\tO\n", {"words": 1, "tags": 2},
         ("Schartau sagte", [(0, 8, "PER")])),
        ("a.conll", CONLL_2003.split("\n\n")[2], {"tags": -3, "kind": "words"},
         ("Peter Blackburn", [(0, 5, "NNP"), (6, 15, "NNP")])),
        ("a.conllu", UNIVERSAL, {"kind": "words"},
         ("Мама мыла раму.", [(0, 4, "NOUN"), (5, 9, "VERB"), (10, 14, "NOUN"), (14, 15, "PUNCT")])),
        # Comments at the head of a sentence are none of its words; an odd space is a part of one.
        ("a.conll", "# id 5a7-f300\tdomain=en\nRome _ _ B-LOC\n# _ _ O\n", {}, ("Rome #", [(0, 4, "LOC")])),
        ("a.conll", "10\u00a0000 B-MONEY\nrubles I-MONEY\n", {}, ("10\u00a0000 rubles", [(0, 13, "MONEY")])),
    ],
)  # fmt: skip
def test_words_and_tags_of_columns(tmp_path, name, content, source, expected):
    (item,) = conll(tmp_path, content, name, **source)
    assert tagged(item) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Anna B-PER\nwent\n\nRome B-LOC\n", [("a.conll:2", "unequal_columns")]),
        ("Anna NNP B-PER\nwent O\n\nRome NNP B-LOC\n", [("a.conll:2", "unequal_columns")]),
        ("Anna\nwent\n\nRome B-LOC\n", [("a.conll:1", "unequal_columns")]),
        ("\tB-PER\n\nRome\tB-LOC\n", [("a.conll:1", "empty_word")]),
        ("Anna NOUN\nwent VERB\n\nRome B-LOC\n", [("a.conll:1", "no_prefix")]),
    ],
)
def test_a_sentence_that_is_wrong_costs_itself(tmp_path, content, expected):
    found = conll(tmp_path, content)
    assert bad(found) == expected
    assert named(found[-1]) == [("Rome", "LOC")]


@pytest.mark.parametrize(("format", "said"), [("conll", "write kind: words"), ("entities", "with a tag for each word")])
def test_parts_of_speech_of_universal_dependencies_are_no_names(tmp_path, format, said):
    file = written(tmp_path, "a.conllu", UNIVERSAL)
    with pytest.raises(InputError, match=said):
        checked(file, format=format)
    checked(file, format=format, kind="words")
    assert tagged(*items(file, format=format, kind="words"))[0] == "Мама мыла раму."


# rows of JSON


DOCCANO = [[0, 13, "PER"], [22, 28, "LOC"]]
OBJECTS = [{"start": 0, "end": 13, "label": "PER"}, {"start": 22, "end": 28, "label": "LOC"}]
OFFSETS = [{"id": 1, "label": "PER", "start_offset": 0, "end_offset": 13},
           {"id": 2, "label": "LOC", "start_offset": 22, "end_offset": 28}]  # fmt: skip
LABELS = [{"start": 0, "end": 13, "text": "Anna Karenina", "labels": ["PER"]},
          {"start": 22, "end": 28, "text": "Moscow", "labels": ["LOC"]}]  # fmt: skip
RESULT = [{"value": value, "from_name": "label", "to_name": "text", "type": "labels"} for value in LABELS]
WORDS, TAGS = ["Anna", "Karenina", "went", "to", "Moscow."], ["B-PER", "I-PER", "O", "O", "B-LOC"]


@pytest.mark.parametrize(
    "row",
    [
        {"text": TEXT, "label": DOCCANO},
        {"id": 5, "text": TEXT, "labels": DOCCANO, "Comments": []},
        {"text": TEXT, "entities": OFFSETS, "relations": []},
        {"text": TEXT, "label": LABELS, "annotator": 1},  # Label Studio's JSON-MIN
        {"id": 1, "data": {"text": TEXT}, "annotations": [{"result": RESULT, "was_cancelled": False}]},
        {"id": 1, "data": {"body": TEXT}, "annotations": [{"result": [], "was_cancelled": True}, {"result": RESULT}]},
        {"text": TEXT, "spans": OBJECTS, "tokens": [{"text": "Anna", "id": 0}], "answer": "accept"},  # Prodigy
        [TEXT, {"entities": DOCCANO}],  # spaCy's training data
        {"id": "book_1", "text": TEXT, "entities": OBJECTS},
    ],
)
def test_spans_of_characters_in_every_form(tmp_path, row):
    assert tagged(entities(tmp_path, row)[0]) == (TEXT, SPANS)


def emoji():
    """A task of Label Studio, which counts characters as JavaScript does."""
    value = {"start": 3, "end": 7, "text": "Anna", "labels": ["PER"]}
    return {"data": {"text": "😀 Anna"}, "annotations": [{"result": [{"value": value, "type": "labels"}]}]}


@pytest.mark.parametrize(
    ("row", "source", "expected"),
    [
        (emoji(), {}, ("😀 Anna", [(2, 6, "PER")])),
        # White space at the ends of a span is none of it, and a span counts once; nested ones stay.
        ({"text": TEXT, "label": [[0, 14, "PER"], [21, 28, "LOC"], [22, 28, "LOC"]]}, {}, (TEXT, SPANS)),
        ({"text": "Bank of   Moscow", "label": [[0, 16, "ORG"], [10, 16, "LOC"]]}, {},
         ("Bank of   Moscow", [(0, 16, "ORG"), (10, 16, "LOC")])),
        ({"tokens": ["Мама", "спит"], "upos": ["NOUN", "VERB"], "ner_tags": ["O", "O"]}, {"kind": "words"},
         ("Мама спит", [(0, 4, "NOUN"), (5, 9, "VERB")])),
    ],
    ids=["emoji", "white space", "nested", "words"],
)  # fmt: skip
def test_what_counts_as_a_span(tmp_path, row, source, expected):
    assert tagged(*entities(tmp_path, row, **source)) == expected


def test_fields_of_other_names_in_a_file_that_is_one_array(tmp_path):
    file = written(tmp_path, "export.json", json.dumps([{"body": TEXT, "marks": DOCCANO}]))
    (item,) = items(file, format="entities", field="body", tags="marks")
    assert tagged(item) == (TEXT, SPANS)


@pytest.mark.parametrize("tags", [TAGS, [1, 2, 0, 0, 3]])
def test_words_with_tags_as_hugging_face_has_them(tmp_path, tags):
    names = ["O", "B-PER", "I-PER", "B-LOC"]
    (item,) = entities(tmp_path, {"id": "0", "tokens": WORDS, "ner_tags": tags}, tag_names=names)
    assert tagged(item) == (TEXT, [(0, 13, "PER"), (22, 29, "LOC")])


def test_parquet_of_datasets_brings_the_names_of_its_classes(tmp_path):
    names = ["O", "B-PER", "I-PER", "B-LOC"]
    about = {"info": {"features": {"ner_tags": {"feature": {"names": names, "_type": "ClassLabel"}, "_type": "List"}}}}
    table = pyarrow.table({"tokens": [WORDS], "ner_tags": [[1, 2, 0, 0, 3]]})
    table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    (item,) = items(tmp_path / "train.parquet", format="entities")
    assert named(item) == [("Anna Karenina", "PER"), ("Moscow.", "LOC")]


def test_label_studio_shows_several_spaces_as_one(tmp_path):
    text = "In Berlin,  Germany\nand"
    value = {"start": 3, "end": 19, "text": "Berlin, Germany", "labels": ["LOC"]}
    tasks = [
        {"data": {"text": text}, "annotations": [{"result": [{"value": value | places}]}]}
        for places in ({}, {"start": 4})
    ]
    found = entities(tmp_path, *tasks)
    assert named(found[0]) == [("Berlin,  Germany", "LOC")]
    assert bad(found) == [("a.jsonl:2", "span_outside")]


def test_what_an_annotator_did_not_accept_is_dropped(tmp_path):
    rows = [{"text": TEXT, "spans": OBJECTS, "answer": answer} for answer in ("reject", "ignore")]
    found = entities(tmp_path, *rows, {"data": {"text": TEXT}, "annotations": []})
    assert [item.reason for item in found if isinstance(item, DroppedRecord)] == [
        "rejected_by_annotator", "ignored_by_annotator", "not_annotated"]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": TEXT, "label": [[0, 99, "PER"]]}, "span_outside"),
        ({"text": TEXT, "label": [[-3, 4, "PER"]]}, "span_outside"),
        ({"text": TEXT, "label": [[9, 4, "PER"]]}, "span_outside"),
        ({"text": TEXT, "label": [[4, 4, "PER"]]}, "span_empty"),
        ({"text": TEXT, "label": [[4, 5, "PER"]]}, "span_empty"),
        ({"text": "Маи\u0306я", "label": [[0, 4, "PER"]]}, None),
        ({"text": "Маи\u0306я", "label": [[0, 3, "PER"]]}, "span_cuts_character"),
        ({"text": "a 👩\u200d🚀", "label": [[2, 3, "X"]]}, "span_cuts_character"),
        ({"text": TEXT, "label": [[0, "4", "PER"]]}, "no_span"),
        ({"text": TEXT, "label": [[0, 4.5, "PER"]]}, "no_span"),
        ({"text": TEXT, "label": [{"start": 0, "label": "PER"}]}, "no_span"),
        ({"text": TEXT, "label": ["PER"]}, "no_span"),
        ({"text": TEXT, "label": [[0, 4, None]]}, "no_label"),
        ({"text": TEXT, "label": [[0, 4, " "]]}, "no_label"),
        ({"text": TEXT}, "no_field"),
        ({"label": DOCCANO}, "no_text"),
        ({"text": " ", "label": []}, "empty"),
        ({"tokens": WORDS, "ner_tags": TAGS[:4]}, "unequal_columns"),
        ({"tokens": WORDS, "ner_tags": [1, 2, 0, 0, 9]}, "no_label"),
        ({"tokens": WORDS}, "no_field"),
        ({"data": {"text": TEXT}, "annotations": [{"result": [{"value": LABELS[0] | {"start": 3, "end": 9}}]}]},
         "span_outside"),
        ({"text": TEXT, "label": DOCCANO, "answer": ["accept"]}, None),  # of others: Prodigy's is a word
        ("{", "bad_json"),
    ],
)  # fmt: skip
def test_a_row_that_is_wrong_costs_itself(tmp_path, row, reason):
    found = entities(tmp_path, row, {"text": TEXT, "label": DOCCANO})
    assert bad(found) == ([] if reason is None else [("a.jsonl:1", reason)])
    if reason is not None:
        assert tagged(found[-1]) == (TEXT, SPANS)


def test_the_real_texts(tmp_path):
    if not REAL.is_file():
        pytest.skip(f"{REAL} is not there")
    found = items(REAL, format="entities")
    assert len(found) == 122
    assert bad(found) == []
    assert sum(len(item.fields.spans) for item in found) == 2_608
    assert {label for item in found for *_, label in item.fields.spans} == {"Person", "Org", "LocOrg", "Location"}


def test_a_source_of_names_and_one_of_words():
    assert SourceConfig(path=["a"], format="conll").yields == "entities"
    assert SourceConfig(path=["a"], format="conll", kind="words").yields == "words"
    assert SourceConfig(format="dummy", kind="entities").yields == "entities"
