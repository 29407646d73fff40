"""Listings, fetches, pushes and pulls of S3 and of the hub, over services that are cut, killed and out of reach."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest

from artel.errors import InputError, WorkError
from artel.storage import (
    cache_folder,
    checksum,
    exists,
    fetch_remote,
    list_remote,
    pull_folder,
    push_folder,
    read_bytes,
    write_bytes,
)
from servers import FILES, Relay

pytest_plugins = ["services"]

BODY = random.Random(0).randbytes(3 << 20)
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def relay(bucket, s3_server, monkeypatch):
    """A relay before the S3 server, which the environment leads to."""
    relay = Relay(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", relay.address)
    yield relay
    relay.close()


def killed_when_held(relay: Relay, code: str, *arguments: object) -> None:
    """Run artel in another process, and kill it when the relay holds it back."""
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)])
    try:
        assert relay.held.wait(60)
    finally:
        process.kill()
        process.wait()
    relay.go_on()


# Listings


def test_a_service_out_of_reach_says_what_it_said_last(bucket, relay, tmp_path, monkeypatch):
    told: list[str] = []
    for name in ("a/1.txt", "a/2.txt"):
        bucket.put_object(Bucket="texts", Key=name, Body=name.encode())
    paths = ("s3://texts/a/*.txt", "s3://texts/a/1.txt")
    listed = {path: list_remote(path, told.append) for path in paths}
    fetched = [fetch_remote(file, tmp_path / "remote") for file in listed[paths[0]]]
    assert not told
    relay.close()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for path in paths:
        assert list_remote(path, told.append) == listed[path]
        assert re.fullmatch(
            re.escape(path) + r" cannot be reached; the listing of \d{4}-\d\d-\d\d \d\d:\d\d\S* is used", told.pop()
        )
    assert [fetch_remote(file, tmp_path / "remote") for file in listed[paths[0]]] == fetched
    with pytest.raises(WorkError, match="cannot be reached"):  # never listed
        list_remote("s3://texts/b/*.txt", told.append)
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)  # another service
    with pytest.raises(WorkError, match="cannot be reached"):
        list_remote(paths[0], told.append)
    assert not told


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

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    told: list[str] = []
    address = relay.address.removeprefix("http://").split(":")
    with ThreadingHTTPServer((address[0], int(address[1])), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        assert list_remote("s3://texts/1.txt", told.append) == listed
        server.shutdown()
    assert len(told) == 1


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
    assert relay.passed["down"] < len(big)  # 8 MiB and more if a starved machine lets requests be tried again
    said = subprocess.run(**on_the_hub(relay.address, tmp_path, path, HF_HUB_OFFLINE="1"), **run).stdout
    offline = rf"told: {path} is on the hub, and HF_HUB_OFFLINE .*; the listing of .* is used\n"
    assert re.fullmatch(offline + expected, said)
    relay.close()


# Fetches


FETCH = """
import sys
from artel.storage import fetch_remote, list_remote
fetch_remote(list_remote(sys.argv[1])[0], sys.argv[2])
"""


def test_a_killed_fetch_goes_on_within_the_file(bucket, relay, tmp_path):
    bucket.put_object(Bucket="texts", Key="big", Body=BODY * 32)  # 96 MiB
    relay.hold_after(down=80 << 20)
    killed_when_held(relay, FETCH, "s3://texts/big", tmp_path / "remote")
    assert [entry.name for entry in (tmp_path / "remote").iterdir()] == ["unfinished"]
    (listed,) = list_remote("s3://texts/big")
    body = fetch_remote(listed, tmp_path / "remote")
    assert body.read_bytes() == BODY * 32
    assert relay.passed["down"] < len(BODY) * 32  # 64 MiB were marked; some of the 32 left may have come twice
    assert list((tmp_path / "remote" / "unfinished").iterdir()) == []


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


def test_the_scheme_in_capitals_is_the_same(bucket, small, tmp_path):
    bucket.put_object(Bucket="texts", Key="1.txt", Body=b"1")
    assert list_remote("S3://texts/1.txt") == list_remote("s3://texts/1.txt")
    push_folder(small, "S3://texts/store")
    pull_folder("S3://texts/store", tmp_path / "copies" / "1", facts(small))
    assert same(small, tmp_path / "copies" / "1")


def test_an_empty_file_is_one(bucket, tmp_path):
    bucket.put_object(Bucket="texts", Key="none", Body=b"")
    assert fetch_remote(list_remote("s3://texts/none")[0], tmp_path / "remote").read_bytes() == b""


# Small files


def test_small_files_are_written_read_and_claimed_once(bucket):
    address = "s3://texts/claims/1"
    assert not exists(address)
    assert write_bytes(address, b"mine", exclusive=True)
    assert not write_bytes(address, b"theirs", exclusive=True)
    assert exists(address)
    assert not exists("s3://texts/claims")
    assert read_bytes(address) == b"mine"
    assert write_bytes(address, b"new")
    assert read_bytes(address) == b"new"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: read_bytes("s3://texts/none"), r"s3://texts/none: there is no such file"),
        (lambda: read_bytes("s3://none/x"), r"there is no bucket none\n.*s3 mb s3://none"),
        (lambda: exists("s3://none/x"), "there is no bucket none"),
        (lambda: write_bytes("s3://none/x", b""), "there is no bucket none"),
        (lambda: write_bytes("hf://datasets/me/x", b""), r"is no place to write to\n.*s3://BUCKET/PREFIX"),
        (lambda: write_bytes("s3://texts", b""), "is no place to write to"),
    ],
)
def test_addresses_that_cannot_be_read_or_written(bucket, call, said):
    with pytest.raises(InputError, match=said):
        call()


# Folders


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder like a token store: files of many parts, small ones, a manifest with what they are."""
    return made(tmp_path / "store", BODY * 11)  # 33 MiB: three parts


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return made(tmp_path / "store", b"tokens")


