"""DeepSpeed: the same numbers as one process under every stage of ZeRO, and its checkpoints."""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from artel.errors import InputError
from support.deepspeed_cases import (
    OFFLOAD,
    ROWS,
    SMALL,
    bare_objective,
    batch_of_step,
    cpu_processes,
    gpt2_config,
    pytorch_optimizer,
    relative_difference,
    resolve,
    run_of,
    train_section,
    train_steps,
)
from support.ranks import run_ranks
from support.runs import DEEPSPEED

pytestmark = pytest.mark.usefixtures("deepspeed_beside")

STEPS = 4
CASES = {
    "0": {"stage": 0},
    "1": {"stage": 1, "reduce_bucket_size": 3000},
    "2": {"stage": 2, "reduce_bucket_size": 3000},
    "3": {"stage": 3, **SMALL},
    "2 offloaded": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3 offloaded": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, **SMALL},
}
OPTIMIZERS = {"sgd": {"optimizer": "sgd", "momentum": 0.9}, "adamw": {"optimizer": "adamw"}}
SKIPPED = {("adamw", "0"), ("adamw", "2 offloaded"), ("adamw", "3 offloaded")}  # sgd shows as much


def _model(seed, *, frozen=False):
    from transformers import GPT2LMHeadModel

    torch.manual_seed(seed)
    model = GPT2LMHeadModel(gpt2_config())
    if frozen:
        model.transformer.wpe.requires_grad_(False)
        model.transformer.h[0].requires_grad_(False)
    return model


