"""Models that DeepSpeed's stage 3 shares out while their weights come: the same ones, and no process holds them all."""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from artel.config import ModelConfig, TokenizerTraining
from artel.models.loading.build import build_model
from artel.models.loading.materialize import materialize
from artel.models.loading.request import ModelRequest
from artel.tokens import train_tokenizer
from support import WORKERS
from support.deepspeed_cases import (
    ROWS,
    SMALL,
    bare_objective,
    cpu_processes,
    pytorch_optimizer,
    relative_difference,
    resolve,
    train_section,
    train_steps,
)
from support.ranks import run_ranks
from support.runs import DEEPSPEED, largest_difference, losses, merged, write_run
from support.saved_models import CAUSAL, memory_status, model_cases, saved_by_the_first
from support.tensor_reads import noted_reads

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("deepspeed_beside")]

OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
LARGE = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 40, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 8000}  # fmt: skip


def _built(config, on_meta=False):
    words = train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))
    return build_model(ModelRequest(config, CAUSAL, block=16, seed=3), words, on_meta=on_meta)


def _shared(model_config, rank, world, bring=materialize, **zero):
    """A layout begun from a model without weights, what steps it, and the section `train` of its run."""
    from artel.parallel.deepspeed.engine import DeepSpeedStrategy

    skeleton, train = _built(model_config, on_meta=True), train_section(world, optimizer="sgd", momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        resolved = resolve({"zero_optimization": {"stage": 3, **SMALL, **zero}}, folder, world=world, **train)
    fill = partial(bring, weights=skeleton.weights)
    skeleton.model.eval()  # no dropout
    layout = DeepSpeedStrategy(skeleton.model, bare_objective(), cpu_processes(rank, world), resolved, fill)
    return (
        layout,
        layout.own_optimizer(pytorch_optimizer(skeleton.model, resolved.config.train), ROWS, 4),
        resolved.config.train,
    )


def on_two(rank, world):
    """For each model whether its first weights are those of the whole one, and how far its steps are from that one's;
    and what a process has read of the files."""
    sys.path.append(str(DEEPSPEED))
    from artel.parallel import DataParallel
    from artel.training.optim.optimizer import Optimizer

    read = noted_reads()
    results = {}
    for number, (name, model_config) in enumerate(model_cases(saved_by_the_first(rank)).items()):
        layout, optimizer, train = _shared(model_config, rank, world, **(OFFLOADED if number % 2 else {}))
        weights, whole = optimizer.weights(), _built(model_config).model.eval()
        expected = {key: value for key, value in whole.state_dict().items() if key not in whole.all_tied_weights_keys}
        same = weights.keys() == expected.keys() and all(torch.equal(weights[key], expected[key]) for key in weights)
        alone = train_steps(
            DataParallel(whole, bare_objective(), cpu_processes(0, 1), "fp32"), Optimizer(whole, train), 0, 2, 0, 1
        )
        results[name] = [
            same or rank > 0,
            relative_difference(train_steps(layout, optimizer, 0, 2, rank, world), alone),
        ]
    return {"models": results, "read": sorted(read)}


def test_two_processes_begin_and_train_as_one():
    results = run_ranks(2, __file__, "on_two")
    for rank in results:
        for name, (same, apart) in rank["models"].items():
            assert same, name
            assert apart < 1e-5, (name, apart)
    first, second = (set(rank["read"]) for rank in results)
    assert any(".experts." in name for name in first)
    # Another is sent the first one's values; by itself it sees that two tensors which are tied are saved alike.
    assert second == {"lm_head.weight", "transformer.wte.weight"}


def on_four(rank, world):
    """MB that a process grew by at most while the weights came, and those of all weights."""
    sys.path.append(str(DEEPSPEED))
    _shared(ModelConfig(config=LARGE | {"num_hidden_layers": 1, "vocab_size": 300}), rank, world)  # what is loaded once
    grown = []

    def watched(model, weights, **how):
        before = memory_status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is taken from now on
        materialize(model, weights, **how)
        grown.append(memory_status("VmHWM") - before)

    layout, *_ = _shared(ModelConfig(config=LARGE), rank, world, bring=watched)
    return [grown[0], sum(parameter.ds_numel for parameter in layout.model.parameters()) * 4 / 2**20]


def test_no_process_holds_the_whole_model():
    # Every tensor in memory of its own, as tensors of over 32 MB have it: else holes in the heap are counted too.
    for grown, whole in run_ranks(4, __file__, "on_four", MALLOC_MMAP_THRESHOLD_="65536"):
        assert whole > 160
        assert whole / 4 < grown < whole / 4 + 25, "a quarter and one module"


def test_a_run_checks_writes_and_resumes_under_stage_3():
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, **SMALL}}))
    asked = {
        "data": {"packing": "best_fit"},  # documents apart: what the model makes of that is tried
        "train": {"batch": 8, "micro_batch": 4, "schedule": "constant"},
        "checkpoint": {"every": 3},
        "validate": {"every": 3, "prompts": ["words"]},
    }
    shared = {"run": "two", "parallel": {"deepspeed": "ds.json"}}
    alone = write_run(Path("one.yaml"), **asked)
    three = write_run(Path("three.yaml"), **merged(asked, shared | {"train": {"steps": 3}}))
    six = write_run(Path("six.yaml"), **merged(asked, shared))
    worker = WORKERS / "layout_cases.py"
    for world, files in ((1, [alone]), (2, [three, six])):
        results = run_ranks(world, worker, "run_files", CASES=os.pathsep.join(map(str, files)))
        assert results == [[None] * len(files)] * world
    one, two = losses(Path("one")), losses(Path("two"))
    assert sorted(two) == [1, 2, 3, 4, 5, 6]
    assert largest_difference(one, two) < 1e-5
    written = Path("two/samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == [0, 3, 6]
    trained = [load_file(f"{name}/model/model.safetensors") for name in ("one", "two")]
    assert trained[0].keys() == trained[1].keys()
    for name, tensor in trained[0].items():
        assert torch.allclose(tensor, trained[1][name], atol=1e-3), name