def made(folder: Path, tokens: bytes) -> Path:
    (folder / "train").mkdir(parents=True)
    for number in range(2):
        (folder / "train" / f"{number:05}.tokens").write_bytes(tokens + bytes([number]))
        (folder / "train" / f"{number:05}.ends").write_bytes(bytes(8 * number))
    (folder / "ledger.json").write_text("{}")
    (folder / "manifest.json").write_text(json.dumps(facts(folder)))
    return folder


def facts(folder: Path) -> list[tuple[str, int, str]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json")
    return [(file.relative_to(folder).as_posix(), file.stat().st_size, checksum(file)) for file in files]


def keys(bucket) -> list[str]:
    return [entry["Key"] for entry in bucket.list_objects_v2(Bucket="texts").get("Contents", [])]


def same(one: Path, other: Path) -> bool:
    return facts(one) == facts(other) and (one / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()


def test_a_folder_goes_there_and_back(bucket, store, tmp_path):
    pushed = push_folder(store, "s3://texts/stores/1/")
    assert pushed == [name for name, _, _ in facts(store)] + ["manifest.json"]
    assert exists("s3://texts/stores/1/manifest.json")
    assert bucket.head_object(Bucket="texts", Key="stores/1/train/00001.tokens")["ETag"].endswith('-3"')
    assert push_folder(store, "s3://texts/stores/1") == []
    wanted = [tuple(fact) for fact in json.loads(read_bytes("s3://texts/stores/1/manifest.json"))]
    for number, known in enumerate((wanted, None)):
        copy = tmp_path / "copies" / str(number)
        pull_folder("s3://texts/stores/1", copy, known)
        assert same(store, copy)
        assert [path.name for path in (tmp_path / "copies" / "unfinished").iterdir()] == []
    before = (copy / "ledger.json").stat().st_ino
    pull_folder("s3://texts/stores/1", copy, wanted)
    assert (copy / "ledger.json").stat().st_ino == before


PUSH = """
import sys
from pathlib import Path
from artel.storage import pull_folder, push_folder
push_folder(Path(sys.argv[1]), sys.argv[2])""".strip()
PULL = PUSH.replace("push_folder(Path(sys.argv[1]), sys.argv[2])", "pull_folder(sys.argv[1], Path(sys.argv[2]))")


def test_a_killed_push_leaves_no_manifest_and_the_next_skips_what_went(bucket, relay, store):
    relay.hold_after(up=50 << 20)  # within the parts of the second large file
    killed_when_held(relay, PUSH, store, "s3://texts/store")
    there = keys(bucket)
    assert "store/train/00000.tokens" in there
    assert "store/train/00001.tokens" not in there
    assert not exists("s3://texts/store/manifest.json")
    with pytest.raises(InputError, match=r"has no manifest\.json: no folder was finished there"):
        pull_folder("s3://texts/store", store.with_name("copy"))
    pushed = push_folder(store, "s3://texts/store")
    assert {f"store/{name}" for name in pushed} == set(keys(bucket)) - set(there)
    assert pushed[-1] == "manifest.json"
    pull_folder("s3://texts/store", store.with_name("copy"), facts(store))
    assert same(store, store.with_name("copy"))


def test_a_killed_pull_leaves_nothing_by_its_name_and_the_next_goes_on(bucket, relay, store, tmp_path):
    push_folder(store, "s3://texts/store")
    relay.hold_after(down=50 << 20)
    killed_when_held(relay, PULL, "s3://texts/store", tmp_path / "copies" / "1")
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["unfinished"]
    pull_folder("s3://texts/store", tmp_path / "copies" / "1", facts(store))
    assert same(store, tmp_path / "copies" / "1")
    assert relay.passed["down"] < 66 << 20  # the whole


def test_files_of_another_push_are_replaced_when_they_differ(bucket, small):
    bucket.put_object(Bucket="texts", Key="store/ledger.json", Body=b"[]")  # of equal size, with no checksum
    half = (small / "train" / "00001.ends").stat().st_size - 1
    bucket.put_object(Bucket="texts", Key="store/train/00001.ends", Body=bytes(half))
    assert len(push_folder(small, "s3://texts/store")) == len(facts(small)) + 1
    pull_folder("s3://texts/store", small.with_name("copy"), facts(small))


def test_a_store_that_came_first_is_kept(bucket, small):
    bucket.put_object(Bucket="texts", Key="store/manifest.json", Body=b"theirs")
    assert push_folder(small, "s3://texts/store") == []
    assert keys(bucket) == ["store/manifest.json"]


def test_a_folder_without_a_manifest_is_not_pushed(bucket, small):
    (small / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"has no manifest\.json: it is not finished"):
        push_folder(small, "s3://texts/store")
    assert keys(bucket) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda bucket: bucket.delete_object(Bucket="texts", Key="store/ledger.json"), "is missing"),
        (lambda bucket: bucket.put_object(Bucket="texts", Key="store/ledger.json", Body=b"{} "), "has 3 bytes"),
        (lambda bucket: bucket.put_object(Bucket="texts", Key="store/ledger.json", Body=b"[]"), "does not have the ch"),
    ],
)
def test_a_damaged_store_is_not_pulled(bucket, small, damage, said):
    push_folder(small, "s3://texts/store")
    good = bucket.get_object(Bucket="texts", Key="store/ledger.json")["Body"].read()
    damage(bucket)
    copy = small.with_name("copy")
    with pytest.raises(WorkError, match=rf"s3://texts/store/ledger\.json: {said}(.|\n)*s3 rm --recursive"):
        pull_folder("s3://texts/store", copy, facts(small))
    assert not copy.exists()
    bucket.put_object(Bucket="texts", Key="store/ledger.json", Body=good)
    pull_folder("s3://texts/store", copy, facts(small))
    assert same(small, copy)


