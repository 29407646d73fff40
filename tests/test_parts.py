"""A store comes out the same, byte for byte, however its text is cut into parts, by any number of processes, and
after any kill; and what it holds of each set adds up."""

import json
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import zstandard

from artel.config import dump_run
from artel.errors import InputError, WorkError
from artel.preparing import prepare
from artel.preparing.selection import Selection
from artel.preparing.selection_rules import uniform_numbers
from artel.text.dedup.exact import DIGEST, find_repeated
from support.messages import logged
from support.runs import kill, start
from support.servers import Relay
from support.stores import lines_with_repeats, run_of, stored, tree
from support.waiting import wait_until

pytest_plugins = ["support.services"]


@pytest.fixture
def everything(tmp_path):
    """A run with every stage: several sources, repeated lines, near-duplicates, weights, budgets, given validation."""
    (tmp_path / "a.jsonl").write_text(lines_with_repeats(400, 1))
    for name, numbers in (("b.txt", range(500)), ("b2.txt", range(400, 700))):
        (tmp_path / name).write_text("\n".join(f"строка номер {number} и ещё немного слов" for number in numbers))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines_with_repeats(50, 1).encode()))
    (tmp_path / "held.jsonl").write_text(lines_with_repeats(20, 1))

    def run(folder, **changes):
        fields = {"set_field": "set", "field": "text"}
        data = {
            "sources": [
                {"path": str(tmp_path / "a.jsonl"), **fields, "weight": {"set 0": 2.5, "set 1": 0.5}},
                {"path": str(tmp_path / "b*.txt"), "document": "line", "budget_bytes": "15k", "name": "lines"},
                {"path": str(tmp_path / "c.jsonl.zst"), **fields, "weight": 3, "budget_bytes": "10k"},
            ],
            "validation": str(tmp_path / "held.jsonl"),
            "max_bad": 0.1,
            "dedup": {"lines": "line", "near": {"threshold": 0.7}},
        }
        tokenizer = {"train": {"vocab": 400}}
        return run_of(folder, data={**data, **changes.pop("data", {})}, tokenizer=tokenizer, **changes)

    return run


@pytest.mark.ci
@pytest.mark.processes
def test_parts_and_processes_do_not_show(tmp_path, everything, monkeypatch):
    monkeypatch.setattr("artel.preparing.selection.Selection", partial(Selection, shard_tokens=3000))
    made = {}
    for part, workers in (("1G", 1), (3000, 1), (2000, 2), (20_000, 4)):
        folder = tmp_path / f"{part}-{workers}"
        prepared = prepare(everything(folder, prepare={"part": part, "workers": workers}))
        made[part, workers] = tree(prepared.folder)
        name = prepared.folder.name
        assert sorted(path.name for path in (folder / "stores").iterdir()) == [name, f"{name}.lock"]
    assert len(set(made.values())) == 1, made
    store, ledger = prepared.open(), prepared.ledger()
    store.verify()
    assert len(store.manifest["parts"]["train"]["shards"]) > 3
    dropped = ledger["documents"]["dropped"]
    reasons = {"duplicate", "near_duplicate", "near_validation", "repeated", "bad_json", "no_text", "weight", "budget"}
    assert reasons <= dropped.keys()
    assert ledger["documents"]["read"] == ledger["documents"]["kept"] + sum(dropped.values())
    for part in ("train", "validation"):
        of_sets = [entry[part] for entry in ledger["sets"].values()]
        for name in ("documents", "bytes", "tokens", "samples"):
            assert sum(entry.get(name, 0) for entry in of_sets) == ledger["parts"][part][name]
        assert ledger["parts"][part]["tokens"] == getattr(store, part).tokens
        assert ledger["parts"][part]["documents"] == getattr(store, part).documents
    rejected = [json.loads(line) for line in (folder / "run" / "rejected.jsonl").read_text().splitlines()]
    assert Counter(entry["reason"] for entry in rejected) == {name: dropped[name] for name in ("bad_json", "no_text")}
    a = str(tmp_path / "a.jsonl")
    assert [entry["origin"] for entry in rejected if entry["origin"].startswith(a)] == [f"{a}:8", f"{a}:201"]


