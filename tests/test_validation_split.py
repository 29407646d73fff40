"""validation: {fraction, by: chapter}: neighbouring pieces of a text stay on one side of the split."""

from itertools import groupby
from pathlib import Path

import pytest

from artel.config import DataConfig
from artel.errors import InputError
from artel.preparing import prepare
from artel.text.split import Chapters, is_heading
from support.stores import run_of, stored, tree

BY_CHAPTER = {"fraction": 0.1, "by": "chapter"}


def novel(chapters, paragraphs=12, heading="Глава {}"):
    """Chapters of about 12,000 characters, each paragraph with the number of its chapter."""
    sentence = "и тогда он сказал ей то, чего никто не ожидал услышать в этот тихий вечер, "
    parts = []
    for number in range(1, chapters + 1):
        parts += [heading.format(number)] if heading else []
        parts += [f"Абзац {place} из {number}: {sentence * 12}" for place in range(paragraphs)]
    return "\n\n".join(parts)


def chapter_numbers(documents, split):
    return {text.split(" из ")[1].split(":")[0] for _, text, part in documents if part == split and " из " in text}


@pytest.mark.parametrize(
    "line",
    ["Глава I", "ЧАСТЬ ПЕРВАЯ", "глава 12. О том, что было", "Chapter 2", "CHAPTER THE FIRST", "XIV", "IV.", "# Title",
     "Эпилог", "Том второй", "Book Two"],
)  # fmt: skip
def test_headings(line):
    assert is_heading(line)


@pytest.mark.parametrize(
    "line",
    ["Часть людей ушла.", "Я", "Глава семьи молчал", "", "— И всё?", "#хэштег", "Book a table", "I " * 50, "1812"],
)
def test_lines_that_are_no_headings(line):
    assert not is_heading(line)


def test_a_chapter_stays_on_one_side(tmp_path):
    Path("novel.txt").write_text(novel(40))
    documents, ledger = stored(tmp_path, data={"sources": [{"path": "novel.txt"}], "validation": BY_CHAPTER})
    held, learned = chapter_numbers(documents, "validation"), chapter_numbers(documents, "train")
    assert held
    assert not held & learned
    assert len(held) + len(learned) == 40
    assert ledger["split"] == {"by": "chapter", "fraction": 0.1,
                               "chapters": {"train": len(learned), "validation": len(held)}}  # fmt: skip
    assert f"{len(held)} of 40 chapters are held out" in ledger["notes"][-1]
    # By documents the same text is torn apart: a chapter stands on both sides.
    torn, _ = stored(tmp_path, data={"sources": [{"path": "novel.txt"}], "validation": 0.3})
    assert chapter_numbers(torn, "validation") & chapter_numbers(torn, "train")


@pytest.mark.parametrize("document", ["auto", "line", "paragraph"])
def test_a_text_without_headings_is_held_out_in_runs(tmp_path, document):
    Path("novel.txt").write_text(novel(120, heading=""))
    source = {"path": "novel.txt", "document": document}
    documents, _ = stored(tmp_path, data={"sources": [source], "validation": BY_CHAPTER})
    ordered = sorted(documents, key=lambda item: int(item.origin.rpartition(":")[2]))
    runs = [(split, sum(len(item.text) for item in run)) for split, run in groupby(ordered, lambda item: item.split)]
    held = [size for split, size in runs if split == "validation"]
    assert held
    assert min(held) >= 30_000  # whole runs, no single paragraphs
    assert 0.02 < sum(held) / sum(size for _, size in runs) < 0.3


def test_files_in_any_parts_are_split_alike(tmp_path):
    Path("novel.txt").write_text(novel(30))
    made, tokenizer = set(), {"train": {"vocab": 270}}
    for name, part in (("one", 10_000_000), ("many", 20_000)):
        (tmp_path / name).mkdir()
        data = {"sources": [{"path": "novel.txt", "document": "line"}], "validation": BY_CHAPTER}
        run = run_of(tmp_path / name, data=data, prepare={"part": part, "workers": 1}, tokenizer=tokenizer)
        made.add(tree(prepare(run).folder))
    assert len(made) == 1


def test_without_headings_a_short_text_is_still_held_out(tmp_path):
    """The smallest text that is cut: five pieces."""
    Path("short.txt").write_text(novel(2, heading=""))
    validation = {"fraction": 0.05, "by": "chapter"}
    documents, _ = stored(tmp_path, data={"sources": [{"path": "short.txt"}], "validation": validation})
    assert {document.split for document in documents} == {"train", "validation"}


def test_chapters_by_hand():
    chapters = Chapters(byte_size=1_000_000, fraction=0.1)
    texts = ["Пролог\nа", "б", "Глава 1\nв", "г", "x" * 40_000, "д"]
    assert [chapters.assign_chapter(text) for text in texts] == [texts[0]] * 2 + [texts[2]] * 3 + [texts[5]]


def test_a_number_and_a_path_stay_what_they_were():
    assert DataConfig().held_out == 0.05
    assert DataConfig(validation="held.txt").held_out is None
    assert DataConfig.model_validate({"validation": {"fraction": 0.2}}).held_out == 0.2
    assert not DataConfig.model_validate({"validation": {"fraction": 0.2}}).splits_by_chapter


@pytest.mark.parametrize(
    ("validation", "source", "says"),
    [
        ({"fraction": 0.1, "by": "page"}, {"path": "a.txt"}, "data.validation.by"),
        ({"fraction": 1.5}, {"path": "a.txt"}, "data.validation.fraction"),
        ({"share": 0.1}, {"path": "a.txt"}, "data.validation"),
        (BY_CHAPTER, {"path": "a.jsonl", "format": "jsonl"}, "by: chapter needs plain text"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(tmp_path, validation, source, says):
    with pytest.raises(InputError) as refusal:
        run_of(tmp_path, data={"sources": [source], "validation": validation})
    assert says in str(refusal.value)
    assert "[section]" not in str(refusal.value)
