"""What is held out for validation: by hash, at least one document, and of one long text a share of it."""

import json
from functools import partial

import pytest

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.messages import from_json
from artel.preparing import prepare, workspace
from artel.text import input_shards, list_all_inputs
from artel.text.sources.inputs import read_shard
from artel.text.split import is_held_out, split_hash
from support.messages import logged
from support.reading import message, rows_of, written
from support.runs import TEXT_ALONE, succeed, write_run
from support.stores import run_of, stored

CHAT = {"objective": "chat", "model": {"config": {"model_type": "gpt2"}}}


def talks(count, name="a"):
    return [
        {"messages": [message("user", f"{name} {number}?"), message("assistant", "yes")]} for number in range(count)
    ]


def smallest(texts, share):
    """The texts of the lowest hashes, as many as the share says."""
    return set(sorted(texts, key=split_hash)[: max(1, round(share * len(texts)))])


def held(folder, **sections):
    documents, ledger = stored(folder, **sections)
    return [each.text for each in documents if each.split == "validation"], documents, ledger


def test_the_split_of_a_text_is_what_it_always_was():
    """Held-out texts stay the same ones over versions: these are those of the first."""
    assert [number for number in range(60) if is_held_out(split_hash(f"text {number}"), 0.1)] == [0, 7, 12, 24, 45, 55]


def test_a_share_that_catches_no_document_holds_out_those_of_the_lowest_hashes(tmp_path):
    lines = [f"line {number}" for number in range(1000)]
    none = [line for line in lines if not is_held_out(split_hash(line), 0.05)][:90]
    for count, share in ((90, 0.05), (90, 0.001), (2, 0.05)):
        file = written(tmp_path, f"{count}.txt", "\n".join(none[:count]))
        data = {"sources": [{"path": str(file), "document": "line"}], "validation": share}
        texts, documents, ledger = held(tmp_path, data=data)
        assert set(texts) == smallest(none[:count], share)
        assert len(documents) == count == ledger["documents"]["kept"]
        assert ledger["parts"]["validation"]["documents"] == len(texts) == ledger["samples"]["validation"]
        (note,) = ledger["notes"]
        assert f"{share:g} catches none of the {count} documents" in note
    caught = next(line for line in lines if is_held_out(split_hash(line), 0.05))
    file = written(tmp_path, "caught.txt", "\n".join([*none, caught]))
    texts, _, ledger = held(tmp_path, data={"sources": [{"path": str(file), "document": "line"}], "validation": 0.05})
    assert (texts, ledger["notes"]) == ([caught], [])


@pytest.mark.ci
@pytest.mark.processes
def test_a_start_that_is_killed_while_it_holds_out_goes_on(tmp_path, monkeypatch):
    """Wherever it stops, the next start makes the same: also of `rows`, whose one long text stays cut."""
    lines = [f"line {number}" for number in range(400)]
    none = [line for line in lines if not is_held_out(split_hash(line), 0.05)][:90]
    file = written(tmp_path, "lines.txt", "\n".join(none))
    sections = {"data": {"sources": [{"path": str(file), "document": "line", "rows": "[:60]"}], "validation": 0.05}}
    expected = held(tmp_path / "whole", **sections)[0]
    for name in ("tokenizer", "text", "held-out.json"):

        def kill(path, *rest, real, name=name, **options):
            if path.name == name and path.parent.suffix == ".parts":
                raise KeyboardInterrupt
            return real(path, *rest, **options)

        with monkeypatch.context() as patch:
            patch.setattr(workspace, "write_file", partial(kill, real=workspace.write_file))
            patch.setattr(workspace, "discard", partial(kill, real=workspace.discard))
            with pytest.raises(KeyboardInterrupt):
                held(tmp_path / name, **sections)
        assert held(tmp_path / name, **sections)[0] == expected


def test_a_text_of_rows_is_cut_as_it_was_planned(tmp_path):
    """Though more is held out in the second reading, so that the text would be no longer than that."""
    file = written(tmp_path, "long.txt", "\n".join(f"line {number}" for number in range(20_000)))
    other = written(tmp_path, "other.txt", file.read_text() * 2)
    sources = [SourceConfig(path=[str(file)], rows="[:]"), SourceConfig(path=[str(other)])]
    data = DataConfig(sources=sources, validation=0.01)
    assert len(list(read_shard(input_shards(data)[0], data.model_copy(update={"validation": 0.9})))) > 5