def _alone(train, *, frozen=False):
    """One process with artel's own optimizer: its steps, weights and state halfway, how it judges, what it writes."""
    from artel.parallel import DataParallel
    from artel.training.optim.optimizer import Optimizer

    model = _model(0, frozen=frozen)
    layout, optimizer = DataParallel(model, bare_objective(), cpu_processes(0, 1), "fp32"), Optimizer(model, train)
    steps = train_steps(layout, optimizer, 0, STEPS // 2, 0, 1)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = {name: value.clone() for name, value in optimizer.state().items()}
    steps += train_steps(layout, optimizer, STEPS // 2, STEPS, 0, 1)
    judged = layout.evaluate([(batch_of_step(9, 0), np.arange(2)), (batch_of_step(9, 1), np.arange(2))], 4)[0]
    return steps, weights, state, judged["loss"], _written(model)


def _written(model):
    return model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False).tolist()


def _everywhere(value):
    box = [value]
    torch.distributed.broadcast_object_list(box)
    return box[0]


def _opened(tree, train, rank, world, seed, *, recomputed="none", frozen=False):
    from artel.models.activation_checkpointing import recompute
    from artel.parallel.deepspeed.engine import DeepSpeedStrategy

    with tempfile.TemporaryDirectory() as folder:
        resolved = resolve(tree, folder, world=world, **train)
    model = _model(seed, frozen=frozen)
    recompute(model, recomputed)
    layout = DeepSpeedStrategy(model, bare_objective(), cpu_processes(rank, world), resolved)
    return layout, layout.own_optimizer(pytorch_optimizer(model, resolved.config.train), ROWS, STEPS)


def _apart(one, other):
    """The largest difference of tensors by name, relative to the largest of each."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-3)) for name in other)


def both_ranks(rank, world):
    sys.path.append(str(DEEPSPEED))
    results = {}
    for kind, changes in OPTIMIZERS.items():
        train = train_section(world, **changes)
        expected, weights, state, judged, written = _alone(run_of(**train).train)
        for name, zero in CASES.items():
            if (kind, name) in SKIPPED:
                continue
            tree, half = {"zero_optimization": zero}, STEPS // 2
            layout, optimizer = _opened(tree, train, rank, world, seed=0)
            steps = train_steps(layout, optimizer, 0, half, rank, world)
            case = {
                "weights": _apart(_everywhere(optimizer.weights()), weights),
                "state": _apart(_everywhere(optimizer.state()), state),
            }
            # Another engine, begun from other weights, goes on from what one process holds halfway.
            layout, optimizer = _opened(tree, train, rank, world, seed=1)
            optimizer.load_weights(weights)
            optimizer.load(state)
            case["loaded"] = _apart(_everywhere(optimizer.weights()), weights)
            case["loaded"] += _apart(_everywhere(optimizer.state()), state)
            steps += train_steps(layout, optimizer, half, STEPS, rank, world)
            case["steps"] = relative_difference(steps, expected)
            case["judged"] = abs(layout.evaluate([(batch_of_step(9, rank), np.arange(2))], 4)[0]["loss"] / judged - 1)
            with layout.generating() as takes_part:
                case["written"] = not takes_part or _written(layout.model.eval()) == written
            results[f"{kind}, stage {name}"] = case
    return results


@pytest.mark.ci
@pytest.mark.processes
def test_two_processes_train_as_one_under_every_stage():
    results = run_ranks(2, __file__, "both_ranks", seconds=400)
    assert len(results[0]) == len(OPTIMIZERS) * len(CASES) - len(SKIPPED)
    for rank in results:
        for name, case in rank.items():
            assert case["steps"] < 1e-5, (name, case)
            assert case["loaded"] == 0, (name, case)
            assert case["judged"] < 1e-5, (name, case)
            assert case["written"], name
            # Adam divides by the root of tiny averages: what is noise there is a whole step.
            assert case["state"] < 1e-4, (name, case)
            assert case["weights"] < (1e-5 if name.startswith("sgd") else 1e-2), (name, case)


def both_ranks_further(rank, world):
    sys.path.append(str(DEEPSPEED))
    from artel.parallel.deepspeed.checkpoint import read_zero_checkpoint

    train, results = train_section(world, **OPTIMIZERS["sgd"]), {}
    expected = _alone(run_of(**train).train)[0][:1]
    folder = Path(_everywhere(tempfile.mkdtemp(prefix="artel-zero-")))
    for name in ("0", "2", "3"):
        tree = {"zero_optimization": CASES[name]}
        layout, optimizer = _opened(tree, train, rank, world, seed=0, recomputed="full")
        results[f"recomputed {name}"] = relative_difference(train_steps(layout, optimizer, 0, 1, rank, world), expected)
        weights = _everywhere(optimizer.weights())
        layout.engine.save_checkpoint(str(folder / name))
        torch.distributed.barrier()
        read = {key.removeprefix("model."): value for key, value in read_zero_checkpoint(folder / name).items()}
        results[f"read {name}"] = _apart({key: read[key] for key in weights}, weights)
        if name != "0":
            layout.run([batch_of_step(0, 0), batch_of_step(0, 1)], float("nan"))
            norm, right = optimizer.clip_and_step(1.0, layout.gradient_norm())
            results[f"nan {name}"] = [float(norm), bool(right), _apart(_everywhere(optimizer.weights()), weights)]
    torch.distributed.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    alone = _alone(run_of(**train).train, frozen=True)[0][:1]
    layout, optimizer = _opened({"zero_optimization": CASES["3"]}, train, rank, world, seed=0, frozen=True)
    results["frozen"] = relative_difference(train_steps(layout, optimizer, 0, 1, rank, world), alone)
    layout, optimizer = _opened(OFFLOAD, train | {"clip": 1.0, "precision": "auto"}, rank, world, seed=0)
    results["a file for eight GPUs"] = relative_difference(train_steps(layout, optimizer, 0, 1, rank, world), expected)
    try:
        _opened({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}, train, rank, world, seed=0)
    except InputError as error:
        results["refused"] = str(error)
    return results


@pytest.mark.processes
def test_files_checkpoints_and_gradients_of_all_kinds():
    for result in run_ranks(2, __file__, "both_ranks_further", seconds=400):
        assert "DeepSpeed does not accept it" in result.pop("refused")
        for name, value in result.items():
            if name.startswith("nan"):
                assert value == [float("inf"), False, 0.0], name  # the step is left out, and the run stops
            else:
                assert value < 1e-5 if not name.startswith("read") else value == 0, (name, value)


@dataclass
class Anything:
    """What an unpickled file could make."""

    value: int = 0


def test_a_checkpoint_with_more_than_plain_data_is_refused(tmp_path):
    from artel.parallel.deepspeed.checkpoint import read_zero_checkpoint

    torch.save({"module": {}, "client": Anything()}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(InputError, match=r"holds a .*Anything"):
        read_zero_checkpoint(tmp_path)
    with pytest.raises(InputError, match="is not a DeepSpeed checkpoint"):
        read_zero_checkpoint(tmp_path / "elsewhere")
