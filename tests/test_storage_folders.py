"""Folders pushed to S3 and pulled from it, over a service that is cut and processes that are killed."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import boto3
import pytest

from artel.errors import InputError, WorkError
from artel.storage import checksum, exists, list_remote, pull_folder, push_folder, read_bytes
from support.servers import BODY, killed_when_held
from support.waiting import LIMIT

pytest_plugins = ["support.services"]


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


@pytest.mark.slow
def test_a_folder_goes_there_and_back(bucket, store, tmp_path):
    pushed = push_folder(store, "s3://texts/stores/1/")
    assert pushed == [name for name, _, _ in facts(store)] + ["manifest.json"]
    assert exists("s3://texts/stores/1/manifest.json")
    assert bucket.head_object(Bucket="texts", Key="stores/1/train/00001.tokens")["ETag"].endswith('-3"')
    assert push_folder(store, "s3://texts/stores/1") == []
    expected = [tuple(fact) for fact in json.loads(read_bytes("s3://texts/stores/1/manifest.json"))]
    for number, known in enumerate((expected, None)):
        copy = tmp_path / "copies" / str(number)
        pull_folder("s3://texts/stores/1", copy, known)
        assert same(store, copy)
        assert [path.name for path in (tmp_path / "copies" / "unfinished").iterdir()] == []
    before = (copy / "ledger.json").stat().st_ino
    pull_folder("s3://texts/stores/1", copy, expected)
    assert (copy / "ledger.json").stat().st_ino == before


@pytest.mark.slow
def test_the_scheme_in_capitals_is_the_same(bucket, small, tmp_path):
    bucket.put_object(Bucket="texts", Key="1.txt", Body=b"1")
    assert list_remote("S3://texts/1.txt") == list_remote("s3://texts/1.txt")
    push_folder(small, "S3://texts/store")
    pull_folder("S3://texts/store", tmp_path / "copies" / "1", facts(small))
    assert same(small, tmp_path / "copies" / "1")


PUSH = """
import sys
from pathlib import Path
from artel.storage import pull_folder, push_folder
push_folder(Path(sys.argv[1]), sys.argv[2])""".strip()
PULL = PUSH.replace("push_folder(Path(sys.argv[1]), sys.argv[2])", "pull_folder(sys.argv[1], Path(sys.argv[2]))")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_killed_pull_leaves_nothing_by_its_name_and_the_next_goes_on(bucket, relay, store, tmp_path):
    push_folder(store, "s3://texts/store")
    relay.hold_after(down=50 << 20)
    killed_when_held(relay, PULL, "s3://texts/store", tmp_path / "copies" / "1")
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["unfinished"]
    pull_folder("s3://texts/store", tmp_path / "copies" / "1", facts(store))
    assert same(store, tmp_path / "copies" / "1")
    assert relay.passed["down"] < 45 << 20  # of 66


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda bucket: bucket.delete_object(Bucket="texts", Key="store/ledger.json"), "is missing"),
        (lambda bucket: bucket.put_object(Bucket="texts", Key="store/ledger.json", Body=b"{} "), "has 3 bytes"),
        (lambda bucket: bucket.put_object(Bucket="texts", Key="store/ledger.json", Body=b"[]"), "does not match the c"),
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


@pytest.mark.processes
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
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=LIMIT)
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
