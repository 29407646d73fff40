"""Paths of texts: links that go round, what is no file, and input and output that lie in one another."""

import json
import os
import socket
from pathlib import Path

import pytest

from artel.config import DataConfig
from artel.config.load import run_from
from artel.errors import InputError
from artel.preparing import check_texts, prepare, refuse_overlaps
from artel.preparing.prepare import store_key
from artel.text import check_sources, unread_files, unread_notes
from support.reading import checked, items, message, read_texts, written
from support.runs import artel
from support.stores import run_of, stored


def texts(folder: Path) -> Path:
    """A folder of two texts."""
    (folder / "texts" / "deep").mkdir(parents=True)
    written(folder, "texts/one.txt", "one")
    written(folder, "texts/deep/two.txt", "two")
    return folder / "texts"


@pytest.mark.parametrize("pattern", ["texts", "texts/**/*.txt", "texts/**", "texts/../texts/**/*.txt"])
def test_each_file_is_read_once_whatever_links_there_are(tmp_path, pattern):
    # Links lead to absolute paths: a relative one counts from the folder of the link.
    folder = texts(tmp_path)
    for name in ("deep/up", "deep/again", "round"):  # together they make 3 ** 40 paths
        (folder / name).symlink_to(folder)
    (tmp_path / "elsewhere").mkdir()
    written(tmp_path, "elsewhere/three.txt", "three")
    (folder / "out").symlink_to(tmp_path / "elsewhere")
    (folder / "1.txt").symlink_to(folder / "one.txt")  # the file itself is read, not the link, though that sorts first
    (folder / "broken.txt").symlink_to(tmp_path / "nowhere")
    (folder / "itself.txt").symlink_to("itself.txt")
    written(tmp_path, "beside.txt", "beside")
    for name, to in (("parent", tmp_path), ("all", "/")):
        (folder / name).symlink_to(to)
    records = items(pattern)
    assert sorted(item.text for item in records) == ["one", "three", "two"]
    assert not any(item.origin.endswith("1.txt") for item in records)


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    """By suffix and count in a note, each in the ledger; what nobody misses (hidden files, README) is passed over."""
    folder = texts(tmp_path)
    for name in ("a.epub", "b.EPUB", "c.zip", "t.csv.gz", "notes", ".DS_Store", "README", "LICENSE", "x.txt~"):
        written(folder, name, "x")
    (folder / ".git").mkdir()
    written(folder, ".git/HEAD", "x")
    data = {"sources": [{"path": str(folder)}], "validation": 0.0}
    (note,) = unread_notes(unread_files(DataConfig.model_validate(data)))
    assert note.startswith(f"{folder}: not read: 2 .epub, 1 .zip, 1 without a suffix, 1 .csv.gz; auto reads .text .md")
    assert note.endswith("to read .epub files, convert it with pandoc")
    _, ledger = stored(tmp_path, data=data)
    assert note in ledger["notes"]
    assert [Path(name).name for name in ledger["not_read"]] == ["a.epub", "b.EPUB", "c.zip", "notes", "t.csv.gz"]
    assert ledger["documents"]["read"] == 2
    data["sources"][0]["format"] = "chat"
    with pytest.raises(InputError, match=r"holds no file with .*, but 2 \.epub, 2 \.txt"):
        check_sources(DataConfig.model_validate(data))


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"sources": [{"path": ""}]}, r"data\.sources\.0\.path\.0"),
        ({"sources": [{"path": ["a.txt", " "]}]}, r"data\.sources\.0\.path\.1"),
        ({"sources": [{"path": "a.txt"}], "validation": ""}, r"data\.validation"),
    ],
)
def test_an_empty_path_is_not_the_working_folder(data, key):
    with pytest.raises(InputError, match=f"{key}: an empty path names nothing"):
        run_from({"data": data}, {}, {(): "run.yaml"})


