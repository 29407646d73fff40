"""Files on S3 and on the hub: fetched once, whole, and read as files here are."""

import json
import lzma
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from artel.config import DataConfig, SourceConfig
from artel.config.converters.hub_data import local_or_hub
from artel.errors import InputError, WorkError
from artel.storage import fetch_remote, list_remote
from artel.text import source_fingerprint
from artel.text.records import Record
from support.reading import checked, items, read_texts
from support.servers import LINES, TEXTS, sample_parquet
from support.waiting import LIMIT

pytest_plugins = ["support.services"]

# S3


@pytest.mark.slow
def test_s3_objects_and_globs_are_read_as_files_are(bucket, tmp_path):
    bucket.put_object(Bucket="texts", Key="a/deep/3.parquet", Body=sample_parquet())
    cut = LINES[:2000].rfind(b"\n") + 1
    bucket.put_object(Bucket="texts", Key="a/1.jsonl.zst", Body=zstandard.compress(LINES[:cut]))
    bucket.put_object(Bucket="texts", Key="a/2.jsonl.xz", Body=lzma.compress(LINES[cut:]))
    texts, ledger = read_texts("s3://texts/a/*.jsonl*")
    assert texts == TEXTS
    assert list(ledger["sets"]) == ["s3://texts/a/*.jsonl*"]
    assert items("s3://texts/a/1.jsonl.zst")[0].origin == "s3://texts/a/1.jsonl.zst:1"
    assert items("s3://texts/**/*.parquet")[3] == Record(
        TEXTS[3], "s3://texts/a/deep/3.parquet[3]", "s3://texts/**/*.parquet"
    )
    assert not [path for path in (tmp_path / "cache").rglob("*") if ".partial-" in path.name]


@pytest.mark.slow
def test_s3_objects_are_fetched_once_and_anew_when_they_change(bucket, tmp_path):
    data = DataConfig(sources=[SourceConfig(path=["s3://texts/a.txt"])])
    bucket.put_object(Bucket="texts", Key="a.txt", Body=b"one")
    assert read_texts("s3://texts/a.txt")[0] == ["one"]
    (body,) = (tmp_path / "cache").rglob("body")
    before, inode = source_fingerprint(data), body.stat().st_ino
    assert read_texts("s3://texts/a.txt")[0] == ["one"]
    assert body.stat().st_ino == inode
    shutil.rmtree(body.parent)
    assert source_fingerprint(data) == before  # fetched anew, it is the same
    bucket.put_object(Bucket="texts", Key="a.txt", Body=b"two")
    assert read_texts("s3://texts/a.txt")[0] == ["two"]
    assert source_fingerprint(data) != before


def test_an_s3_object_that_changes_after_it_was_listed_is_not_taken(bucket, tmp_path):
    bucket.put_object(Bucket="texts", Key="a.txt", Body=b"one")
    (listed,) = list_remote("s3://texts/a.txt")
    bucket.put_object(Bucket="texts", Key="a.txt", Body=b"two, and longer")
    with pytest.raises(WorkError, match=r"s3://texts/a\.txt: changed while it was fetched"):
        fetch_remote(listed, tmp_path / "remote")
    assert [path.name for path in (tmp_path / "remote").rglob("*")] == ["unfinished"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("s3://texts/none.jsonl", r"s3://texts/none\.jsonl: there is no such file\n.*s3://BUCKET/KEY"),
        ("s3://no-such-bucket/a.jsonl", "there is no bucket no-such-bucket"),
        ("s3://no-such-bucket/*.jsonl", "no file matches|there is no bucket"),
        ("s3://texts/*.none", "no file matches"),
        ("s3://texts/a", r"is a folder\n.*write a glob: s3://texts/a/\*"),
        ("s3://texts", "is a folder"),
        ("s3://", "s3://"),
        ("s3://A_/x", "s3://A_/x"),
        ("s3://texts/a/b.pdf", r"b\.pdf is not text\n.*pdftotext"),
        ("s3://texts/a/b.csv", r"b\.csv is a table"),
    ],
)
def test_s3_addresses_that_lead_nowhere(bucket, path, said):
    bucket.put_object(Bucket="texts", Key="a/b.pdf", Body=b"x")
    bucket.put_object(Bucket="texts", Key="a/b.csv", Body=b"x")
    with pytest.raises(InputError, match=said) as caught:
        checked(path)
    assert all(problem.where.startswith("data.sources.0") and problem.fix for problem in caught.value.problems)


