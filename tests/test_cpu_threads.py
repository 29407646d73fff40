"""Which threads of a process compute: only one has helpers, since with more of them than cores OpenMP's sleep."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from artel.config import load_run
from artel.generation.slots import SlotEngine
from artel.models.device import compute_on_one_core, release_helpers
from artel.parallel import World
from artel.preparing import prepare
from artel.training.loop import train
from support.runs import write_run
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")


def tasks() -> set[str]:
    """The threads of this process, by the kernel's numbers."""
    return {path.name for path in Path("/proc/self/task").iterdir()}


def helpers() -> int:
    """Threads of this process that Python did not begin."""
    return len(tasks()) - threading.active_count()


def compute() -> None:
    torch.ones(1 << 20).mul_(2)  # large enough to be shared over the cores


@pytest.fixture
def helper() -> str:
    """The number of the one helper of the test's thread; conftest.py sets the number of threads back."""
    release_helpers()
    torch.set_num_threads(2)
    before = tasks()
    compute()
    (number,) = tasks() - before
    return number


def test_a_thread_on_one_core_begins_no_helper_and_leaves_others_theirs(helper: str) -> None:
    with ThreadPoolExecutor(1, initializer=compute_on_one_core) as pool:
        pool.submit(torch.get_num_threads).result()  # the thread is there
        before = tasks()
        pool.submit(compute).result()
        assert tasks() <= before
    assert helper in tasks()
    assert torch.get_num_threads() == 2


def test_helpers_are_given_back_and_come_again(helper: str) -> None:
    release_helpers()
    wait_until(lambda: helper not in tasks())  # the kernel still lists a thread while it ends
    before = tasks()
    compute()
    assert len(tasks() - before) == 1


@pytest.mark.usefixtures("helper")
def test_checkpoints_written_beside_training_take_no_core_from_it(tmp_path: Path) -> None:
    model = {"config": {"n_embd": 128, "n_head": 2}}  # copies large enough to be shared over the cores
    file = write_run(tmp_path / "run.yaml", model=model, checkpoint={"every": 2}, train={"steps": 6, "batch": 4})
    run, counts = load_run(str(file)), []
    train(run, prepare(run), World(0, 1, 0, torch.device("cpu")), [lambda state: counts.append(helpers())])  # fmt: skip
    assert max(counts) == counts[0]


def test_an_engine_computes_with_the_helpers_of_its_own_thread_alone(helper: str) -> None:
    config = LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=2, max_position_embeddings=256)  # fmt: skip
    engine = SlotEngine(LlamaForCausalLM(config), 2, 128)
    wait_until(lambda: helper not in tasks())
    engine.close()
