"""Plans of runs with a DeepSpeed file: what its engine holds on two processes, what moves, and what is refused."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from artel.config import parse_run
from artel.errors import InputError
from artel.planning.hardware import find_hardware
from artel.planning.operations import DISK, HOST, TRANSFER
from artel.planning.plan import describe, make_plan
from artel.planning.plan.deepspeed import Sizes, ZeroSettings
from artel.planning.plan.live_bytes import COMMUNICATION, GRADIENTS, OPTIMIZER, WEIGHTS
from support.deepspeed_cases import (
    bare_objective,
    cpu_processes,
    pytorch_optimizer,
    resolve,
    train_section,
    train_steps,
)
from support.ranks import run_ranks
from support.runs import DEEPSPEED, TINY, merged

BUCKET = 20_000
CASES = [(1, "bf16", "cpu"), (2, "fp32", "none"), (2, "bf16", "cpu"), (3, "fp32", "none"), (3, "bf16", "none"),
         (3, "bf16", "cpu")]  # fmt: skip


def model_config():
    from transformers import GPT2Config

    return GPT2Config(vocab_size=1001, n_positions=32, n_embd=96, n_layer=3, n_head=3, bos_token_id=0, eos_token_id=0,
                      resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip


def zero_section(stage, place):
    section = {"stage": stage, "reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0}
    if place != "none":
        section["offload_optimizer"] = {"device": place}
    if place != "none" and stage == 3:
        section["offload_param"] = {"device": place}
    return section


def live_storages():
    """Bytes of each storage that a tensor has, by its address, and the tensors."""
    gc.collect()
    # isinstance() would import the modules that transformers loads lazily.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}, tensors


def held_by_two(rank, world):
    """Bytes of all tensors of a process between two steps, by case."""
    sys.path.append(str(DEEPSPEED))
    from transformers import GPT2LMHeadModel

    from artel.parallel.deepspeed.engine import DeepSpeedStrategy

    held = []
    for stage, precision, place in CASES:
        earlier, kept = live_storages()  # kept: what a case leaves may be freed during the next one
        torch.manual_seed(1)
        model = GPT2LMHeadModel(model_config())
        section = train_section(world, precision=precision)
        with tempfile.TemporaryDirectory() as folder:
            resolved = resolve({"zero_optimization": zero_section(stage, place)}, folder, world=world, **section)
        strategy = DeepSpeedStrategy(model, bare_objective(), cpu_processes(rank, world), resolved)
        optimizer = strategy.own_optimizer(pytorch_optimizer(model, resolved.config.train), 2, 4)
        train_steps(strategy, optimizer, 0, 2, rank, world)
        now, _ = live_storages()
        held.append(sum(size for address, size in now.items() if address not in earlier))
        strategy.engine.destroy()
        del strategy, optimizer, model, resolved, kept
    return held


@pytest.mark.processes
@pytest.mark.usefixtures("deepspeed_beside")
def test_between_steps_the_engine_holds_what_is_planned(tmp_path):
    """Weights, optimizer state, gradients and buffers that stay; not what exists only during a pass."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(model_config())
    sizes = Sizes.measure(model)
    for case, *held in zip(CASES, *run_ranks(2, __file__, "held_by_two"), strict=True):
        stage, precision, place = case
        tree = {"zero_optimization": zero_section(stage, place) | {"stage3_max_live_parameters": 0}}
        if stage < 3:
            tree["zero_optimization"]["reduce_bucket_size"] = 0
        zero = settings(tmp_path, tree, {"train": train_section(2, precision=precision)}, find_hardware("cpu:2"), 2)
        placement = zero.place(sizes, 8 * sizes.trained // 2, 2, model.config, on_gpu=True)
        kinds = (WEIGHTS, OPTIMIZER, COMMUNICATION, *[GRADIENTS] * (stage == 3))
        planned = sum(placement.device[kind] for kind in kinds) + sum(placement.host.values())
        if (stage, place) == (2, "cpu"):  # a weight that two processes share has a whole gradient on each
            assert all(planned <= each <= 1.02 * planned for each in held), case
        else:
            assert held == pytest.approx([planned] * 2, rel=2e-3), case


def settings(folder: Path, tree, changes, hardware, world_size):
    file = folder / "ds.json"
    file.write_text(json.dumps(tree))
    run = parse_run(merged(merged(TINY, changes), {"parallel": {"deepspeed": str(file)}}), {}, {})
    return ZeroSettings.read(run, hardware, world_size)


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
         "num_attention_heads": 4}  # fmt: skip


