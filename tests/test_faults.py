"""Disks and clocks that fail: no right to a file, texts that are gone, times that are not, a slow disk.

Each is told in one clear message, or does no harm. Full disks and read-only ones are in test_bad_inputs.py and
test_saver.py, a bit that is flipped in test_bit_flips.py.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs import losses, succeed, write_run

RUN = {"train": {"steps": 6, "batch": 16, "micro_batch": 8}, "checkpoint": {"every": 2, "keep": 9}}


def text_run(folder: Path, **more) -> tuple[Path, Path]:
    """(a run file, the text that it learns from)."""
    text = folder / "texts" / "a.txt"
    text.parent.mkdir()
    text.write_text("\n\n".join(f"paragraph {number} has some words, {number * 7 % 13}" for number in range(300)))
    data = {"sources": [{"path": str(folder / "texts" / "*.txt"), "document": "paragraph"}], "block": 16}
    return write_run(folder / "run.yaml", data=data, tokenizer={"train": {"vocab": 300}}, **RUN, **more), text


def stop_after_step_4(folder: Path) -> bytes:
    """Make a run that is over one that was stopped; the weights that it ended with."""
    weights = (folder / "model" / "model.safetensors").read_bytes()
    for name in ("model", "checkpoints/step-000000006"):
        shutil.rmtree(folder / name)
    (folder / "result.json").unlink()
    return weights


# No right to a file


class _Capabilities(ctypes.Structure):
    """capget(2): what a process may, in two halves of 32 bits each."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


@pytest.fixture
def without_overrides():
    """Root, too, has only the rights that a file gives: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH are laid down."""
    if sys.platform != "linux":
        pytest.skip("capabilities are Linux's")
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (_Capabilities * 2)()
    assert libc.capget(header, held) == 0
    before = held[0].effective
    held[0].effective = before & ~0b110
    assert libc.capset(header, held) == 0
    yield
    held[0].effective = before
    assert libc.capset(header, held) == 0


@pytest.mark.long
def test_what_may_not_be_read_or_written_is_told(tmp_path, artel_here, without_overrides):
    def assert_refused(*parts) -> None:
        done = artel_here("train", file)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        for part in parts:
            assert part in done.stderr

    file, text = text_run(tmp_path)
    run, stores = Path("run"), Path("stores")  # relative, as the run file names them
    for path, mode in ((text, 0o644), (file, 0o644)):
        path.chmod(0o000)
        assert_refused(f"{path.name}", "cannot be read: Permission denied", "check its permissions")
        path.chmod(mode)
    for folder in (stores, run):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o555)
        assert_refused(str(folder), "cannot be written: Permission denied", "choose a folder that can be written")
        folder.chmod(0o755)
    done = artel_here("train", file)
    assert done.returncode == 0, done.stderr
    weights = stop_after_step_4(run)
    newest = run / "checkpoints" / "step-000000004"
    newest.chmod(0o000)
    assert_refused(str(newest), "cannot be read: Permission denied", "chmod")
    newest.chmod(0o755)
    (tokens,) = stores.glob("*/train/00000.tokens")
    tokens.chmod(0o000)
    assert_refused(str(tokens), "cannot be read: Permission denied", "chmod")
    tokens.chmod(0o644)
    done = artel_here("train", file)
    assert done.returncode == 0, done.stderr
    assert (run / "model" / "model.safetensors").read_bytes() == weights


# Texts that are gone


@pytest.mark.long
def test_a_run_goes_on_when_its_texts_are_gone(tmp_path, artel_here):
    file, text = text_run(tmp_path)
    assert artel_here("train", file).returncode == 0
    weights = stop_after_step_4(tmp_path / "run")
    shutil.rmtree(text.parent)
    done = artel_here("train", file)
    assert done.returncode == 0, done.stderr
    assert "no file matches" in done.stderr
    assert "continuing with the store of its texts" in done.stderr
    assert "resuming from step 4" in done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == weights

    stop_after_step_4(tmp_path / "run")
    done = artel_here("train", file, "data.clean.minimum=5")  # another store is wanted
    assert (done.returncode, "no file matches" in done.stderr, "continuing with" in done.stderr) == (2, True, False)
    (tokens,) = tmp_path.glob("stores/*/train/00000.tokens")
    tokens.write_bytes(bytes(len(tokens.read_bytes())))
    done = artel_here("train", file)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    for part in ("no file matches", str(tokens), "does not have the checksum", "restore them, or a copy of the store"):
        assert part in done.stderr
    shutil.rmtree(tmp_path / "stores")
    done = artel_here("train", file)
    assert (done.returncode, "no file matches" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


# Clocks


@pytest.mark.slow
@pytest.mark.parametrize("when", [4_102_444_800, 0], ids=["2100", "1970"])
def test_a_clock_that_was_set_back_changes_nothing(tmp_path, artel_here, when):
    """Files that are of the future, or of long ago: what is whole is taken, what is new is found by its number."""
    file, text = text_run(tmp_path)
    os.utime(text, (when, when))
    assert artel_here("train", file).returncode == 0
    weights = stop_after_step_4(tmp_path / "run")
    oldest = tmp_path / "run" / "checkpoints" / "step-000000002"
    for path in [*tmp_path.rglob("*")]:
        os.utime(path, (when, when), follow_symlinks=False)
    os.utime(oldest, (when + 1000, when + 1000))
    done = artel_here("train", file)
    assert done.returncode == 0, done.stderr
    assert "resuming from step 4" in done.stderr
    assert "turning text into tokens" not in done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == weights


# A slow disk

# A hundredth of a second for each fsync, and 5 MB/s.
SLOW = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
int fsync(int file) { usleep(10000); return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file); }
ssize_t write(int file, const void *data, size_t count) {
    if (count > 4096) usleep(count / 5);
    return ((ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write"))(file, data, count);
}
"""


@pytest.mark.processes
def test_a_slow_disk_is_only_slow(tmp_path, artel_here):
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a slow disk is a library put before the C library's own")
    (tmp_path / "slow.c").write_text(SLOW)
    library = tmp_path / "slow.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "slow.c", "-ldl"], check=True)
    files = {
        name: write_run(tmp_path / f"{name}.yaml", data={"store": str(tmp_path / name / "stores")}, **RUN)
        for name in ("slow", "fast")
    }
    done = succeed("train", files["slow"], "--json", env={"LD_PRELOAD": str(library)})
    assert json.loads(done.stdout)["steps"] == 6
    assert artel_here("train", files["fast"]).returncode == 0
    slow, fast = (file.with_suffix("") for file in files.values())
    assert losses(slow) == losses(fast)
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (slow, fast)]
    assert models[0] == models[1]
    assert [path.name[-1] for path in sorted((slow / "checkpoints").glob("step-*"))] == ["2", "4", "6"]
    assert not list(tmp_path.rglob("*.partial-*"))
