"""Quotes in .csv and .tsv: a quote that is not closed is told by its line, and swallows no row after it."""

import csv
import io
import random

import datasets
import pandas
import pytest

from artel.errors import InputError
from artel.text import Rejected
from artel.text.formats.table_lines import TableRows
from support.reading import checked, items, read_texts, written

ROWS = [(f"row {number}", "pos" if number % 3 else "neg") for number in range(400)]


def table(rows, delimiter, header=("text", "label"), **dialect):
    stream = io.StringIO()
    csv.writer(stream, delimiter=delimiter, lineterminator="\n", **dialect).writerows([header, *rows])
    return stream.getvalue()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
def test_what_csv_and_pandas_write_is_read_back(tmp_path, seed, name, delimiter):
    """Quotes, doubled quotes, delimiters and line feeds within quotes, as any library writes them."""
    letters = random.Random(seed)
    texts = ["x" + "".join(letters.choices('ab, "\n\t;', k=30)) + "y" for _ in range(60)]
    file = written(tmp_path, name, table([(text, "l") for text in texts], delimiter))
    assert read_texts(file, format="csv")[0] == list(dict.fromkeys(texts))
    pandas.DataFrame({"label": "l", "text": texts}).to_csv(file, sep=delimiter, index=False)
    assert read_texts(file, format="csv")[0] == list(dict.fromkeys(texts))


@pytest.mark.parametrize("end", ["", " ago", '"', ', "he said'])
def test_a_tsv_without_quoting_keeps_its_quotes(tmp_path, end):
    """As datasets read such files with quoting=csv.QUOTE_NONE: GLUE, corpora of translations."""
    rows = [(f'"{text}{end}' if number % 50 == 3 else text, label) for number, (text, label) in enumerate(ROWS)]
    rows += [('a 27" disk', "neg"), ('said "yes"', "pos"), ('""', "pos")]
    text = "".join(f"{text}\t{label}\n" for text, label in [("text", "label"), *rows])
    file = written(tmp_path, "a.tsv", text)
    expected = datasets.Dataset.from_csv(
        str(file), sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False, cache_dir=str(tmp_path / "cache")
    )
    if end == '"':  # every quote is closed: quoting
        expected = {"text": [text.strip('"') if text.startswith('"') else text for text, _ in rows]}
    found = [item.text for item in items(file, format="csv")]
    assert found == list(expected["text"])


FORMATS = {
    "csv": {"format": "csv"},
    "pairs": {"format": "pairs", "input": "text", "output": "label"},
    "labels": {"format": "labels"},
    "matches": {"format": "matches", "mapping": {"query": "text", "positive": "label"}},
}


@pytest.mark.parametrize("source", FORMATS.values(), ids=FORMATS)
def test_an_open_quote_costs_its_own_row_in_every_format(tmp_path, source):
    text = table(ROWS, ",").replace("row 7,", '"row 7,').replace("row 300,", '"row 300,')
    found = items(written(tmp_path, "a.csv", text), **source)
    bad = [item for item in found if isinstance(item, Rejected)]
    assert [item.origin.rpartition(":")[2] for item in bad] == ["9", "302"]
    assert all("a quote" in item.detail and "never closed" in item.detail for item in bad)
    assert len(found) == 400


def test_an_open_quote_that_a_later_cell_closes_is_told_by_every_row_it_took(tmp_path):
    """To the csv module this is one good row of 34, or 300, lines."""
    text = table(ROWS, ",").replace("row 7,", '"row 7,')
    file = written(tmp_path, "a.csv", text.replace("row 40,", 'a disk of 27",'))
    with pytest.raises(InputError, match=r"a\.csv:9: line 9: its quote is closed in line 42 only.*\n.*33 more"):
        read_texts(file, format="csv", max_bad=0.01)
    texts, ledger = read_texts(written(tmp_path, "a.csv", text.replace("row 306,", '27",')), format="csv", max_bad=0.01)
    assert (len(texts), ledger["documents"]["dropped"]) == (399, {"open_quote": 1})


def test_an_open_quote_at_the_end_of_prose_is_an_error(tmp_path):
    text = table([("a\nb", "x")], ",") + '"one\ntwo\nthree\n'
    with pytest.raises(InputError, match=r"a\.csv:4: a quote is opened in this row and never closed"):
        read_texts(written(tmp_path, "a.csv", text), format="csv")


def test_quotes_that_are_trusted_cost_linear_time():
    """Each of the last rows opens a quote that only the end of the file ends; the first rows show that it is quoted."""
    reads = 0

    class Counted(TableRows):
        def _next_line(self):
            nonlocal reads
            reads += 1
            return super()._next_line()

    lines = ["text\tlabel\n", *['"a\tb"\tpos\n'] * 1000, *['a"\t"b\n'] * 1000]
    rows = Counted(iter(lines), "a.tsv", "\t", 10**6, lambda: True)
    taken = [cells for _, cells in zip(range(2000), (cells for _, cells in rows), strict=False)]
    assert reads < (8 + 64) * len(lines)
    assert taken[1:1001] == [["a\tb", "pos"]] * 1000
    assert [cells.reason for cells in taken[1001:]] == ["open_quote"] * 999


def test_one_bad_row_does_not_make_a_quoted_tsv_an_unquoted_one(tmp_path):
    rows = [(f"two\nlines {number}", "x") for number in range(5)]
    file = written(tmp_path, "a.tsv", table(rows, "\t") + '"open\tx\nplain\tx\n')
    found = items(file, format="csv")
    assert [getattr(item, "text", item) for item in found[:5]] == [text for text, _ in rows]
    assert isinstance(found[5], Rejected)
    assert found[6].text == "plain"


def test_the_header_is_checked_before_any_row_is_read(tmp_path):
    file = written(tmp_path, "a.csv", 'body,label\n"open\n')
    with pytest.raises(InputError, match=r"no column 'text' \(it has: body, label\)"):
        checked(file, format="csv")
