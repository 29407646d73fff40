"""`artel clean`: what a run, a fetch and a fault leave in the cache is listed, and removed by name."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from artel.cli.clean import _CATEGORIES
from artel.storage import lock
from support.runs import TEXT_ALONE, artel, refused, succeed, write_run

pytestmark = pytest.mark.processes
KEY = "0" * 32
FOLDERS = {"ARTEL_CACHE": "cache", "XDG_STATE_HOME": "state"}


def clean(*names: str, status: int = 0) -> dict[str, int]:
    """Bytes by name: of what is kept, or was removed."""
    done = artel("clean", *names, "--json", env=FOLDERS)
    assert done.returncode == status, done.stderr
    result = json.loads(done.stdout)
    return {row["name"]: row["bytes"] for row in result["removed" if names else "kept"]}


@pytest.mark.ci
def test_what_is_kept_is_listed_and_removed_by_name():
    file = write_run(Path("run.yaml"), base=TEXT_ALONE, data={"store": ""})
    succeed("prepare", file, env=FOLDERS)
    (store,) = (path.name for path in Path("cache/stores").iterdir() if path.is_dir())
    theirs = Path("cache/stores/mine.txt"), Path("cache/notes/a.txt"), Path("elsewhere/a.txt")
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    Path(f"cache/stores/{KEY}").symlink_to(Path("elsewhere").absolute())
    Path("cache/hardware.json").write_text("{}")
    Path("cache/faults").mkdir()
    Path("cache/faults/2026-01-01-00-00-00-process-1.txt").write_text("fault")

    kept = clean()
    assert kept.keys() == {f"stores/{store}", "hardware.json", "faults"}
    assert kept["faults"] == 5
    assert clean("hardware.json", "faults", "downloads") == {"hardware.json": 2, "faults": 5}
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    with lock(f"cache/stores/{store}.lock"):  # as a process that prepares it
        assert clean("all", status=1) == {}
        assert clean().keys() == {f"stores/{store}"}
    assert clean(f"stores/{store}").keys() == {f"stores/{store}"}
    assert clean() == {}
    assert all(path.read_text() == "mine" for path in theirs)
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before

    assert refused("clean", "runs", "store", env=FOLDERS).stderr.count("is not an entry of artel's files") == 2


def test_what_cannot_be_removed_is_not_called_removed():
    folder = Path("cache/stores") / KEY
    folder.mkdir(parents=True)
    (folder / "shard").write_text("12345")
    if subprocess.run(["chattr", "+i", folder / "shard"], capture_output=True, check=False).returncode:
        pytest.skip("no file can be made immutable here: that takes root, and a disk such as ext4")
    try:
        done = artel("clean", f"stores/{KEY}", env=FOLDERS)
    finally:
        (file,) = Path("cache/stores").glob("*/shard")
        subprocess.run(["chattr", "-i", file], check=True)
    assert done.returncode == 1
    assert "removed: nothing" in done.stdout
    assert f"cannot be removed: Operation not permitted ({file.name})" in done.stderr


def test_every_part_of_the_cache_is_listed():
    """Each name that the code joins to the cache folder is one that `artel clean` knows."""
    source = Path(__file__).resolve().parents[1] / "src" / "artel"
    code = "\n".join(file.read_text() for file in source.rglob("*.py"))
    names = set(re.findall(r'cache_folder\(\) / "([^"]+)"', code))
    assert len(names) > 6
    assert names <= set(_CATEGORIES)