def test_origins_are_counted_in_the_whole_file(tmp_path):
    texts = [f"document {number} " + "x" * (1 + number % 50) for number in range(300)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    sources = [{"path": str(tmp_path / "a.txt"), "document": "line"}]
    documents, _ = stored(tmp_path, data={"sources": sources}, prepare={"part": 500})
    assert [document[:2] for document in documents] == [
        (f"{tmp_path}/a.txt:{2 * number + 1}", text) for number, text in enumerate(texts)
    ]


@pytest.mark.ci
@pytest.mark.processes
def test_a_killed_prepare_goes_on_and_ends_the_same(tmp_path, everything):
    expected = tree(prepare(everything(tmp_path / "whole")).folder)
    run = everything(tmp_path / "killed", prepare={"part": 2000, "workers": 2})
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(run))
    parts = tmp_path / "killed" / "stores"
    seen = []
    for finished in (1, 12, 40):  # so many finished parts at the least when it is killed
        process = start("prepare", file)
        wait_until(
            lambda: len(list(parts.glob("*.parts/text/0*"))) >= finished or process.poll() is not None  # noqa: B023
        )
        kill(process)
        seen.append({path.name: path.stat().st_ino for path in parts.glob("*.parts/text/0*")})
        assert not [path for path in parts.glob("*/manifest.json") if not path.parent.name.startswith(".")]
    assert seen[0].items() <= seen[1].items() <= seen[2].items()  # what was finished was not made again
    assert tree(prepare(run).folder) == expected


