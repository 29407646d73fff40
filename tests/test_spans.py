"""Large files in spans: however a file is cut, its spans together hold its lines, each once."""

import gzip
import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.text.formats.jsonl import read_jsonl
from artel.text.formats.text import read_text
from artel.text.reading.lines import Span, can_be_divided, count_lines, read_lines
from artel.text.reading.source_file import SourceFile
from support.reading import written

LARGEST = 1000
TEXTS = ["", "\n", "a", "a\n", "\n\na\n\n", "one\ntwo\n\nпять\r\n\r\nend", "é\r\n\ufeff\rЖж\n€𝄞\n\r"]


def lines_of(file, span=None, encoding="auto"):
    result = list(read_lines(file, file.name, encoding, LARGEST, span))
    assert [number for number, _ in result] == list(range(1, len(result) + 1))
    return [line for _, line in result]


def check_cuts(file, cuts):
    spans = [Span(start, stop) for start, stop in itertools.pairwise([0, *cuts])]
    assert list(map(str, (line for span in spans for line in lines_of(file, span)))) == list(map(str, lines_of(file)))
    assert [count_lines(file, span) for span in spans] == [len(lines_of(file, span)) for span in spans]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_every_way_to_cut_a_small_file_in_three(tmp_path, text, mark):
    file = written(tmp_path, "a.txt", mark + text.encode())
    size = file.stat().st_size
    for first in range(size + 1):
        for second in range(first, size + 1):
            check_cuts(file, [first, second, size])
    check_cuts(file, [size + 10])  # as when the file was longer before


@given(
    text=st.text(alphabet="ab\n\r Ж€𝄞", max_size=60),
    cuts=st.lists(st.integers(0, 200), max_size=8).map(sorted),
    encoding=st.sampled_from(["utf-8", "koi8-r"]),
)
@example(text="a\n" * 20, cuts=list(range(40)), encoding="utf-8")
@settings(max_examples=200)
def test_any_text_cut_anywhere(tmp_path_factory, text, cuts, encoding):
    file = tmp_path_factory.getbasetemp() / "any.txt"
    file.write_bytes(text.encode(encoding, "ignore"))
    check_cuts(file, [*cuts, 1000])


def test_lines_longer_than_what_is_read_at_once(tmp_path):
    text = "a" * 2_500_000 + "\n" + "b\n" * 10 + "c" * 1_000_000 + "\n\n" + "d" * 999_999
    file = written(tmp_path, "a.txt", text)
    whole = [line for _, line in read_lines(file, "a.txt", "utf-8", len(text))]
    cuts = [0, 1, 1_000_000, 2_500_000, 2_500_001, 2_500_002, 2_500_010, 3_000_000, 3_500_022, 3_500_023, 10**7]
    spans = [Span(start, stop) for start, stop in itertools.pairwise(cuts)]
    assert [line for span in spans for _, line in read_lines(file, "a.txt", "utf-8", len(text), span)] == whole
    counts = [sum(1 for _ in read_lines(file, "a.txt", "utf-8", len(text), span)) for span in spans]
    assert [count_lines(file, span) for span in spans] == counts


def test_the_encoding_is_that_of_the_file_and_not_of_the_span(tmp_path):
    file = written(tmp_path, "a.txt", "Все счастливые семьи похожи друг на друга\nfew\nЖ\n".encode("koi8-r"))
    assert lines_of(file, Span(42, 100)) == ["few", "Ж"]


@pytest.mark.parametrize(
    ("name", "content", "encoding", "divided"),
    [
        ("a.txt", b"one\ntwo", "auto", True),
        ("a.jsonl", b'{"text": "a"}\n', "auto", True),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n', mtime=0), "auto", False),
        ("a.txt", "one\ntwo".encode("utf-16"), "auto", False),
        ("a.txt", "one\ntwo".encode("utf-32"), "auto", False),
        ("a.txt", "one\ntwo".encode("utf-16-le"), "UTF_16_LE", False),
        ("a.txt", "слово\n".encode("cp1251"), "windows-1251", True),
        ("a.txt", bytes(range(256)), "auto", False),
        ("a.json", b'\xef\xbb\xbf \n [{"text": "a"}]', "auto", False),
        ("a.json", b'{"text": "a"}\n{"text": "b"}\n', "auto", True),
        ("a.json", b"\n\n", "auto", False),
    ],
)
def test_which_files_are_divided(tmp_path, name, content, encoding, divided):
    assert can_be_divided(written(tmp_path, name, content), name, encoding) is divided


def test_records_of_spans_have_the_line_within_them(tmp_path):
    lines = [f'{{"text": "line {number}"}}' for number in range(9)]
    lines[4] = ""
    lines[6] = "{"
    source = SourceConfig(path=["a"], document="line")
    for reader, name in ((read_jsonl, "a.jsonl"), (read_text, "a.txt")):
        path = written(tmp_path, name, "\n".join(lines))
        file = SourceFile(path, name, "set", source, DataConfig())
        size = path.stat().st_size
        whole = list(reader(file))
        for cut in range(size + 1):
            before = count_lines(path, Span(0, cut))
            results = []
            for span, shift in ((Span(0, cut), 0), (Span(cut, size), before)):
                for item in reader(replace(file, span=span)):
                    number = int(item.origin.rsplit(":", 1)[1]) + shift
                    results.append((type(item), getattr(item, "text", ""), f"{name}:{number}"))
            assert results == [(type(item), getattr(item, "text", ""), item.origin) for item in whole]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le"])
def test_wide_encodings_have_the_same_lines_and_a_bound(tmp_path, encoding):
    text = "one\r\n\nпять\n𝄞 last"
    file = written(tmp_path, "a.txt", text.encode(encoding))
    assert lines_of(file, encoding=encoding) == ["one", "", "пять", "𝄞 last"]
    with pytest.raises(ValueError, match="cannot be divided"):
        lines_of(file, Span(0, 10), encoding)
    file.write_bytes("good\n".encode(encoding) * 9999 + b"\xd8\xd8\xd8\xd8\xd8")
    *good, bad = lines_of(file, encoding=encoding)
    assert set(good) == {"good"}
    assert len(good) > 5000  # the bad one stands for what was read at once with it
    assert bad.reason == "unreadable"
    file.write_bytes(("x" * (LARGEST + 1)).encode(encoding))
    with pytest.raises(InputError, match=r"a\.txt:1: the line is over"):
        lines_of(file, encoding=encoding)
