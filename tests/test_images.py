"""The Dockerfiles: linted by hadolint, and what must hold of them. No image was built here: no daemon, no network."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from artel.training.heartbeat import heartbeat_test
from support.waiting import LIMIT

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(file):
    """(name, argument) of each, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_there_is_one_for_cpus_and_one_for_gpus():
    assert [file.name for file in FILES] == ["cpu.Dockerfile", "gpu.Dockerfile"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_hadolint_finds_nothing(file):
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, str(file)], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_is_pinned_has_no_rights_and_tells_of_progress(file):
    found = instructions(file)
    names = [name for name, _ in found]
    assert [argument for name, argument in found if name == "USER"] == ["1000"]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    installed = [argument for name, argument in found if name == "RUN" and "pip install" in argument]
    assert all("constraints.txt" in argument for argument in installed)
    (check,) = (argument for name, argument in found if name == "HEALTHCHECK")
    shell = json.loads(check.partition("CMD ")[2])
    assert shell == ["sh", "-c", heartbeat_test("/tmp/artel-heartbeat", 60)]
    assert any("ARTEL_HEARTBEAT=/tmp/artel-heartbeat" in argument for name, argument in found if name == "ENV")
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for copied in (argument.split()[:-1] for name, argument in found if name == "COPY"):
        assert all((ROOT / path).exists() and f"!{path}" in allowed for path in copied)


def test_make_image_builds_both():
    done = subprocess.run(["make", "-n", "image", "BUILD_IMAGE=docker build"], capture_output=True, text=True, cwd=ROOT,
                          timeout=LIMIT)  # fmt: skip
    assert re.findall(r"--file (\S+) .*--tag (\S+) \.", done.stdout) == [
        ("docker/cpu.Dockerfile", "artel:cpu"), ("docker/gpu.Dockerfile", "artel:gpu")
    ]  # fmt: skip
    none = subprocess.run(
        ["make", "-n", "image", "BUILD_IMAGE="], capture_output=True, text=True, cwd=ROOT, timeout=LIMIT
    )
    assert "make image needs docker or buildah" in none.stderr