def plan_of(folder, tree, hardware, **changes):
    file = folder / "ds.json"
    file.write_text(json.dumps(tree))
    changes = merged(
        {"model": {"config": LLAMA}, "train": {"batch": 8, "micro_batch": 2, "precision": "bf16"}}, changes
    )
    run = parse_run(merged(merged(TINY, changes), {"parallel": {"deepspeed": str(file)}}), {}, {})
    return make_plan(run, hardware)


def test_each_offload_takes_memory_off_the_gpu_and_time(tmp_path):
    """The optimizer on the host, then weights too, then both on disks."""
    node = find_hardware("h100-80gb:2", host_memory="1TB")
    places = ["none", "cpu", "nvme"]
    plans = [plan_of(tmp_path, {"zero_optimization": zero_section(3, place)}, node) for place in places]
    on_gpu, on_host, on_disk = plans
    held = [sum(plan.fullest.by_kind.get(kind, 0) for kind in (WEIGHTS, GRADIENTS, OPTIMIZER)) for plan in plans]
    assert held[0] > 0
    assert held[1:] == [0, 0]
    assert on_host.host_bytes > on_disk.host_bytes - 2 * on_disk.fullest.swapped
    added = [set(plan.step.by_kind) & {TRANSFER, HOST, DISK} for plan in plans]
    assert added == [set(), {TRANSFER, HOST}, {HOST, DISK}]  # copies hide behind the slower disks
    seconds = [plan.step.seconds.mid for plan in plans]
    assert seconds == sorted(seconds)
    assert "swapped on each host" in on_disk.disk
    assert "optimizer on the host" in describe(on_host)
    assert "a step" not in describe(on_gpu)


def test_the_first_host_holds_a_whole_checkpoint(tmp_path):
    """The engine gathers float32 weights and both averages on the first process, whatever the stage."""
    node = find_hardware("h100-80gb:2")
    plan = plan_of(tmp_path, {"zero_optimization": {"stage": 3}}, node)
    assert plan.gathered_bytes == pytest.approx(12 * plan.parameters["total"], rel=0.01)
    assert plan.host_bytes > plan.gathered_bytes
    assert "on the first host to save" in describe(plan)


def test_a_file_for_another_machine_is_read_here(tmp_path):
    """Its disk need not exist here, and DeepSpeed need not be installed."""
    tree = {"zero_optimization": zero_section(3, "nvme"), "train_micro_batch_size_per_gpu": 4}
    tree["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/nowhere/nvme"
    zero = settings(tmp_path, tree, {"train": {"batch": 16, "precision": "auto"}}, find_hardware("a100-80gb:2"), 2)
    assert (zero.stage, zero.optimizer, zero.parameters, zero.micro_batch) == (3, "nvme", "nvme", 4)
    assert zero.precision == "bf16"  # both files leave it open, and an A100 has it
    old = {"zero_optimization": {"stage": 2, "cpu_offload": True}, "fp16": {"enabled": True}}
    zero = settings(tmp_path, old, {"train": {"precision": "auto"}}, find_hardware("v100-32gb:2"), 2)
    assert (zero.optimizer, zero.parameters, zero.precision) == ("cpu", "none", "fp16")


def test_what_training_would_refuse_is_not_planned(tmp_path):
    tree = {"zero_optimization": {"stage": 5}, "train_batch_size": 7, "tensor_parallel": {"autotp_size": 2}}
    changes = {"train": {"ema": 0.9}, "parallel": {"tensor": 2}}
    with pytest.raises(InputError) as caught:
        settings(tmp_path, tree, changes, find_hardware("h100-80gb:2"), 2)
    where = " ".join(problem.where for problem in caught.value.problems)
    assert all(key in where for key in ("stage", "train_batch_size", "tensor_parallel", "train.ema", "parallel"))
