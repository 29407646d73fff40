"""DeepSpeed: users' files as they are, and the same numbers as one process under every stage of ZeRO.

It lies beside the environment (see the Makefile): once it is installed, accelerate imports it to save any model.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from artel.config import RunConfig
from artel.errors import InputError
from ranks import run_ranks

BESIDE = Path(sys.prefix) / "deepspeed"
pytestmark = pytest.mark.skipif(not BESIDE.is_dir(), reason="deepspeed is not beside the environment: see the Makefile")


@pytest.fixture(autouse=True, scope="module")
def importable():
    """For these tests alone: trl takes accelerate for one that has deepspeed, wherever that can be imported."""
    sys.path.append(str(BESIDE))
    yield
    sys.path.remove(str(BESIDE))
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# As large runs have it: eight GPUs, both offloads, sizes as floats, fp16, batch keys left open.
OFFLOAD = {
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 1e9,
        "stage3_prefetch_bucket_size": 1e9,
        "stage3_param_persistence_threshold": 1e9,
    },
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1},
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}  # fmt: skip
# As in transformers' documentation of its integration.
ALL_AUTO = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto",
                                                      "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                          "stage3_param_persistence_threshold": "auto", "overlap_comm": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


def run_of(**train):
    return RunConfig.model_validate({"data": {"sources": [{"format": "dummy"}]}, "train": train})


def resolve(tree, folder, *, world=2, device=CPU, **train):
    from artel.parallel.deepspeed_config import read_deepspeed

    file = Path(folder) / "ds_config.json"
    file.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return read_deepspeed(str(file), run_of(**train), world, device)


def faults(tree, folder, **more) -> dict[str, str]:
    """What is said against a file, by key."""
    with pytest.raises(InputError) as caught:
        resolve(tree, folder, **more)
    return {problem.where.rpartition(": ")[2]: f"{problem.what}; {problem.fix}" for problem in caught.value.problems}


def test_a_file_for_eight_gpus_is_taken_as_it_is(tmp_path):
    found = resolve(OFFLOAD, tmp_path, world=8, device=GPU, batch=64, micro_batch=2)
    assert (found.stage, found.precision, found.micro_batch, found.notes) == (3, "fp16", 2, ())
    settings = found.complete(_config(), 100, 2)
    batch = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert [settings[key] for key in batch] == [2, 4, 64]
    assert settings["fp16"] == OFFLOAD["fp16"]
    assert settings["zero_optimization"] == OFFLOAD["zero_optimization"]
    for key in ("sub_group_size", "reduce_bucket_size", "stage3_prefetch_bucket_size"):
        assert type(settings["zero_optimization"][key]) is int


def test_on_a_cpu_it_runs_with_what_that_has_and_says_so(tmp_path):
    found = resolve(OFFLOAD, tmp_path, batch=64, micro_batch=2)
    assert found.precision == "fp32"
    told = "\n".join(found.notes)
    assert "fp16 is replaced by fp32" in told
    assert "offload_param.pin_memory is off" in told
    assert "offload_optimizer.pin_memory is off" in told
    settings = found.complete(_config(), 100, 2)
    assert not settings["fp16"]["enabled"]
    assert not settings["zero_optimization"]["offload_param"]["pin_memory"]


def test_auto_is_what_the_run_file_says(tmp_path):
    found = resolve(ALL_AUTO, tmp_path, batch=24, micro_batch=3, schedule="linear", clip=0.5, precision="bf16")
    assert (found.stage, found.precision, found.micro_batch) == (3, "bf16", 3)
    assert any("overlap_comm is DeepSpeed's own default" in note for note in found.notes)
    assert any("steps_per_print" in note and "log.every" in note for note in found.notes)
    settings = found.complete(_config(), 100, 3)
    zero = settings["zero_optimization"]
    assert zero["reduce_bucket_size"] == 33 * 33
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 33 * 33)
    assert zero["stage3_param_persistence_threshold"] == 330
    assert (settings["gradient_clipping"], settings["gradient_accumulation_steps"]) == (0.5, 4)
    assert "auto" not in json.dumps(settings)
    assert not settings.keys() & {"optimizer", "scheduler"}  # artel's own lead


def test_a_batch_that_only_one_of_both_files_cuts(tmp_path):
    file = {"train_micro_batch_size_per_gpu": 4}
    assert resolve(file, tmp_path, batch=64).micro_batch == 4
    assert resolve({"gradient_accumulation_steps": 8}, tmp_path, batch=64).micro_batch == 4
    assert resolve({}, tmp_path, batch=64).micro_batch is None
    assert resolve({}, tmp_path, batch=64, micro_batch=8).micro_batch == 8


def test_all_that_differs_from_the_run_file_is_told_at_once(tmp_path):
    tree = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "amsgrad": True}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bukket_size": 5e8, "overlap_comm": "maybe",
                              "offload_optimizer": {"device": "cpu", "pin_memry": True}},
        "gradient_cliping": 1.0,
        "tensor_parallel": {"autotp_size": 4},
    }  # fmt: skip
    found = faults(tree, tmp_path, batch=64, micro_batch=8, precision="fp32")
    assert found.keys() == {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "optimizer.params.lr", "optimizer.params.eps", "optimizer.params.amsgrad", "scheduler.type", "bf16.enabled",
        "zero_optimization.reduce_bukket_size", "zero_optimization.overlap_comm",
        "zero_optimization.offload_optimizer.pin_memry", "gradient_cliping", "tensor_parallel",
    }  # fmt: skip
    assert "train.batch: 32" in found["train_batch_size"]
    assert "4 micro-batches of 8" in found["gradient_accumulation_steps"]
    assert "0.0003, and train.learning_rate is 5e-05" in found["optimizer.params.lr"]
    assert "did you mean reduce_bucket_size?" in found["zero_optimization.reduce_bukket_size"]
    assert "did you mean pin_memory?" in found["zero_optimization.offload_optimizer.pin_memry"]
    assert "did you mean gradient_clipping?" in found["gradient_cliping"]


@pytest.mark.parametrize(
    ("tree", "key", "words", "train"),
    [
        ('{"fp16": {"enabled": true},}\n{', "json:1", "is no JSON", {}),
        ('{"fp16": {}, "fp16": {}}', "json", "keys twice: fp16", {}),
        ("[1]", "json", "is no DeepSpeed configuration", {}),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "write 0, 1, 2 or 3", {}),
        ({"train_batch_size": 1.5}, "train_batch_size", "whole number", {}),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled", "both true", {}),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", "train.optimizer is adamw", {}),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "optimizer.type", "is adam", {}),
        ({"amp": {"enabled": True}}, "amp", "has it no more", {}),
        ({"compile": {"deepcompile": True}}, "compile", "train.compile", {}),
        ({}, "train.optimizer", "write adamw or sgd", {"optimizer": "adafactor"}),
        ({}, "train.weights", "write fp32", {"weights": "bf16"}),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}},
         "zero_optimization.offload_param.nvme_path", "is no folder", {}),
        ({"zero_optimization": {"stage": 3, "zenflow": {}}}, "zero_optimization.zenflow", "of its own", {}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(tree, key, words, train, tmp_path):
    with pytest.raises(InputError) as caught:
        resolve(tree, tmp_path, **train)
    assert any(problem.where.endswith(key) and words in str(problem) for problem in caught.value.problems), caught.value


def test_comments_and_old_forms_are_understood(tmp_path):
    text = '{\n  // two\n  "zero_optimization": true, "amp": {"enabled": false},\n  "bfloat16": {"enabled": true}\n}'
    found = resolve(text, tmp_path, device=GPU)
    assert (found.stage, found.precision) == (1, "bf16")
    found = resolve({"zero_optimization": {"stage": 2, "cpu_offload": True}}, tmp_path, precision="fp32")
    assert found.settings["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    found = resolve({"bf16": {"enabled": True}}, tmp_path, device=GPU)
    assert found.stage == 1
    assert "is run as 1" in found.notes[0]


def test_a_schedule_of_another_length_is_refused_when_the_run_s_is_known(tmp_path):
    block = {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 10}}
    found = resolve({"scheduler": block}, tmp_path, schedule="linear", warmup=10)
    assert "scheduler" not in found.complete(_config(), 1000, 2)
    with pytest.raises(InputError, match=r"total_num_steps: is 1,000, and of this run's 500 steps"):
        found.complete(_config(), 500, 2)


# What two processes do

STEPS = 4
ROWS, ACCUMULATION = 2, 2
# Buckets and pieces smaller than some parameters, and no parameter spared from being shared out.
SMALL = {"reduce_bucket_size": 3000, "sub_group_size": 5000, "stage3_param_persistence_threshold": 0,
         "stage3_prefetch_bucket_size": 2000}  # fmt: skip
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


def _config():
    from transformers import GPT2Config

    # 33 wide: pieces for two processes are filled up.
    return GPT2Config(vocab_size=101, n_positions=32, n_embd=33, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0,
                      resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip


def _model(seed, *, frozen=False):
    from transformers import GPT2LMHeadModel

    torch.manual_seed(seed)
    model = GPT2LMHeadModel(_config())
    if frozen:
        model.transformer.wpe.requires_grad_(False)
        model.transformer.h[0].requires_grad_(False)
    return model


def _objective():
    from artel.objectives.causal import Causal

    class Bare(Causal):  # the loss needs neither run nor tokenizer
        def __init__(self):
            pass

    return Bare()


def _batch(step, number):
    """Rows with a few to many targets: no two micro-batches have equally many."""
    from artel.objectives import Batch
    from artel.objectives.per_token import target_tensors

    source = np.random.default_rng((step, number))
    ids = source.integers(0, 101, (ROWS, 17))
    targets = ids[:, 1:].copy()
    for row in targets:
        row[: source.integers(0, 15)] = -100
    tensors = {"input_ids": torch.from_numpy(ids[:, :-1].copy())} | target_tensors(targets)
    return Batch(tensors, int((targets != -100).sum()), targets.size)


def _processes(rank, world):
    from artel.parallel import Processes

    return Processes(rank, world, rank, CPU)


def _plain(model, train):
    """PyTorch's optimizer as training makes it."""
    from artel.training.optimizer import plain_optimizer

    return plain_optimizer(model, train, 0)


