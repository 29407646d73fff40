"""artel's C++ is built once and kept whole; where it cannot be, PyTorch's operators do the same, and it is said."""

import shutil
import subprocess
import sys

import pytest
import torch

from artel.models.cpu import build as cpu_code
from artel.models.cpu.build import load_library
from artel.models.cpu.cross_entropy import supports_logits


@pytest.fixture
def anew():
    """Has the next call build or load the libraries again, and the next test those that are used here."""
    cpu_code._load_library.cache_clear()
    yield
    cpu_code._load_library.cache_clear()


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("what", ["fails", "is missing"])
def test_without_a_working_compiler_the_operators_do_it_and_the_reason_is_said_once(what, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no compiler here >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(broken))
    if what == "is missing":
        monkeypatch.delenv("CXX")
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.warns(UserWarning, match="no compiler here" if what == "fails" else "no C.. compiler") as said:
        result = [
            supports_logits("cpu", torch.float32),
            supports_logits("cpu", torch.float32),
            load_library("attention"),
        ]
    assert result == [False, False, None]
    assert [str(each.message).partition(" ")[0] for each in said] == ["cross_entropy.cpp", "attention.cpp"]
    assert not list(tmp_path.glob("cache/built/*"))


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_processes_that_build_it_at_once_do_not_see_each_other_s_half(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path))
    line = (
        "import sys, warnings; warnings.simplefilter('error'); from artel.models.cpu.build import *; "
        "sys.exit(load_library('cross_entropy') is None)"
    )
    together = [subprocess.Popen([sys.executable, "-c", line]) for _ in range(3)]
    assert [each.wait(120) for each in together] == [0, 0, 0]
    assert [each.suffix for each in (tmp_path / "built").iterdir()] == [".so"]
