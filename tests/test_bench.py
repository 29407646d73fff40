"""`artel bench prepare` prints every figure with its unit and definition; the values are not tested."""

import importlib.util
import json
import math
import sys
from itertools import islice
from pathlib import Path

import orjson
import pytest

from artel.diagnostics.bench import MEASURES, Settings, measure_prepare
from artel.diagnostics.bench.command import run
from artel.diagnostics.bench.inputs import taken
from artel.diagnostics.bench.texts import documents, pages
from artel.errors import InputError, WorkError
from artel.text import html_to_text
from support.runs import artel

ROOT = Path(__file__).parents[1]


def bench(tmp_path, *arguments, status=0, **environment):
    env = {"ARTEL_CACHE": str(tmp_path / "cache"), **environment}
    done = artel("bench", "prepare", "--rounds", "1", "--json", *arguments, env=env)
    assert done.returncode == status, done.stderr
    if status:
        return done.stderr
    assert not list((tmp_path / "cache" / "bench").iterdir())  # it leaves nothing
    told = json.loads(done.stdout)
    assert set(told["definitions"]) >= {"MB", "a core", "elapsed", "value"}
    for name, figure in told["figures"].items():
        assert figure["definition"], name
        assert "unit" in figure, name
        assert f"{name} " in done.stderr
    return told


def value(told, name):
    found = told["figures"][name]["value"]
    assert math.isfinite(found), name
    assert found > 0, name
    return found


@pytest.mark.processes
def test_each_component_alone(tmp_path):
    told = bench(tmp_path, "--size", "3M", "--only", "html,jsonl_zst,read_back")
    names = ["html", "jsonl_zst", "jsonl_zst_ascii", "read_back", "read_back_tenth", "read_back_constancy"]
    assert list(told["figures"]) == names
    assert all(value(told, name) for name in names)
    assert told["figures"]["jsonl_zst"]["records"] == told["input"]["documents"]
    assert 3_000_000 <= told["input"]["text_bytes"] < 3_100_000
    assert (told["ratio_to_peer"], told["peer"]) == (None, None)


@pytest.mark.long
def test_end_to_end_beside_the_peer(tmp_path):
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("the peer, Hugging Face datasets, is not installed")
    peer = "benchmarks/peers/run_clm.py"
    told = bench(tmp_path, "--size", "1M", "--only", "end_to_end", "--workers", "2", "--peer", str(ROOT / peer))
    variants = ["end_to_end_tokenizers"]
    if importlib.util.find_spec("fastokens") is not None:
        variants.insert(0, "end_to_end")
    elapsed = told["figures"]["peer_end_to_end"]["elapsed"][0]
    for name in variants:
        figure = told["figures"][name]
        assert figure["ratio_to_peer"] == pytest.approx(elapsed / figure["elapsed"][0])
        assert value(told, name) == pytest.approx(told["input"]["text_bytes"] / 1e6 / figure["elapsed"][0])
        assert figure["processor"][0] > 0
    assert told["ratio_to_peer"] == told["figures"][variants[0]]["ratio_to_peer"]
    assert told["peer"].endswith(peer)
    assert told["machine"]["datasets"]


@pytest.mark.long
def test_near_and_memory(tmp_path):
    """With the user's own texts, without a peer."""
    file = tmp_path / "texts.txt"
    file.write_text("\n\n".join(documents(600_000)), encoding="utf-8")
    told = bench(tmp_path, "--size", "500k", "--input", str(file), "--only", "near,memory", "--workers", "1")
    assert set(told["figures"]) == {"near", "memory_10", "memory_40", "memory_growth"}
    assert told["input"]["from"] == str(file)
    near = told["figures"]["near"]
    assert near["a_core_with_start_up"] > 0
    assert near["value"] is None or near["value"] > 0  # on so little the start-up may be all
    if sys.platform.startswith("linux"):
        assert 0.05 < value(told, "memory_10") <= told["figures"]["memory_10"]["sum_of_rss"]
        assert value(told, "memory_growth") == value(told, "memory_40") / value(told, "memory_10")


