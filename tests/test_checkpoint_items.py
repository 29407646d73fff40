"""What a checkpoint holds: the model, the optimizer, and what callbacks keep; whole or in pieces."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from artel.config import TrainConfig
from artel.errors import InputError, WorkError
from artel.host import process_memory
from artel.training.checkpoint.format import (
    CheckpointContent,
    Progress,
    full_weights,
    load_checkpoint,
    write_full,
    write_sharded,
)
from artel.training.checkpoint.items import checkpoint_items, collect_states
from artel.training.checkpoint.sharded_files import read_shards, write_shards
from artel.training.optim.optimizer import Optimizer


class Counts:
    """A callback with a state."""

    def __init__(self, value: object = None) -> None:
        self.value = value

    def __call__(self, run) -> None: ...

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]


@pytest.fixture
def optimizer():
    """With a state, of a GPT-2 that was stepped once."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))
    optimizer = Optimizer(model, TrainConfig())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1.0)
    return optimizer


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_callbacks_state_is_saved_and_loaded(tmp_path, optimizer, group, in_pieces):
    counts = Counts(torch.tensor([1.0, 2.0]))
    content = CheckpointContent(
        collect_states(checkpoint_items(optimizer, [counts, print])), Progress(step=3), "run: x\n"
    )
    path = tmp_path / "step-000000003"
    if in_pieces:
        write_sharded(path, content, is_first=True, group=None)
    else:
        write_full(path, content)
    weights = {name: tensor.detach().clone() for name, tensor in optimizer.weights().items()}
    optimizer.load_weights({name: tensor + 1 for name, tensor in weights.items()})
    counts.value = torch.zeros(2)
    assert load_checkpoint(tmp_path, checkpoint_items(optimizer, [counts])).step == 3
    assert counts.value.tolist() == [1.0, 2.0]
    assert all(torch.equal(optimizer.weights()[name], tensor) for name, tensor in weights.items())
    assert full_weights(path).keys() == weights.keys()  # a callback's tensors are no weights


_RESET = Path("/proc/self/clear_refs")


@pytest.mark.skipif(not _RESET.exists(), reason="needs Linux, which tells the most memory since a moment")
def test_shards_are_written_from_where_they_lie(tmp_path, group):
    tensors = {"weight": torch.arange(8 << 20, dtype=torch.float32)}
    _RESET.write_text("5")  # the peak begins anew (proc(5))
    before = process_memory("VmHWM")
    write_shards(tmp_path, tensors)
    assert process_memory("VmHWM") - before < tensors["weight"].nbytes // 2
    read = {"weight": torch.zeros(8 << 20)}
    read_shards(tmp_path, read)
    assert torch.equal(read["weight"], tensors["weight"])


def test_a_callback_that_a_checkpoint_does_not_know_begins_anew(tmp_path, optimizer):
    write_full(
        tmp_path / "step-000000003",
        CheckpointContent(collect_states(checkpoint_items(optimizer)), Progress(step=3), "run: x\n"),
    )
    counts = Counts("as it was")
    load_checkpoint(tmp_path, checkpoint_items(optimizer, [counts]))
    assert counts.value == "as it was"


def test_an_error_of_a_callback_is_not_taken_for_a_damaged_checkpoint(tmp_path, optimizer):
    class Fails(Counts):
        def load_state_dict(self, state: dict) -> None:
            raise KeyError("its own")

    items = checkpoint_items(optimizer, [Fails(torch.ones(1))])
    write_full(tmp_path / "step-000000003", CheckpointContent(collect_states(items), Progress(step=3), "run: x\n"))
    with pytest.raises(KeyError, match="its own"):
        load_checkpoint(tmp_path, items)


def test_a_state_that_cannot_be_saved_is_refused(optimizer):
    with pytest.raises(WorkError, match=r"callbacks: Counts: value of its state_dict is of type int"):
        collect_states(checkpoint_items(optimizer, [Counts(3)]))
    with pytest.raises(InputError, match="two callbacks are named Counts"):
        checkpoint_items(optimizer, [Counts(), Counts()])
