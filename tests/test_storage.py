"""Whole-or-absent writes, checksums and locks, with real files, real processes and a real kill."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from artel.errors import InputError, WorkError
from artel.storage import (
    cache_folder,
    checksum,
    disk_errors,
    lock,
    new_folder,
    remove_leftovers,
    replace_link,
    scratch_folder,
    write_file,
    write_output,
)
from support.runs import artel
from support.waiting import wait_until


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Another Python that has said a line, and waits."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_file_is_written_with_its_folders_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b.txt"
    write_file(file, "старое")
    write_file(file, "новое")
    write_file(tmp_path / "a" / "c.bin", b"\xff\x00")
    assert file.read_text(encoding="utf-8") == "новое"
    assert sorted(entry.name for entry in file.parent.iterdir()) == ["b.txt", "c.bin"]


def test_what_a_user_names_as_output_is_written_to_and_only_a_file_is_replaced(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_bytes(b"old")
    link.symlink_to("target")
    dangling.symlink_to("new")
    for path in (link, dangling):
        write_output(path, "text")
        assert (path.is_symlink(), path.read_bytes()) == (True, b"text")
    write_output("/dev/null", "text")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(WorkError, match="the disk is full"):
        write_output("/dev/full", "text")

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        write_output(pipe, "text")
        assert reader.read() == b"text"
    assert pipe.is_fifo()

    (tmp_path / "folder").mkdir()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    with listening:
        for name, kind in (("folder", "a folder"), ("socket", "a socket")):
            with pytest.raises(InputError, match=f"is {kind}, and cannot be replaced"):
                write_output(tmp_path / name, "text")
    assert ((tmp_path / "folder").is_dir(), (tmp_path / "socket").is_socket()) == (True, True)


@pytest.mark.processes
@pytest.mark.ci
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_a_command_writes_to_its_standard_output_whatever_that_is(tmp_path: Path, name: str) -> None:
    """A file that the shell appends to, a pipe and a socket; the names and links of it stay what they are."""
    Path("link").symlink_to("/dev/stdout")
    expected = artel("recipes", "cat", "demo").stdout
    command = [sys.executable, "-m", "artel", "recipes", "cp", "demo", name]
    subprocess.run(["sh", "-c", 'echo before >out; "$@" >>out; echo after >>out', "sh", *command], check=True)
    assert Path("out").read_text() == f"before\n{expected}after\n"
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == expected
    ours, its = socket.socketpair()
    with ours, its:
        subprocess.run(command, stdout=its, check=True)
        its.shutdown(socket.SHUT_WR)
        with ours.makefile() as received:
            assert received.read() == expected
    assert Path("link").readlink() == Path("/dev/stdout")


def test_every_command_writes_a_named_file_by_write_output() -> None:
    sources = Path(__file__).resolve().parents[1] / "src" / "artel" / "cli"
    for source in sources.glob("*.py"):
        code = source.read_text()
        assert not any(f"{call}(" in code for call in ("write_file", "write_text", "write_bytes")), source


def test_a_folder_appears_only_at_the_end(tmp_path: Path) -> None:
    with new_folder(tmp_path / "store") as partial:
        (partial / "deep").mkdir()
        (partial / "deep" / "shard").write_bytes(b"1")
        assert not (tmp_path / "store").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
    assert (tmp_path / "store" / "deep" / "shard").read_bytes() == b"1"


def test_files_of_a_folder_have_the_rights_that_the_umask_gives(tmp_path: Path) -> None:
    """Also those of safetensors, which writes for its user alone. Private copies, and what nobody may change, stay."""
    (tmp_path / "private").touch(0o600)
    os.utime(tmp_path / "private", (1e9, 1e9))
    before = os.umask(0o027)
    try:
        with new_folder(tmp_path / "model") as partial:
            shutil.copy2(tmp_path / "private", partial)
            save_file({"weight": np.zeros(2)}, partial / "model.safetensors")
            (partial / "config.json").write_text("{}")
            (partial / "fixed").write_text("")
            (partial / "fixed").chmod(0o400)
    finally:
        os.umask(before)
    rights = {file.name: oct(file.stat().st_mode & 0o777) for file in (tmp_path / "model").iterdir()}
    expected = {"model.safetensors": "0o640", "config.json": "0o640", "fixed": "0o400", "private": "0o600"}
    assert rights == expected


def test_a_failed_folder_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError), new_folder(tmp_path / "store") as partial:
        (partial / "shard").write_text("\ud800", encoding="utf-8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("replace", "kept"), [(False, b"theirs"), (True, b"ours")])
def test_a_folder_that_came_first_is_kept_or_replaced(tmp_path: Path, replace: bool, kept: bytes) -> None:
    with new_folder(tmp_path / "store", replace=replace) as ours:
        (ours / "shard").write_bytes(b"ours")
        with new_folder(tmp_path / "store") as theirs:
            (theirs / "shard").write_bytes(b"theirs")
    assert (tmp_path / "store" / "shard").read_bytes() == kept
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


@pytest.mark.ci
@pytest.mark.processes
def test_what_a_killed_process_leaves_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    code = """
        import sys, time
        from artel.storage import new_folder
        with new_folder(sys.argv[1]) as partial:
            (partial / "shard").write_bytes(b"half")
            print("ready", flush=True)
            time.sleep(60)
    """
    process = start(code, tmp_path / "store")
    assert remove_leftovers(tmp_path) == []
    kill(process)
    assert not (tmp_path / "store").exists()
    (tmp_path / "mine.txt").write_text("stays")
    assert len(remove_leftovers(tmp_path)) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]
    assert remove_leftovers(tmp_path / "absent") == []

    kill(start(code, tmp_path / "store"))  # whoever writes a folder there next, under whatever name, removes it
    for write in (new_folder, scratch_folder):
        with write(tmp_path / "other") as partial:
            hidden = [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")]
            assert hidden == [partial.name]


def test_a_pointer_is_relative_and_replaced(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        (tmp_path / "run" / name).mkdir(parents=True)
        replace_link(tmp_path / "run" / "latest", tmp_path / "run" / name)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest").readlink() == Path("step-2")
    assert (tmp_path / "moved" / "latest").is_dir()


def test_checksum_is_xxh3_128(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"artel" * 1_000_000)
    (tmp_path / "empty").write_bytes(b"")
    assert checksum(tmp_path / "empty") == "99aa06d3014798d86001c324468d497f"  # the published value for no input
    before = checksum(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"artel" * 999_999 + b"arteL")
    assert len(before) == 32
    assert checksum(tmp_path / "a") != before


HOLDER = """
    import sys, time
    from artel.storage import lock
    with lock(sys.argv[1]):
        print("ready", flush=True)
        time.sleep(60)
