"""Memory that really runs out in the midst of a run: the address space is limited, and the run goes on with less."""

import gc
import json
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from artel.config import load_run
from artel.errors import OutOfMemory, WorkError
from artel.host import process_memory
from artel.models.compile import repeated_layers
from artel.models.forward_pass import forget_failed_pass
from artel.parallel import World
from artel.preparing import prepare
from artel.storage.unexpected_errors import machine_error
from artel.training.loop import train
from artel.training.micro_batch import MemoryLimit, MicroBatchPlan, next_smaller
from support.messages import logged
from support.ranks import run_ranks
from support.runs import largest_difference, losses, write_run

# Every tensor of over 64 KiB is taken from the system for itself, and given back: what is limited is what tensors take.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
WIDE = {"data": {"block": 128, "validation": 0}, "train": {"batch": 64, "steps": 6}, "checkpoint": {"every": 2}}
DEEP = {"n_layer": 12, "n_embd": 64}  # 40 MB a row of 512 tokens, 6 when all is computed again


@pytest.mark.parametrize(
    ("fitting", "share", "expected"),
    [
        (MicroBatchPlan(64, "none"), 64, MicroBatchPlan(32, "none")),
        (MicroBatchPlan(64, "none"), 10, MicroBatchPlan(5, "none")),  # no more than the share was ever run
        (MicroBatchPlan(8, "selective"), 10, MicroBatchPlan(3, "selective")),  # 10 by at most 8 are two of 5
        (MicroBatchPlan(3, "full"), 3, MicroBatchPlan(2, "full")),
        (MicroBatchPlan(1, "none"), 9, MicroBatchPlan(1, "full")),
        (MicroBatchPlan(1, "full"), 9, None),
    ],
)
def test_half_is_tried_next_and_then_all_computed_again(fitting, share, expected):
    assert next_smaller(fitting, share) == expected


def test_the_lowest_limit_of_all_processes_holds(tmp_path):
    limit, fitting = MemoryLimit(tmp_path, {"world": 2}), MicroBatchPlan(64, "selective")
    assert limit.apply(fitting, lambda mine: mine) is fitting
    assert limit.apply(fitting, lambda mine: min(mine, 2 * 16 + 1)) == MicroBatchPlan(16, "selective")
    limit.lower(MicroBatchPlan(8, "selective"))
    assert MemoryLimit(tmp_path, {"world": 2}).apply(fitting, lambda mine: mine) == MicroBatchPlan(8, "selective")
    assert MemoryLimit(tmp_path, {"world": 4}).apply(fitting, lambda mine: mine) is fitting
    assert limit.apply(MicroBatchPlan(4, "none"), lambda mine: mine) == MicroBatchPlan(4, "none")
    limit.lower(MicroBatchPlan(1, "full"))
    assert limit.apply(fitting, lambda mine: mine) == MicroBatchPlan(1, "full")


class Ended(Exception):
    """A run's end from outside."""


class Squeeze:
    """A callback: for step 4 a share of what the forward pass of step 3 held is left; `end` ends the run."""

    def __init__(self, share, end=None):
        self.share, self.end, self.held = share, end, 0

    def __call__(self, run):
        limit_memory(None)  # threads that write checkpoints take 8 MiB of address space each
        if run.step == self.end:
            raise Ended
        if run.step == 2:
            self.hook = run.strategy.model.base_model.register_forward_hook(self.look)
        if run.step == 3:
            self.hook.remove()
            gc.collect()
            run.saver.wait()  # safetensors aborts the process where its thread has no memory to write with
            limit_memory(int(self.share * (self.held - process_memory("VmSize"))))

    def look(self, module, inputs, output):
        self.held = max(self.held, process_memory("VmSize"))


class Nothing:
    """A callback: once a single row is run with all computed again, nothing is left for the step after."""

    def __call__(self, run):
        if run.batch_plan == MicroBatchPlan(1, "full"):
            layer = repeated_layers(run.strategy.model)[0]
            layer.register_forward_pre_hook(lambda module, inputs: self.leave_nothing(run))

    def leave_nothing(self, run):
        run.saver.wait()  # as above: step 4's checkpoint is being written
        limit_memory(3 * 2**20)


