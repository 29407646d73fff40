"""Slices of sources: which records are taken."""

import json
from functools import partial

import pytest

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.text import check_sources
from artel.text.formats.chat import read_chat
from artel.text.reading.subsets import check_rows
from support.reading import MESSAGES, documents, read_rows, rows_of

chat = partial(read_rows, read_chat, "chat")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("[:3]", slice(0, 3)), ("[ 2 : 5 ]", slice(2, 5)), ("[97:]", slice(97, 100)), ("[:]", slice(0, 100)),
        ("[:10%]", slice(0, 10)), ("[10%:]", slice(10, 100)), ("[33.3%:66.6%]", slice(33, 66)),
        ("[:1_000]", slice(0, 100)),
        ("[-5:]", slice(95, 100)), ("[:-95]", slice(0, 5)), ("[-10%:]", slice(90, 100)), ("[-500:]", slice(0, 100)),
        ("[98:-1]", slice(98, 99)), ("[50%:-20]", slice(50, 80)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_slices_of_every_format(tmp_path, rows, expected, kind):
    lines = [json.dumps({"messages": [str(number), "x"]}) if kind == "chat" else str(number) for number in range(100)]
    for name, part in (("a", lines[:60]), ("b", lines[60:])):  # a slice goes over all files of its source
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
    source = {"path": str(tmp_path / "*.jsonl"), "format": kind, "document": "line", "rows": rows}
    kept, ledger = documents(sources=[source])
    said = [document.record.group or document.record.text for document in kept]
    assert said == [str(number) for number in range(100)][expected]
    assert ledger.total.read == len(said)


def test_bad_rows_count_as_rows_of_a_slice(tmp_path):
    file = rows_of(tmp_path, [{"messages": ["a", "b"]}, {}, {"messages": ["c", "d"]}])
    kept, ledger = documents(sources=[{"path": str(file), "format": "chat", "rows": "[1:]"}], max_bad=0.5)
    assert [document.record.group for document in kept] == ["c"]
    assert (ledger.total.read, ledger.total.dropped) == (2, {"unknown_form": 1})


@pytest.mark.parametrize("rows", ["1000", "[1000]", "[::2]", "[a:b]", "[1.5:]", "[:200%]", "[:0]", "[5:5]", "[20:10]",
                                  "[-5:-9]", "[90%:10%]", "[:0%]", "(1:2)"])  # fmt: skip
def test_wrong_slices(tmp_path, rows):
    source = {"path": str(rows_of(tmp_path, [{"messages": MESSAGES}])), "format": "chat", "rows": rows}
    with pytest.raises(InputError, match=r'data\.sources\.0\.rows(.|\n)*write rows: "\[:1000\]"'):
        check_sources(DataConfig.model_validate({"sources": [source]}))
    assert check_rows(SourceConfig.model_validate({**source, "rows": ""}), "data.sources.0") == []


@pytest.mark.parametrize("rows", ["[5:]", "[:10%]", "[:-1]"])
def test_a_slice_that_takes_nothing(tmp_path, rows):
    source = {"path": str(rows_of(tmp_path, [{"messages": MESSAGES}])), "format": "chat", "rows": rows}
    with pytest.raises(InputError, match=r"data\.sources\.0\.rows.*selects no record of"):
        documents(sources=[source])


def test_a_slice_leaves_the_validation_file_whole(tmp_path):
    file = rows_of(tmp_path, [{"messages": [str(number), "x"]} for number in range(9)])
    other = rows_of(tmp_path, [{"messages": [f"v{number}", "x"]} for number in range(5)], "v.jsonl")
    kept, _ = documents(sources=[{"path": str(file), "format": "chat", "rows": "[:2]"}], validation=str(other))
    assert [document.split for document in kept] == ["validation"] * 5 + ["train"] * 2