def test_what_is_held_out_is_as_if_the_larger_share_had_been_asked_for(tmp_path):
    """Duplicates and near-duplicates do not count, the tokenizer does not see it, and the note is told."""
    lines = [f"these are some words of the line of number {number}" for number in range(1000)]
    none = [line for line in lines if not is_held_out(split_hash(line), 0.05)][:12]
    file = written(tmp_path, "a.txt", "\n".join([*none, *none, ""]))
    data = {"sources": [{"path": str(file), "document": "line"}], "validation": 0.05}
    sections = {"tokenizer": {"train": {"vocab": 270}}, "prepare": {"part": 100}}
    news = logged()
    made = prepare(run_of(tmp_path, data={**data, "store": str(tmp_path / "one")}, **sections))
    assert sum("catches none of the 12 documents" in line for line in news) == 1
    first, second = (place for place, line in enumerate(news) if line == "turning text into tokens")
    assert any("reading the text again" in line for line in news[first:second])
    assert made.ledger()["parts"]["validation"]["documents"] == 1
    (lowest,) = smallest(none, 0.05)
    share = (split_hash(lowest) + 2**40) / 2**64
    asked = prepare(run_of(tmp_path, data={**data, "validation": share, "store": str(tmp_path / "two")}, **sections))
    stores = [prepared.open() for prepared in (made, asked)]
    assert stores[0].manifest["tokenizer"] == stores[1].manifest["tokenizer"]
    assert [[ids.tolist() for _, ids in store.validation.iter_samples()] for store in stores] == [
        [[*next(made.tokenizer().encode([lowest])), made.tokenizer().end_id]]
    ] * 2
    assert [[origin for origin, _ in store.train.iter_samples()] for store in stores] == [
        [f"{file}:{number}" for number, line in enumerate(none, 1) if line != lowest]
    ] * 2


def test_validation_texts_that_give_no_sample_are_told_by_reason(tmp_path):
    """They are texts of their own: that "all documents are of one group" is no word for it."""
    train = {"path": str(rows_of(tmp_path, talks(40), "train.jsonl")), "format": "chat"}
    long = [
        {"messages": [message("user", f"{number} " + "word " * 300), message("assistant", "yes")]}
        for number in range(3)
    ]
    data = {"sources": [train], "validation": str(rows_of(tmp_path, long, "held.jsonl")), "block": 128}
    with pytest.raises(InputError, match=r"no sample could be made of .*held\.jsonl: 3 longer than block"):
        prepare(run_of(tmp_path, **CHAT, data=data))


def test_conversations_and_groups(tmp_path):
    """Rows of one prompt fall into one part, also then; the hint speaks of what there is."""
    free = [row for row in talks(400) if not is_held_out(split_hash(row["messages"][0]["content"]), 0.05)][:90]
    source = {"path": str(rows_of(tmp_path, free)), "format": "chat"}
    prepared = prepare(run_of(tmp_path, **CHAT, data={"sources": [source], "validation": 0.05, "block": 128}))
    assert prepared.open().validation.samples == 4
    same = [{"messages": [message("user", "who?"), message("assistant", f"me {number}")]} for number in range(9)]
    for rows, what in ((same, "9 documents are in one group"), (same[:1], "the only document")):
        source = {"path": str(rows_of(tmp_path, rows, "same.jsonl")), "format": "chat"}
        share = 0.05 if not is_held_out(split_hash("who?"), 0.05) else split_hash("who?") / 2**65
        with pytest.raises(InputError) as refused:
            prepare(run_of(tmp_path, **CHAT, data={"sources": [source], "validation": share, "block": 128}))
        (problem,) = refused.value.problems
        assert what in problem.what
        assert "give more conversations" in problem.fix
        assert "paragraph" not in problem.fix


@pytest.mark.parametrize(
    ("document", "advice"), [("paragraph", "document=line"), ("auto", "document=paragraph, or line")]
)
def test_a_short_text_that_is_one_document_is_told_how_it_is_cut(tmp_path, document, advice):
    """A paragraph a line, none empty: cut by paragraphs it stays one document."""
    file = written(tmp_path, "lines.txt", "".join(f"line {number} of some words\n" for number in range(60)))
    source = {"path": str(file), "document": document}
    with pytest.raises(InputError) as refused:
        prepare(run_of(tmp_path, data={"sources": [source], "validation": 1e-9}))
    assert [f"data.sources.0.{advice}" in problem.fix for problem in refused.value.problems] == [True]
    source["document"] = "line"
    assert prepare(run_of(tmp_path, data={"sources": [source], "validation": 1e-9})).open().validation.samples


_LINES = "words of a novel and more of them, line upon line\n" * 12
NOVEL = "\n\n".join(f"{number}. {_LINES}The end." for number in range(160))


