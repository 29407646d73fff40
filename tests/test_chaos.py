"""A run killed at eight moments ends as if nobody had touched it: benchmarks/chaos.py in short; and what it goes by."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from support.runs import ENVIRONMENT

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
from run_on_disk import checkpoint_fault, faults  # noqa: E402


@pytest.mark.ci
@pytest.mark.processes
def test_a_run_killed_again_and_again_ends_with_the_same_weights(tmp_path):
    table = tmp_path / "chaos.md"
    command = [sys.executable, str(BENCHMARKS / "chaos.py"), "--kills", "8", "--layouts", "alone,ddp-2,fsdp-2"]
    done = subprocess.run([*command, "--out", str(table)], capture_output=True, text=True, timeout=500, env=ENVIRONMENT)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert json.loads(done.stdout.splitlines()[-1]) == {"kills": 8, "faults": []}
    text = table.read_text()
    assert "**Nothing was lost**" in text
    for layout in ("alone", "ddp-2", "fsdp-2"):
        assert f"| {layout} | " in text


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: (path / "model.safetensors").write_bytes(b"weighty"), "does not have its checksum"),
        (lambda path: (path / "model.safetensors").unlink(), "FileNotFoundError"),
        (lambda path: (path / "checksums.json").unlink(), "FileNotFoundError"),
        (lambda path: (path / "checksums.json").write_text('{"model'), "JSONDecodeError"),
        (lambda path: (path / "more.safetensors").write_bytes(b""), "its checksums name"),
        (lambda path: path.rename(path.with_name("step-000000006")), "is of another step"),
    ],
)
def test_a_torn_checkpoint_is_seen_by_the_benchmark(tmp_path, spoil, said):
    path = whole_checkpoint(tmp_path / "checkpoints", 3)
    assert faults(tmp_path) == []
    spoil(path)
    (fault,) = faults(tmp_path)
    assert said in fault


def test_a_pointer_to_nothing_is_seen_by_the_benchmark(tmp_path):
    whole_checkpoint(tmp_path / "checkpoints", 3)
    assert checkpoint_fault(tmp_path / "checkpoints", 3) is None
    (tmp_path / "checkpoints" / "latest").symlink_to("step-000000006")
    assert faults(tmp_path) == ["latest points to step-000000006, which is not there"]


def whole_checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:09d}"
    path.mkdir(parents=True)
    files = {"model.safetensors": b"weights", "state.json": json.dumps({"step": step}).encode()}
    for name, content in files.items():
        (path / name).write_bytes(content)
    sums = {name: xxhash.xxh3_128_hexdigest(content) for name, content in files.items()}
    (path / "checksums.json").write_text(json.dumps(sums))
    return path