def test_an_error_in_a_worker_is_told_as_in_one_process(tmp_path):
    lines = [json.dumps({"text": "word " * (500 if number == 70 else 5)}) for number in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for workers in (1, 3):
        data = {"sources": [{"path": str(tmp_path / "a.jsonl")}], "max_document": 1000}
        with pytest.raises(InputError, match=r"the line is over 1,000 bytes"):
            prepare(run_of(tmp_path / f"{workers}", data=data, prepare={"part": 500, "workers": workers}))


@pytest.mark.ci
@pytest.mark.processes
def test_a_worker_that_is_killed_is_told(tmp_path):
    """By memory running out, as a kernel does it; the next start goes on."""
    (tmp_path / "kill_once.py").write_text(
        "import os, signal, pathlib\n"
        "def talk(row):\n"
        "    mark = pathlib.Path(__file__).with_name('killed')\n"
        "    if row['number'] == 90 and not mark.exists():\n"
        "        mark.write_text('')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [{'role': 'user', 'content': 'who?'}, {'role': 'assistant', 'content': str(row['number'])}]\n"
    )
    sources = []
    for number in range(4):
        rows = [json.dumps({"number": number * 30 + row}) for row in range(30)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(rows))
        sources.append({"path": str(tmp_path / f"{number}.jsonl"), "format": "chat", "converter": "kill_once:talk"})
    run = run_of(tmp_path, data={"sources": sources}, objective="chat", prepare={"workers": 2})
    with pytest.raises(WorkError, match=r"prepare\.workers: a process that prepares text was killed by SIGKILL"):
        prepare(run)
    assert prepare(run).open().train.documents == 120


@pytest.mark.long
def test_weights_by_set_over_the_pile(tmp_path, shared_data):
    """Every document of weight 2.5 comes two or three times, and the sums are right."""
    files = sorted((shared_data / "pile").glob("*.jsonl.zst"))
    source = {"path": [str(file) for file in files], "set_field": "auto"}
    plain, before = stored(tmp_path, data={"sources": [source]})
    of_set = {}
    for file in files:
        with zstandard.open(file, "rt", encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                of_set[f"{file}:{number}"] = json.loads(line)["meta"]["pile_set_name"]
    names = sorted(set(of_set.values()))
    weights = {names[0]: 2.5, names[1]: 0, names[2]: 0.4, names[3]: 3}
    documents, ledger = stored(tmp_path, data={"sources": [source | {"weight": weights}]})
    times = Counter(document.origin for document in documents)
    for document in plain:
        weight = weights.get(of_set[document.origin], 1)
        assert times[document.origin] in {int(weight), int(np.ceil(weight))}
    for name in names:
        entry = ledger["sets"][name]
        mine = [document for document in documents if of_set[document.origin] == name]
        assert entry["train"]["documents"] == len(mine)
        assert entry["train"]["bytes"] == sum(len(document.text.encode()) for document in mine)
        assert entry["read"] == before["sets"][name]["read"] == entry["kept"] + sum(entry["dropped"].values())
        assert entry["dropped"].get("weight", 0) == before["sets"][name]["kept"] - entry["kept"]
    assert ledger["sets"][names[1]]["kept"] == 0
    texts = [document.text for document in documents]
    assert texts[: len(set(texts))] == list(dict.fromkeys(texts))  # those that come again come after all others
    again, _ = stored(tmp_path / "seed", data={"sources": [source | {"weight": weights}]}, seed=1)
    assert Counter(document.origin for document in again) != times
    with pytest.raises(InputError, match=r"data\.sources\.0\.weight: no record has the set Books \(the sets are: .*"):
        stored(tmp_path, data={"sources": [source | {"weight": {"Books": 2}}]})


@pytest.mark.slow
def test_budgets_are_kept_to(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"a document of number {number}" for number in range(1000)))
    source = {"path": str(tmp_path / "a.txt"), "document": "line"}
    data = {"sources": [source | {"budget_bytes": 5000, "weight": 2}], "validation": 0.1}
    documents, ledger = stored(tmp_path, data=data)
    train = [document.text for document in documents if document.split == "train"]
    assert 5000 - 60 <= sum(map(len, train)) <= 5000
    assert set(Counter(train).values()) == {2}
    lines = sorted(int(text.split()[-1]) for text in set(train))
    assert lines[0] < 150 < 850 < lines[-1]  # drawn from everywhere
    assert ledger["parts"]["validation"]["documents"] == pytest.approx(100, abs=30)  # a budget is of training text


def test_chances_are_even():
    digests = np.frombuffer(random.Random(5).randbytes(16 * 100_000), DIGEST)
    drawn = uniform_numbers(digests, 7, "weight")
    counts, _ = np.histogram(drawn, bins=10, range=(0, 1))
    assert ((counts > 9_600) & (counts < 10_400)).all()
    assert abs(np.corrcoef(drawn, uniform_numbers(digests, 8, "weight"))[0, 1]) < 0.02


def test_repeated_digests_are_found_in_ranges():
    chance = random.Random(3)
    digests = [chance.randbytes(16) for _ in range(300)]
    parts = [[chance.choice(digests) for _ in range(size)] for size in (0, 500, 1, 200)]
    seen, expected = set(), []
    for digest in (digest for part in parts for digest in part):
        expected.append(digest in seen)
        seen.add(digest)
    arrays = [np.frombuffer(b"".join(part), DIGEST) for part in parts]
    for at_once in (1, 50, 10_000):
        assert find_repeated(arrays, at_once).tolist() == expected


@pytest.mark.processes
def test_from_s3_to_s3(tmp_path, bucket, s3_server, monkeypatch):
    """Sources from a real S3 server and the store to it; another machine takes the store from there."""
    for name, seed in (("one", 3), ("two", 4)):
        body = zstandard.compress(lines_with_repeats(60, seed).encode())
        bucket.put_object(Bucket="texts", Key=f"pile/{name}.jsonl.zst", Body=body)
    relay = Relay(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", relay.address)
    data = {"sources": [{"path": "s3://texts/pile/*.jsonl.zst"}], "store": "s3://texts/stores", "max_bad": 0.1}
    first = prepare(run_of(tmp_path, data=data))
    assert first.is_new
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "other"))
    second = prepare(run_of(tmp_path, data=data))
    assert (second.is_new, tree(second.folder)) == (False, tree(first.folder))
    second.open().verify()
    assert second.folder.is_relative_to(tmp_path / "other")
    relay.close()  # no network any more: none is needed to start
    messages = logged()
    third = prepare(run_of(tmp_path, data=data))
    assert (third.is_new, third.folder) == (False, second.folder)
    assert any("the listing of" in line for line in messages)  # a line of life may stand before it


@pytest.mark.slow
def test_a_store_that_may_not_be_written_is_told_first(tmp_path, bucket):
    (tmp_path / "a.txt").write_text("some text")
    data = {"sources": [{"path": str(tmp_path / "a.txt")}], "store": "s3://missing/stores"}
    with pytest.raises(InputError, match="missing"):
        prepare(run_of(tmp_path, data=data))
    assert not list(tmp_path.glob("cache/stores/*.parts"))
