"""A part of the table that benchmarks/parity.py makes: layouts, and combinations of them, beside one process."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from parity import cells, measure, packed, preferences

OF_TWO = ["zero1-2", "fsdp-2", "tensor-2", "sequence-2", "context-2", "expert-2", "pipeline-1f1b-2", "deepspeed-3"]
OF_FOUR = ["hsdp-2x2", "fsdp-tensor-2x2", "tensor-context-2x2", "expert-fsdp-2x2", "tensor-pipeline-2x2",
           "pipeline-fsdp-2x2"]  # fmt: skip
# A model for which each can be: with both optimizers, clipping, packed documents and accumulation.
REFUSED = {"expert-2": "has no experts", "expert-fsdp-2x2": "has no experts"}


@pytest.mark.ci
@pytest.mark.processes
@pytest.mark.parametrize(("model", "layouts"), [("gpt2", OF_TWO), ("qwen3_moe", OF_FOUR)])
def test_the_numbers_are_those_of_one_process(tmp_path, model, layouts):
    results = {}
    for part in measure(tmp_path, cells([model], layouts), steps=4, seconds=400):
        results |= part
    assert len(results) == len(layouts)
    for (layout, _), value in results.items():
        if layout in REFUSED and model == "gpt2":
            assert isinstance(value, str)
            assert REFUSED[layout] in value
        else:
            assert not isinstance(value, str), value
            assert value < 1e-5, (layout, model)


@pytest.mark.processes
def test_preferences_are_those_of_one_process(tmp_path):
    """A pair in one row, and in a pipeline in two; a head that is sharded by vocabulary, and by DeepSpeed."""
    cells = preferences(tmp_path, ["fsdp-2", "tensor-2", "pipeline-1f1b-2", "deepspeed-3"])
    results = {}
    for part in measure(tmp_path, cells, steps=4, seconds=400):
        results |= part
    assert results.keys() == cells.keys()
    for cell, value in results.items():
        assert not isinstance(value, str), value
        assert value < 1e-5, cell


@pytest.mark.processes
def test_packed_conversations_have_the_numbers_of_one_process(tmp_path):
    layouts = ["ddp-2", "fsdp-2", "tensor-2", "context-2", "pipeline-1f1b-2"]
    for part in measure(tmp_path, packed(tmp_path, layouts), steps=4, seconds=400):
        for (layout, _), value in part.items():
            assert not isinstance(value, str), value
            assert value < 1e-5, layout