def test_globs_match_what_they_matched():
    for name in ("a.txt", ".hidden.txt", "b/c.txt", "b/.d/e.txt", ".f/g.txt", "b/h/i.txt", "b/h/j.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        written(Path(), name, name)
    expected = {
        "*.txt": ["a.txt"], "**/*.txt": ["a.txt", "b/c.txt", "b/h/i.txt"], "**/h/*": ["b/h/i.txt", "b/h/j.md"],
        "b/**": ["b/c.txt", "b/h/i.txt", "b/h/j.md"], "**/.d/*.txt": ["b/.d/e.txt"], "*/c.txt": ["b/c.txt"],
        "b/**/**/i.*": ["b/h/i.txt"], ".f/**/*.txt": [".f/g.txt"], "[ab]/*.txt": ["b/c.txt"],
    }  # fmt: skip
    for pattern, names in expected.items():
        assert sorted(item.text for item in items(pattern)) == sorted(names), pattern


def test_only_regular_files_are_read():
    os.mkfifo("pipe.txt")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.txt")  # a socket's name has 108 bytes at most
        Path("link.txt").symlink_to("pipe.txt")
        kinds = {
            "pipe.txt": "a named pipe", "link.txt": "a named pipe", "socket.txt": "a socket",
            "/dev/zero": "a device", "/dev/tty": "a device",
            "/proc/self/maps": "made up by the kernel", "/proc/kmsg": "made up by the kernel",
        }  # fmt: skip
        for path, kind in kinds.items():
            if os.path.lexists(path) and os.access(path, os.R_OK):
                for source in ({}, {"document": "line"}, {"format": "jsonl"}, {"format": "csv"}, {"format": "parquet"}):
                    with pytest.raises(InputError, match=f"is {kind}, not a regular file"):
                        checked(path, **source)
    written(Path(), "empty.txt", "")  # has no bytes either, and is a file
    written(Path(), "good.txt", "good")
    assert read_texts("*.txt")[0] == ["good"]


def test_homes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path, "a.txt", "a")
    template = written(tmp_path, "a.jinja", "{{ messages }}")
    assert read_texts("~/a.txt")[0] == ["a"]
    written(tmp_path, "a.jsonl", json.dumps({"messages": [message("user", "a"), message("assistant", "b")]}))
    talks = {"sources": [{"path": "~/a.jsonl", "format": "chat"}]}
    chat = {"objective": "chat", "chat": {"template": "~/a.jinja"}, "data": talks}
    before = store_key(run_of(tmp_path, **chat))
    template.write_text("{{ messages[0] }}")
    assert store_key(run_of(tmp_path, **chat)) != before
    pairs = {"path": "~/a.txt", "format": "pairs", "outputs": "~nosuchuser/b"}
    for where, sections in {
        "data.sources.0.path": {"data": {"sources": [{"path": "~nosuchuser/b"}]}},
        "data.validation": {"data": {"sources": [{"path": "~/a.txt"}], "validation": "~nosuchuser/b"}},
        "data.sources.0.outputs": {"data": {"sources": [pairs]}, "objective": "masked"},
        "chat.template": {**chat, "chat": {"template": "~nosuchuser/b"}},
    }.items():
        with pytest.raises(InputError, match=rf"^{where}: ~nosuchuser/b: there is no such home folder"):
            prepare(run_of(tmp_path, **sections))