def test_s3_without_keys_and_without_a_server(bucket, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(InputError, match=r"no keys are found(.|\n)*AWS_ACCESS_KEY_ID"):
        checked("s3://texts/a.txt")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(WorkError, match=r"s3://texts/a\.txt: cannot be reached(.|\n)*AWS_ENDPOINT_URL"):
        checked("s3://texts/a.txt")


# The hub


def on_the_hub(address: str, cache: Path, *paths: str, **environment: str) -> list:
    """Texts, or the error instead, of each path, read by another process: the hub's address is read at import."""
    program = """
import json, sys
from artel.config import DataConfig, SourceConfig
from artel.errors import ArtelError, InputError
from artel.text import check_sources, input_shards
from artel.text.sources.inputs import read_shard
results = []
for path in sys.argv[1:]:
    data = DataConfig(sources=[SourceConfig(path=[path])])
    try:
        check_sources(data)
        results.append([[item.text, item.origin] for part in input_shards(data)
                     for item in read_shard(part, data)])
    except ArtelError as error:
        results.append(f"{'InputError' if isinstance(error, InputError) else 'WorkError'} {error}")
print(json.dumps(results))
"""
    ours = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache / "hf"), "ARTEL_CACHE": str(cache),
            "no_proxy": "127.0.0.1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, *paths], env=os.environ | ours | environment, capture_output=True,
        text=True, check=False, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_files_on_the_hub(hub, tmp_path):
    home = "hf://datasets/me/texts"
    one, glob, readme, everything, none, folder, nobody, secret, nonsense = on_the_hub(
        hub, tmp_path, f"{home}/data/1.jsonl", f"{home}/data/*.parquet", f"{home}/README.md", f"{home}/**",
        f"{home}/none.txt", f"{home}/data", "hf://datasets/me/none/a.txt", "hf://datasets/me/secret/a.txt", "hf://datasets",
    )  # fmt: skip
    assert one == [[TEXTS[0], f"{home}/data/1.jsonl:1"]]
    assert glob == [[text, f"{home}/data/2.parquet[{row}]"] for row, text in enumerate(TEXTS[:50])]
    assert readme == [["# Texts\n", f"{home}/README.md"]]
    assert len(everything) == 52
    for output in (none, nobody):
        assert "InputError data.sources.0.path: hf://datasets/me" in output
        assert "there is no such file" in output
    assert f"is a folder\n    write a glob: {home}/data/*" in folder
    assert "may not be read" in secret
    assert "hf auth login" in secret
    assert nonsense.startswith("InputError")


def test_a_data_set_by_its_name_in_another_tool(hub, tmp_path):
    """`artel config convert` names the hub's own parquet files of a data set, and these are read."""
    path = local_or_hub("me/texts", "data", "*").path.replace("/*/*", "/*")
    assert path == "hf://datasets/me/texts@refs/convert/parquet/data/*.parquet"
    (rows,) = on_the_hub(hub, tmp_path, path)
    assert [text for text, _ in rows] == TEXTS[:50]


@pytest.mark.slow
def test_the_hub_offline_and_out_of_reach(tmp_path):
    path = "hf://datasets/me/texts/a.txt"
    (output,) = on_the_hub("http://127.0.0.1:9", tmp_path, path, HF_HUB_OFFLINE="1")
    assert output.startswith(f"InputError data.sources.0.path: {path}: is on the hub, but HF_HUB_OFFLINE is set")
    assert "use the folder" in output
    (output,) = on_the_hub("http://127.0.0.1:9", tmp_path, path)
    assert output.startswith(f"WorkError {path}: cannot be reached: ")
    assert "HF_ENDPOINT" in output
