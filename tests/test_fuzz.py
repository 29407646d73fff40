"""The short form of benchmarks/fuzz.py: 200 damaged inputs, always the same."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from fuzz import run_cases, targets


@pytest.mark.slow
def test_damaged_inputs_are_read_or_refused_with_a_word(tmp_path):
    (tmp_path / "made").mkdir()
    made = targets(tmp_path / "made")
    outcome = run_cases(made, list(range(200)), seed=8, workers=2, keep=tmp_path / "faults")
    assert outcome.faults == []
    assert outcome.counts.total() == 200
    assert all(outcome.counts[name, "right"] for name in made)
    assert all(outcome.counts[name, "refused"] for name in made if name != "checkpoint")  # of which the older is taken