def limit_memory(more):
    """So many bytes of address space beside those taken; None for as many as there are."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard if more is None else process_memory("VmSize") + more, hard))


def run(name, callbacks, processes, **changes):
    """What was said."""
    config = load_run(str(write_run(Path(os.environ["PLACE"], f"{name}.yaml"), **changes)), {})
    said = logged()
    try:
        train(config, prepare(config), processes, callbacks=callbacks)
    except (Ended, WorkError) as error:
        said.append(f"{type(error).__name__}: {error}")
    finally:
        limit_memory(None)
    return said


def changed(**train):
    return WIDE | {"train": WIDE["train"] | train}


def alone(rank, world):
    """All that one process goes through."""
    processes = World(0, 1, 0, torch.device("cpu"))
    results = {"whole": run("whole", [], processes, **changed(activation_checkpointing="none"))}
    for size in (64, "auto"):
        changes = changed(micro_batch=size, activation_checkpointing="none")
        results[f"{size} ended"] = run(f"{size}", [Squeeze(0.75, end=5)], processes, **changes)
        results[f"{size} again"] = run(f"{size}", [], processes, **changes)
    deep = WIDE | {"model": {"config": DEEP}, "data": WIDE["data"] | {"block": 512}}
    deep["train"] = {"batch": 2, "steps": 5, "micro_batch": 2}
    results["deep"] = run("deep", [Squeeze(0.35)], processes, **deep)
    results["nothing"] = run("nothing", [Squeeze(0.35), Nothing()], processes, **deep)
    return results


@pytest.mark.processes
def test_a_process_alone_goes_on_with_less(tmp_path):
    (results,) = run_ranks(1, __file__, "alone", seconds=200, PLACE=str(tmp_path), **MEMORY)
    for size, before, after in ((64, 64, 32), ("auto", 32, 16)):
        said = results[f"{size} ended"]
        message = f"step 4: out of memory with micro-batches of {before}; tried again with micro-batches of {after}"
        assert message in said
        assert said[-1].startswith("Ended")
        again = "\n".join(results[f"{size} again"])
        assert f"micro-batches of {after}, not {before}: memory ran out" in again
        assert "resuming from step 4" in again
        # Same global batches, and nothing counted twice.
        assert largest_difference(losses(tmp_path / "whole"), losses(tmp_path / f"{size}")) < 1e-5
    said = "\n".join(results["deep"])
    assert "out of memory with micro-batches of 2; tried again with micro-batches of 1\n" in said
    assert "out of memory with micro-batches of 1; tried again with micro-batches of 1 and all computed again" in said
    assert sorted(losses(tmp_path / "deep")) == [1, 2, 3, 4, 5]
    last = results["nothing"][-1]
    assert last.startswith("WorkError: step 5: out of memory with a single sample in a micro-batch")
    assert "data.block" in last


def together(rank, world):
    """Rank 1 is out of memory, both end, and start again as a launcher starts them."""
    processes = World(rank, world, rank, torch.device("cpu"), on_host=world)
    config = load_run(str(Path(os.environ["PLACE"], "two.yaml")), {})
    prepared, messages = prepare(config), logged()
    try:
        train(config, prepared, processes, callbacks=[Squeeze(0.75)] if rank == 1 else [])
    except OutOfMemory as error:
        messages += [str(error), error.exit_code]
    except RuntimeError:
        messages.append("lost its peers")
    limit_memory(None)
    dist.destroy_process_group()
    where = Path(os.environ["PLACE"], "meeting").as_uri()
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
    train(config, prepared, processes)
    return messages


@pytest.mark.processes
def test_of_several_processes_all_start_again_with_less(tmp_path):
    changes = changed(micro_batch=32, activation_checkpointing="none")
    config = load_run(str(write_run(tmp_path / "two.yaml", **changes)), {})
    prepare(config)
    first, second = run_ranks(2, __file__, "together", seconds=200, PLACE=str(tmp_path), **MEMORY)
    assert "lost its peers" in first
    assert second[-1] == 76
    assert "step 4: out of memory on process 1 with micro-batches of 32" in second[0]
    assert "resumes with micro-batches of 16" in second[0]
    after = "\n".join(str(line) for line in first[first.index("lost its peers") :])
    assert "micro-batches of 16, not 32" in after
    assert "resuming from step 2" in after
    (remembered,) = (tmp_path / "two" / "micro_batches").glob("limit-*.json")
    assert json.loads(remembered.read_bytes())["size"] == 16
    assert sorted(losses(tmp_path / "two")) == [1, 2, 3, 4, 5, 6]


def test_memory_of_a_gpu_has_remedies_of_its_own():
    error = machine_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert error is not None
    assert "the GPU has no more: CUDA out of memory" in str(error)
    assert "train.micro_batch" in str(error)


class FailsOnce(torch.autograd.Function):
    """Memory that runs out in a backward pass."""

    left = 0

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        if FailsOnce.left:
            FailsOnce.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient


class Layer(torch.nn.Linear):
    def forward(self, values):
        return FailsOnce.apply(super().forward(values))


@pytest.mark.processes
@pytest.mark.ci
def test_sharded_layers_exchange_gradients_after_a_pass_that_failed(tmp_path):
    """fully_shard takes the next backward pass for the rest of that one, unless it is told to forget it."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(Layer(4, 4), Layer(4, 4), torch.nn.Linear(4, 4))
        for module in (*model[:2], model):
            fully_shard(module)
        forget_failed_pass(model)  # before any pass
        FailsOnce.left = 1
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.ones(2, 4)).sum().backward()
        forget_failed_pass(model)
        assert all(parameter.grad is None for parameter in model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
