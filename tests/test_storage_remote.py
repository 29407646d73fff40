"""Listings and fetches of S3 and of the hub, over services that are cut, killed and out of reach."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from artel.errors import InputError, WorkError
from artel.storage import cache_folder, checksum, exists, fetch_remote, list_remote, read_bytes, write_bytes
from support.messages import logged
from support.servers import BODY, FILES, Relay, answering, http_server, killed_when_held

pytest_plugins = ["support.services"]

NOBODY = "http://127.0.0.1:9"


# Listings


def test_a_service_out_of_reach_says_what_it_said_last(bucket, relay, tmp_path, monkeypatch):
    messages = logged()
    for name in ("a/1.txt", "a/2.txt"):
        bucket.put_object(Bucket="texts", Key=name, Body=name.encode())
    paths = ("s3://texts/a/*.txt", "s3://texts/a/1.txt")
    listed = {path: list_remote(path) for path in paths}
    fetched = [fetch_remote(file, tmp_path / "remote") for file in listed[paths[0]]]
    assert not messages
    relay.close()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for path in paths:
        assert list_remote(path) == listed[path]
        said = r" cannot be reached; the listing of \d{4}-\d\d-\d\d \d\d:\d\d\S* is used"
        assert re.fullmatch(re.escape(path) + said, messages.pop())
    assert [fetch_remote(file, tmp_path / "remote") for file in listed[paths[0]]] == fetched
    with pytest.raises(WorkError, match="cannot be reached"):  # never listed
        list_remote("s3://texts/b/*.txt")
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)  # another service
    with pytest.raises(WorkError, match="cannot be reached"):
        list_remote(paths[0])
    assert not messages


def test_a_service_that_refuses_is_believed(bucket, monkeypatch):
    bucket.put_object(Bucket="texts", Key="1.txt", Body=b"1")
    list_remote("s3://texts/1.txt")
    list_remote("s3://texts/*.txt")
    bucket.delete_object(Bucket="texts", Key="1.txt")
    for path in ("s3://texts/1.txt", "s3://texts/*.txt"):
        with pytest.raises(InputError, match=r"there is no such file|no file matches"):
            list_remote(path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(InputError, match="no keys are found"):
        list_remote("s3://texts/1.txt")


@pytest.mark.parametrize("status", [500, 503])
def test_a_service_that_fails_is_out_of_reach_too(bucket, relay, monkeypatch, status):
    bucket.put_object(Bucket="texts", Key="1.txt", Body=b"1")
    listed = list_remote("s3://texts/1.txt")
    relay.close()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    messages = logged()
    with http_server(answering(status), int(relay.address.rpartition(":")[2])):
        assert list_remote("s3://texts/1.txt") == listed
    assert len(messages) == 1


def test_a_record_that_is_damaged_is_none(bucket, relay, monkeypatch):
    bucket.put_object(Bucket="texts", Key="1.txt", Body=b"1")
    list_remote("s3://texts/1.txt")
    (record,) = (cache_folder() / "listings").iterdir()
    record.write_text('{"files": [{}]}')
    relay.close()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(WorkError, match="cannot be reached"):
        list_remote("s3://texts/1.txt")


# The hub reads its address when it is imported: another process each time.
ON_THE_HUB = """
import sys
from artel.storage import checksum, fetch_remote, list_remote
for file in list_remote(sys.argv[1], lambda said: print("told:", said)):
    print(file.address, checksum(fetch_remote(file, sys.argv[2])))