def test_one_long_text_is_cut_so_that_a_share_of_it_is_held_out(tmp_path):
    file = written(tmp_path, "novel.txt", NOVEL)
    texts, documents, ledger = held(tmp_path, data={"sources": [{"path": str(file)}], "validation": 0.05})
    assert len(texts) >= 1
    in_order = sorted(documents, key=lambda each: int(each.origin.rpartition(":")[2]))
    assert "\n\n".join(each.text for each in in_order) == NOVEL
    assert all(4000 <= len(each.text) + 2 <= 4700 for each in in_order[:-1])
    assert all(each.text.split(".")[0].isdigit() for each in in_order)  # each begins with a paragraph
    assert [note for note in ledger["notes"] if "novel.txt" in note and "document: auto" in note]


@pytest.mark.parametrize(
    ("files", "settings", "cut"),
    [
        ({"a.txt": 30_000}, {}, ["a.txt"]),
        ({"a.txt": 19_000}, {}, []),  # short
        ({"a.txt": 30_000}, {"validation": 0.0}, []),  # nothing is to be held out
        ({"a.txt": 30_000}, {"validation": "b.txt"}, []),
        ({"a.txt": 30_000}, {"document": "file"}, []),
        ({"a.txt": 30_000}, {"document": "paragraph"}, []),
        ({"a.txt": 30_000, "b.txt": 30_000}, {}, ["a.txt", "b.txt"]),
        ({"a.txt": 30_000, **{f"{number}.txt": 30_000 for number in range(30)}}, {}, []),  # enough to choose from
        ({"a.txt": 90_000, **{f"{number}.txt": 25_000 for number in range(50)}}, {}, ["a.txt"]),
        ({"a.jsonl": 30_000, "b.html": 30_000}, {}, []),
    ],
)
def test_which_texts_are_long(tmp_path, files, settings, cut):
    for name, size in {"b.txt": 10, **files}.items():
        written(tmp_path, name, "x" * size)
    source = {"path": list(files), **({"document": settings["document"]} if "document" in settings else {})}
    run = run_of(tmp_path, data={"sources": [source], "validation": settings.get("validation", 0.05)})
    long = [each.path for _, _, inputs in list_all_inputs(run.data) for each in inputs if each.is_cut]
    assert long == cut


def test_a_text_without_blank_lines_is_cut_at_line_ends_and_rows_count_its_documents(tmp_path):
    lines = "".join(f"line {number:04d} of some words, with no blank line anywhere\n" for number in range(800))
    file = written(tmp_path, "lines.txt", lines)
    source = {"path": str(file)}
    data = {"sources": [source], "validation": 0.2}
    _, documents, _ = held(tmp_path, data=data)
    assert sorted(len(each.text) for each in documents)[1:] == [8002] * 5
    source["rows"] = "[1:3]"
    _, documents, ledger = held(tmp_path, data=data)
    assert ledger["documents"]["read"] == 2
    assert len(ledger["notes"]) >= 1


def test_a_novel_is_prepared_and_told_of_in_the_run_and_again(tmp_path):
    """The ledger lies in the run's folder, the notes are told each time, no Python stands in what people read."""
    written(tmp_path, "novel.txt", NOVEL + "\n\n" + NOVEL[:5000])
    rows = talks(400)
    rows[5:8] = ["{oops", "{oops", "{oops"]
    source = {"path": str(rows_of(tmp_path, [*rows, rows[0]])), "format": "chat"}
    run = write_run(
        tmp_path / "run.yaml",
        TEXT_ALONE,
        tokenizer={"train": {"vocab": 260}},
        data={"sources": [{"path": str(tmp_path / "novel.txt")}]},
    )
    says = "novel.txt is cut into pieces of about 4,000 characters"
    for _ in range(2):
        done = succeed("prepare", run)
        assert done.stderr.count(says) == 1
        assert not any(sign in done.stderr for sign in ("{", "nothing was encoded"))
    ledger = from_json(json.loads((run.with_suffix("") / "ledger.json").read_text()))
    assert any(says in note for note in ledger["notes"])

    talk = run_of(tmp_path, objective="chat", tokenizer={"train": {"vocab": 264}}, data={"sources": [source]})
    messages = logged()
    prepared = prepare(talk)
    says = (
        "3 of 401 records (0.75%) cannot be used; each is listed in rejected.jsonl of the run's folder, the "
        f"first: {tmp_path}/a.jsonl:6: "
    )
    assert "\n".join(messages).count(says) == 1
    assert any(says in note for note in prepared.notes())
    assert "401 documents read, 397 kept, 4 dropped (3 bad json, 1 duplicate)" in prepared.summary()