def _steps(layout, optimizer, first, last, rank, world):
    """(loss, gradient norm) of each step."""
    found = []
    for step in range(first, last):
        batches = [_batch(step, number) for number in range(2 * ACCUMULATION)]
        targets = float(sum(batch.targets for batch in batches))
        share = len(batches) // world
        sums = layout.run(batches[rank * share : (rank + 1) * share], targets)
        norm, right = optimizer.clipped_step(1 / (step + 1), layout.norm())
        assert bool(right)
        found.append((layout.add_up([float(sums[0])])[0] / targets, float(norm)))
    return found


def _alone(train, *, frozen=False):
    """One process with artel's own optimizer: its steps, weights and state halfway, how it judges, what it writes."""
    from artel.parallel import Replicated
    from artel.training.optimizer import Optimizer

    model = _model(0, frozen=frozen)
    layout, optimizer = Replicated(model, _objective(), _processes(0, 1), "fp32"), Optimizer(model, train)
    found = _steps(layout, optimizer, 0, STEPS // 2, 0, 1)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = {name: value.clone() for name, value in optimizer.state().items()}
    found += _steps(layout, optimizer, STEPS // 2, STEPS, 0, 1)
    judged = layout.judge([(_batch(9, 0), np.arange(2)), (_batch(9, 1), np.arange(2))], 4)[0]
    return found, weights, state, judged["loss"], _written(model)


def _written(model):
    return model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False).tolist()


def _everywhere(value):
    box = [value]
    torch.distributed.broadcast_object_list(box)
    return box[0]


def _opened(tree, train, rank, world, seed, *, recomputed="none", frozen=False):
    from artel.models.recomputing import recompute
    from artel.parallel.deepspeed_engine import DeepSpeedLayout

    with tempfile.TemporaryDirectory() as folder:
        resolved = resolve(tree, folder, world=world, **train)
    model = _model(seed, frozen=frozen)
    recompute(model, recomputed)
    layout = DeepSpeedLayout(model, _objective(), _processes(rank, world), resolved)
    return layout, layout.start(_plain(model, resolved.run.train), ROWS, STEPS)


def _apart(one, other):
    """The largest difference of tensors by name, relative to the largest of each."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-3)) for name in other)


def _relative(found, wanted):
    return max(abs(a - b) / abs(b) for one, other in zip(found, wanted, strict=True)
               for a, b in zip(one, other, strict=True))  # fmt: skip


def _train(world, **changes):
    # A rate that moves, and a clip that is reached.
    return {"learning_rate": 0.01, "clip": 0.5, "batch": ROWS * ACCUMULATION * world, "micro_batch": ROWS,
            "precision": "fp32", **changes}  # fmt: skip


def both_ranks(rank, world):
    sys.path.append(str(BESIDE))
    found = {}
    for kind, changes in OPTIMIZERS.items():
        train = _train(world, **changes)
        wanted, weights, state, judged, written = _alone(run_of(**train).train)
        for name, zero in CASES.items():
            if (kind, name) in SKIPPED:
                continue
            tree, half = {"zero_optimization": zero}, STEPS // 2
            layout, optimizer = _opened(tree, train, rank, world, seed=0)
            steps = _steps(layout, optimizer, 0, half, rank, world)
            case = {"weights": _apart(_everywhere(optimizer.weights()), weights),
                    "state": _apart(_everywhere(optimizer.state()), state)}  # fmt: skip
            # Another engine, begun from other weights, goes on from what one process holds halfway.
            layout, optimizer = _opened(tree, train, rank, world, seed=1)
            optimizer.load_weights(weights)
            optimizer.load(state)
            case["loaded"] = _apart(_everywhere(optimizer.weights()), weights)
            case["loaded"] += _apart(_everywhere(optimizer.state()), state)
            steps += _steps(layout, optimizer, half, STEPS, rank, world)
            case["steps"] = _relative(steps, wanted)
            case["judged"] = abs(layout.judge([(_batch(9, rank), np.arange(2))], 4)[0]["loss"] / judged - 1)
            with layout.generating() as takes_part:
                case["written"] = not takes_part or _written(layout.model.eval()) == written
            found[f"{kind}, stage {name}"] = case
    return found


@pytest.mark.processes
def test_two_processes_train_as_one_under_every_stage():
    found = run_ranks(2, __file__, "both_ranks", seconds=400)
    assert len(found[0]) == len(OPTIMIZERS) * len(CASES) - len(SKIPPED)
    for rank in found:
        for name, case in rank.items():
            assert case["steps"] < 1e-5, (name, case)
            assert case["loaded"] == 0, (name, case)
            assert case["judged"] < 1e-5, (name, case)
            assert case["written"], name
            # Adam divides by the root of tiny averages: what is noise there is a whole step.
            assert case["state"] < 1e-4, (name, case)
            assert case["weights"] < (1e-5 if name.startswith("sgd") else 1e-2), (name, case)


def both_ranks_further(rank, world):
    sys.path.append(str(BESIDE))
    from artel.parallel.deepspeed_checkpoint import read_zero_checkpoint

    train, found = _train(world, **OPTIMIZERS["sgd"]), {}
    wanted = _alone(run_of(**train).train)[0][:1]
    folder = Path(_everywhere(tempfile.mkdtemp(prefix="artel-zero-")))
    for name in ("0", "2", "3"):
        tree = {"zero_optimization": CASES[name]}
        layout, optimizer = _opened(tree, train, rank, world, seed=0, recomputed="full")
        found[f"recomputed {name}"] = _relative(_steps(layout, optimizer, 0, 1, rank, world), wanted)
        weights = _everywhere(optimizer.weights())
        layout.engine.save_checkpoint(str(folder / name))
        torch.distributed.barrier()
        read = {key.removeprefix("model."): value for key, value in read_zero_checkpoint(folder / name).items()}
        found[f"read {name}"] = _apart({key: read[key] for key in weights}, weights)
        if name != "0":
            layout.run([_batch(0, 0), _batch(0, 1)], float("nan"))
            norm, right = optimizer.clipped_step(1.0, layout.norm())
            found[f"nan {name}"] = [float(norm), bool(right), _apart(_everywhere(optimizer.weights()), weights)]
    torch.distributed.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    alone = _alone(run_of(**train).train, frozen=True)[0][:1]
    layout, optimizer = _opened({"zero_optimization": CASES["3"]}, train, rank, world, seed=0, frozen=True)
    found["frozen"] = _relative(_steps(layout, optimizer, 0, 1, rank, world), alone)
    layout, optimizer = _opened(OFFLOAD, train | {"clip": 1.0, "precision": "auto"}, rank, world, seed=0)
    found["a file for eight GPUs"] = _relative(_steps(layout, optimizer, 0, 1, rank, world), wanted)
    try:
        _opened({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}, train, rank, world, seed=0)
    except InputError as error:
        found["refused"] = str(error)
    return found


@pytest.mark.processes
def test_files_checkpoints_and_gradients_of_all_kinds():
    for found in run_ranks(2, __file__, "both_ranks_further", seconds=400):
        assert "DeepSpeed refuses it" in found.pop("refused")
        for name, value in found.items():
            if name.startswith("nan"):
                assert value == [float("inf"), False, 0.0], name  # the step is left out, and the run stops
            else:
                assert value < 1e-5 if not name.startswith("read") else value == 0, (name, value)


@dataclass
class Anything:
    """What an unpickled file could make."""

    value: int = 0


def test_a_checkpoint_with_more_than_plain_data_is_refused(tmp_path):
    from artel.parallel.deepspeed_checkpoint import read_zero_checkpoint

    torch.save({"module": {}, "client": Anything()}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(InputError, match=r"holds a .*Anything"):
        read_zero_checkpoint(tmp_path)
    with pytest.raises(InputError, match="no checkpoint of DeepSpeed's"):
        read_zero_checkpoint(tmp_path / "elsewhere")
