"""Tables and confusion matrices of a validation: in the terminal, on the page, and from files that hold anything."""

import json
import re

import pytest

from artel.reports.details import detail_lines, read_details
from artel.reports.page import Page
from artel.reports.run_data import read_runs
from support.labels import label_run, one_label

MATRIX = {"labels": ["cat", "dog"], "counts": [[8, 2], [1, 9]]}
ROWS = [{"label": "cat", "texts": 10, "f1": 0.8421}, {"label": "dog", "texts": 10, "f1": 0.8571, "auc": 0.5}]


def test_tables_and_matrices_stand_in_line():
    content = {"step": 7, "tables": {"labels": ROWS}, "matrices": {"pets": MATRIX}}
    assert list(detail_lines(read_details(content))) == [
        "labels:",
        "  label  texts      f1     auc",
        "  cat       10  0.8421",
        "  dog       10  0.8571  0.5000",
        "pets (rows: true, columns: predicted):",
        "       cat  dog",
        "  cat    8    2",
        "  dog    1    9",
    ]


def test_of_many_labels_the_commonest_confusions_are_told():
    labels = [str(number) for number in range(40)]
    counts = [[number if column == 0 else 0 for column in range(40)] for number in range(40)]
    title, _, first, *_, last = detail_lines(read_details({"matrices": {"m": {"labels": labels, "counts": counts}}}))
    assert "most frequent confusions" in title
    assert first.split() == ["39", "0", "39"]
    assert last.split() == ["15", "0", "15"]


@pytest.mark.parametrize(
    "content",
    [None, [], {}, {"tables": []}, {"tables": {"a": []}}, {"tables": {"a": [1]}}, {"matrices": {"a": 1}},
     {"matrices": {"a": {"labels": ["x"], "counts": [[1, 2]]}}}, {"matrices": {"a": {"labels": [], "counts": []}}},
     {"matrices": {"a": {"labels": ["x"], "counts": [["y"]]}}}, {"matrices": {"a": {"labels": 3, "counts": 4}}}],
)  # fmt: skip
def test_what_is_no_table_and_no_matrix_is_left_out(content):
    assert not read_details(content)


@pytest.mark.parametrize(("language", "title"), [("en", "By label"), ("ru", "По меткам")])
def test_the_page_draws_the_matrix(tmp_path, language, title):
    import artel

    run = artel.train(label_run(tmp_path / "run.yaml", one_label(), train={"steps": 4}))
    html = Page(language).html(read_runs([str(run.folder)]))
    assert title in html
    content = json.loads((run.folder / "validation.json").read_text())
    (matrix,) = content["matrices"].values()
    cells = re.findall(r'<td class="number" style="--share:([\d.]+)">(\d+)</td>', html)
    assert [int(count) for _, count in cells] == [count for row in matrix["counts"] for count in row]
    for label in matrix["labels"]:
        assert f'<th scope="row">{label}</th>' in html
    (run.folder / "validation.json").write_text('{"matrices": {"<script>": {"labels": ["<b>"], "counts": [[1]]}}}')
    html = Page(language).html(read_runs([str(run.folder)]))
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