OVERLAPS = {
    "store in the folder of texts": ({"data": {"store": "texts/stores"}}, "data.store", "texts/stores"),
    "run in the folder of texts": ({"run": "texts/runs/a"}, "run", "texts/runs/a"),
    "run through a link": ({"run": "link/a"}, "run", "texts/a"),
    "store in what ** reaches": (
        {"data": {"sources": [{"path": "**/*.txt"}], "store": "stores"}}, "data.store", "stores",
    ),
    "run in what * reaches": ({"data": {"sources": [{"path": "*/*.jsonl"}]}, "run": "texts"}, "run", "texts"),
    "run among validation texts": ({"data": {"validation": "texts"}, "run": "texts/r"}, "run", "texts/r"),
    "text in the run's folder": (
        {"data": {"sources": [{"path": "texts/one.txt"}]}, "run": "texts"}, "data.sources.0.path", "texts/one.txt",
    ),
    "text in the folder of stores": (
        {"data": {"sources": [{"path": "texts/one.txt"}], "store": "."}}, "data.sources.0.path", "texts/one.txt",
    ),
    "run is the text": ({"data": {"sources": [{"path": "texts/one.txt"}]}, "run": "texts/one.txt"},
                        "data.sources.0.path", "texts/one.txt"),
    "outputs of pairs in the run's folder": (
        {"data": {"sources": [{"path": "texts/one.txt", "format": "pairs", "outputs": "runs/out.txt"}]}, "run": "runs",
         "objective": "masked"},
        "data.sources.0.outputs", "runs/out.txt",
    ),
    "model in the run's folder": ({"model": {"from": "texts"}, "run": "."}, "model.from", "texts"),
}  # fmt: skip


@pytest.mark.parametrize("case", OVERLAPS)
def test_output_in_input_and_input_in_output_are_refused(tmp_path, case):
    texts(tmp_path)
    written(tmp_path, "texts/a.jsonl", '{"text": "a"}')
    (tmp_path / "link").symlink_to(tmp_path / "texts")
    changes, where, path = OVERLAPS[case]
    data = {"sources": [{"path": "texts"}], "store": "stores", **changes.get("data", {})}
    run = run_of(tmp_path, **{"run": "runs/a", **changes, "data": data})
    before = sorted(tmp_path.rglob("*"))
    for check in (check_texts, prepare):
        with pytest.raises(InputError) as caught:
            check(run)
        own = [problem for problem in caught.value.problems if problem.where == where and "really" in problem.what]
        assert own
        assert str(tmp_path / path) in own[0].what
    assert sorted(tmp_path.rglob("*")) == before


def test_what_lies_beside_one_another_is_not_refused(tmp_path):
    texts(tmp_path)
    written(tmp_path, "a.txt", "a")
    for path in ("*.txt", "texts/*.txt", "texts/one.txt", "{stdlib}/this.py", "tex*/*/*.txt"):
        check_texts(run_of(tmp_path, run="runs/a", data={"sources": [{"path": path}], "store": "stores"}))
    prepared = prepare(run_of(tmp_path, data={"sources": [{"path": "texts"}]}))
    tokenizer = {"from": str(prepared.folder / "tokenizer")}  # what artel made may lie among the stores
    check_texts(run_of(tmp_path, data={"sources": [{"path": "texts"}]}, tokenizer=tokenizer))
    refused = "run: the folder .* lies in .*from_store"
    tree = {"run": str(prepared.folder / "run"), "data": {"from_store": str(prepared.folder)}}
    with pytest.raises(InputError, match=refused):
        check_texts(run_from(tree, {}, {(): "run.yaml"}))
    run = run_of(tmp_path, data={"sources": [{"path": "texts"}]})
    refuse_overlaps(run, [("DIR", Path("exported"))])
    with pytest.raises(InputError, match=r"DIR: the folder texts/exported \(really .*\) lies in texts"):
        refuse_overlaps(run, [("DIR", Path("texts/exported"))])


def test_a_cache_among_the_texts_is_refused(tmp_path):
    texts(Path())
    run = written(Path(), "run.yaml", "run: run\ndata: {sources: [{path: texts}]}\n")
    done = artel("prepare", run, env={"ARTEL_CACHE": "texts/cache"})
    assert done.returncode == 2
    assert f"ARTEL_CACHE: the folder texts/cache (really {tmp_path}/texts/cache) lies in texts" in done.stderr
    assert not Path("texts/cache").exists()


def test_text_that_belongs_to_no_run_may_lie_in_the_working_folder(tmp_path):
    written(tmp_path, "a.txt", "a")
    check_texts(run_of(tmp_path, run="", data={"sources": [{"path": "a.txt"}]}))
