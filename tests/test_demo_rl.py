"""`make demo-rl` with fewer steps: a killed and an undisturbed run end with the same weights."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs import ENVIRONMENT
from support.waiting import LIMIT

SCRIPT = Path(__file__).resolve().parents[1] / "scripts/demo_rl.py"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.processes
def test_the_killed_run_ends_with_the_hash_of_the_undisturbed_one():
    words = ["--folder", "demo", "--base-steps", "200", "--steps", "6"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    hashes = re.findall(r"^([0-9a-f]{64})  demo/(?:killed|undisturbed)/model", done.stdout, re.MULTILINE)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert re.search(r"Right in unseen sums: [\d.]+% before, [\d.]+% after", done.stdout)
