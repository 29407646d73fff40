"""The way of a batch from the loop to the loss, as docs/architecture.md prints it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs import ENVIRONMENT
from support.waiting import LIMIT

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.ci
@pytest.mark.processes
def test_a_batch_enters_at_most_twelve_files_and_each_once():
    command = [sys.executable, "scripts/walk_a_batch.py"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    files = [line.split()[1] for line in done.stdout.splitlines()]
    assert files[0] == "training/loop.py"
    assert files[-1] == "models/loss.py"
    assert len(set(files)) == len(files) <= 12
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    printed = re.search(r"<!-- python scripts/walk_a_batch.py -->\n```text\n(.*?)```", page, re.S)
    assert printed is not None
    assert printed[1] == done.stdout