"""


def on_the_hub(address: str, cache: Path, path: str, **environment: str) -> dict:
    return {
        "args": [sys.executable, "-c", ON_THE_HUB, path, str(cache / "remote")],
        "env": os.environ | {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache / "hf"),
                             "ARTEL_CACHE": str(cache), "no_proxy": "127.0.0.1"} | environment,
    }  # fmt: skip


@pytest.mark.processes
def test_the_hub_offline_says_what_it_said_last_and_a_killed_fetch_goes_on(hub, tmp_path, monkeypatch):
    big = random.Random(0).randbytes(48 << 20)
    monkeypatch.setitem(FILES, "big.txt", big)
    (tmp_path / "big").write_bytes(big)
    path = "hf://datasets/me/texts/big.txt"
    relay = Relay(hub)
    relay.hold_after(down=42 << 20)
    process = subprocess.Popen(**on_the_hub(relay.address, tmp_path, path))
    assert relay.held.wait(60)
    process.kill()
    process.wait()
    relay.go_on()
    run = {"capture_output": True, "text": True, "timeout": 100, "check": True}
    expected = f"{path} {checksum(tmp_path / 'big')}\n"
    assert subprocess.run(**on_the_hub(relay.address, tmp_path, path), **run).stdout == expected
    assert relay.passed["down"] < 17 << 20
    said = subprocess.run(**on_the_hub(relay.address, tmp_path, path, HF_HUB_OFFLINE="1"), **run).stdout
    offline = rf"told: {path} is on the hub, but HF_HUB_OFFLINE .*; the listing of .* is used\n"
    assert re.fullmatch(offline + expected, said)
    relay.close()


# Fetches


FETCH = """
import sys
from artel.storage import fetch_remote, list_remote
fetch_remote(list_remote(sys.argv[1])[0], sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_fetch_goes_on_within_the_file(bucket, relay, tmp_path):
    bucket.put_object(Bucket="texts", Key="big", Body=BODY * 32)  # 96 MiB
    relay.hold_after(down=80 << 20)
    killed_when_held(relay, FETCH, "s3://texts/big", tmp_path / "remote")
    assert [entry.name for entry in (tmp_path / "remote").iterdir()] == ["unfinished"]
    (mark,) = (tmp_path / "remote" / "unfinished").glob("*.json")
    marked = json.loads(mark.read_bytes())["bytes"]
    assert marked >= 32 << 20  # 64 MiB were there; a slow machine has marked others of them, but loses no more than 32
    (listed,) = list_remote("s3://texts/big")
    relay.go_on()
    body = fetch_remote(listed, tmp_path / "remote")
    assert body.read_bytes() == BODY * 32
    assert relay.passed["down"] < (97 << 20) - marked  # the rest, once
    assert list((tmp_path / "remote" / "unfinished").iterdir()) == []


@pytest.mark.slow
def test_parts_of_another_version_are_not_joined(bucket, relay, tmp_path):
    bucket.put_object(Bucket="texts", Key="big", Body=BODY * 28)
    relay.hold_after(down=75 << 20)
    killed_when_held(relay, FETCH, "s3://texts/big", tmp_path / "remote")
    (before,) = list_remote("s3://texts/big")
    bucket.put_object(Bucket="texts", Key="big", Body=b"other")
    with pytest.raises(WorkError, match="changed while it was fetched"):
        fetch_remote(before, tmp_path / "remote")
    assert list((tmp_path / "remote" / "unfinished").iterdir()) == []
    (now,) = list_remote("s3://texts/big")
    assert fetch_remote(now, tmp_path / "remote").read_bytes() == b"other"


def test_an_empty_file_is_one(bucket, tmp_path):
    bucket.put_object(Bucket="texts", Key="none", Body=b"")
    assert fetch_remote(list_remote("s3://texts/none")[0], tmp_path / "remote").read_bytes() == b""


# Small files


def test_small_files_are_written_and_read(bucket):
    address = "s3://texts/claims/1"
    assert not exists(address)
    write_bytes(address, b"old")
    assert exists(address)
    assert not exists("s3://texts/claims")
    assert read_bytes(address) == b"old"
    write_bytes(address, b"new")
    assert read_bytes(address) == b"new"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: read_bytes("s3://texts/none"), r"s3://texts/none: there is no such file"),
        (lambda: read_bytes("s3://none/x"), r"there is no bucket none\n.*s3 mb s3://none"),
        (lambda: exists("s3://none/x"), "there is no bucket none"),
        (lambda: write_bytes("s3://none/x", b""), "there is no bucket none"),
        (lambda: write_bytes("hf://datasets/me/x", b""), r"is not writable\n.*s3://BUCKET/PREFIX"),
        (lambda: write_bytes("s3://texts", b""), "is not writable"),
    ],
)
def test_addresses_that_cannot_be_read_or_written(bucket, call, said):
    with pytest.raises(InputError, match=said):
        call()