@pytest.mark.processes
def test_wrong_options_are_told_together(tmp_path):
    told = bench(tmp_path, "--only", "html,speed", "--size", "much", "--workers", "0", status=2)
    assert all(text in told for text in ("--only: measures no speed", "--size: 'much' is not a number", "--workers: 0"))
    (tmp_path / "few.jsonl").write_text('{"text": "one"}\n')
    settings = Settings(200_000, 1, 1, MEASURES, str(tmp_path / "few.jsonl"))
    with pytest.raises(InputError, match="1 documents are too few"):
        measure_prepare(settings, lambda _: None)


@pytest.mark.long
def test_the_text_is_the_same_for_a_seed_and_has_copies():
    texts = list(documents(3_000_000, seed=7))
    assert texts == list(documents(3_000_000, seed=7))
    assert texts[0] != next(documents(1, seed=8))
    assert 3_000_000 <= sum(len(text.encode()) for text in texts) < 3_200_000
    assert 0.005 < 1 - len(set(texts)) / len(texts) < 0.05
    assert all(text == text.strip() and text for text in texts)
    words = " ".join(texts).split()
    assert 0.02 < len(set(words)) / len(words) < 0.4  # neither a few sentences again and again nor noise


def test_pages_have_their_texts_in_them():
    texts = list(islice(documents(10**6), 20))
    made = list(pages(texts))
    assert sum(map(len, made)) > 2 * sum(len(text.encode()) for text in texts)
    for text, page in zip(texts, made, strict=True):
        found = html_to_text(page)
        assert "window.data" not in found
        for paragraph in text.split("\n\n"):
            assert " ".join(paragraph.split()) in found


def test_a_users_lines_are_taken_as_they_are(tmp_path):
    texts = [f"  строка {number}\r\nвторая " for number in range(300)]
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    lines = taken(tmp_path / "out.jsonl", str(file), 10**9)
    assert list(lines.texts()) == texts
    assert lines.text == sum(len(text.encode()) for text in texts)
    assert taken(tmp_path / "out.jsonl", str(file), 230 * len(texts[99].encode())).documents < 300


PEER = """
import sys
from pathlib import Path
lines, tokenizer, cache, processes = sys.argv[1:]
assert (Path(tokenizer) / "tokenizer.json").is_file()
assert processes == "1"
Path(cache).mkdir()
(Path(cache) / "copy").write_bytes(Path(lines).read_bytes())
"""


@pytest.mark.processes
def test_a_script_of_the_user_takes_part_as_peer(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    told = bench(tmp_path, "--size", "500k", "--only", "end_to_end", "--workers", "1", "--peer", str(script))
    assert told["peer"] == str(script)
    elapsed = told["figures"]["peer_end_to_end"]["elapsed"][0]
    figure = told["figures"]["end_to_end_tokenizers"]
    assert figure["ratio_to_peer"] == pytest.approx(elapsed / figure["elapsed"][0])
    assert value(told, "peer_end_to_end") == pytest.approx(told["input"]["text_bytes"] / 1e6 / elapsed)
    script.write_text("raise SystemExit('no luck')")
    told = bench(tmp_path, "--size", "500k", "--only", "end_to_end", "--workers", "1", "--peer", str(script), status=1)
    assert "no luck" in told


CHILDREN = """
import subprocess, sys, time
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
if sys.argv[1] == "child":
    held = bytearray(150_000_000)
    work(0.4)
    time.sleep(1.2)
else:
    children = [subprocess.Popen([sys.executable, __file__, "child"]) for _ in range(2)]
    if sys.argv[1] == "waits":
        for child in children: child.wait()
    else:
        import os
        for child in children: os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # nobody has waited for them
        time.sleep(3)  # time for samples of those that have ended: nothing says when one was taken
        os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are seen in /proc, which Linux has")
@pytest.mark.parametrize("kind", ["waits", "leaves"])
def test_all_processes_of_a_command_are_counted(tmp_path, kind):
    script = tmp_path / "script.py"
    script.write_text(CHILDREN)
    found = run([sys.executable, str(script), kind], {}, memory=True)
    assert found.elapsed > 1.2  # seconds that each child takes by itself
    assert found.processor > 0.75  # of two children
    assert 300_000_000 < found.memory <= found.resident < 500_000_000


def test_a_command_that_fails_is_told_with_its_last_words():
    with pytest.raises(WorkError, match="no such thing"):
        run([sys.executable, "-c", "raise SystemExit('no such thing')"], {})