"""


def test_a_held_lock_says_who_holds_it_and_falls_with_its_process(tmp_path: Path) -> None:
    process = start(HOLDER, tmp_path / "lock")
    with pytest.raises(WorkError, match=f"process {process.pid} "), lock(tmp_path / "lock", wait=False):
        pass
    waited: list[int] = []

    def on_wait() -> None:
        waited.append(process.pid)
        kill(process)

    with lock(tmp_path / "lock", on_wait):
        pass
    assert waited == [process.pid]


def test_a_lock_that_is_removed_each_time_is_still_held_by_one(tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("0")
    waiting: set[int] = set()
    done: list[int] = []

    def add(thread: int) -> None:
        for _ in range(8):
            with lock(tmp_path / "lock", lambda: waiting.add(thread), keep=False):
                waiting.discard(thread)
                before = int(count.read_text())
                wait_until(lambda: waiting or len(done) == 3)  # another wants it now
                count.write_text(str(before + 1))
        done.append(thread)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert count.read_text() == "32"
    assert not (tmp_path / "lock").exists()


def test_a_full_disk_and_a_refused_folder_have_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="disk is full"), disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(InputError, match="ARTEL_CACHE"), disk_errors(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "x", tmp_path / "file" / "deeper" / "x"):
        with pytest.raises(InputError, match="cannot be written"):
            write_file(path, "")
        with pytest.raises(InputError, match="cannot be written"), new_folder(path):
            pass


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("ARTEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "artel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "artel"