def test_names_that_lead_out_of_the_folder_are_refused(bucket, tmp_path):
    for key in ("store/manifest.json", "store/../../outside"):
        bucket.put_object(Bucket="texts", Key=key, Body=b"{}")
    with pytest.raises(InputError, match="leads out of the folder"):
        pull_folder("s3://texts/store", tmp_path / "copies" / "1")
    assert not list(tmp_path.rglob("outside"))


def test_memory_does_not_grow_with_the_files(bucket, tmp_path):
    """A file of 360 MiB goes there and back within 300 MiB: the libraries, and 64 MiB on the way and their copies."""
    folder = tmp_path / "store"
    folder.mkdir()
    with (folder / "big").open("wb") as file:
        for _ in range(120):
            file.write(BODY)
    (folder / "manifest.json").write_text("{}")
    # Not resource's ru_maxrss: that of a new process begins with its parent's.
    peak = "; print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    for program, one, other in ((PUSH, "store", "s3://texts/store"), (PULL, "s3://texts/store", "copy")):
        command = [sys.executable, "-c", program + peak, one, other]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=200)
        assert int(done.stdout) < 300 << 10


@pytest.fixture
def reader(bucket, s3_server, monkeypatch):
    """The environment of a user who may read the bucket and not write to it; a function that gives more rights."""
    iam = boto3.client("iam")
    iam.create_user(UserName="reader")
    key = iam.create_access_key(UserName="reader")["AccessKey"]

    def allow(*actions: str) -> None:
        enforce("inf")
        rights = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": list(actions), "Resource": "*"}]}
        iam.put_user_policy(UserName="reader", PolicyName="rights", PolicyDocument=json.dumps(rights))
        enforce("0")

    def enforce(after: str) -> None:
        address, headers = f"{s3_server}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        request = urllib.request.Request(address, data=after.encode(), headers=headers, method="POST")
        urllib.request.urlopen(request, timeout=10).close()

    allow("s3:GetObject", "s3:ListBucket")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    yield allow
    enforce("inf")


def test_the_right_that_is_missing_is_named(reader, small):
    assert not exists("s3://texts/store/manifest.json")
    with pytest.raises(InputError, match=r"s3://texts/store/ledger\.json: may not be written(.|\n)*s3:PutObject"):
        push_folder(small, "s3://texts/store")
    reader("s3:PutObject", "s3:GetObject")
    with pytest.raises(InputError, match=r"may not be read(.|\n)*s3:ListBucket"):
        push_folder(small, "s3://texts/store")
    reader("s3:*")
    assert len(push_folder(small, "s3://texts/store")) == len(facts(small)) + 1
