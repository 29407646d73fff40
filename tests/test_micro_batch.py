"""Finding the micro-batch that fits: the search by itself, and on a host whose memory really runs out."""

import gc
import itertools
import json
import math
import os
import resource
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from artel.config import TokenizerTraining, load_run
from artel.errors import InputError
from artel.host import memory, process_memory
from artel.models.activation_checkpointing import SelectiveUnsupported, recompute
from artel.objectives import build_objective
from artel.preparing import prepare
from artel.tokens import train_tokenizer
from artel.training import micro_batch
from artel.training.micro_batch import (
    MicroBatchPlan,
    cache_key,
    find_micro_batch,
    is_out_of_memory,
    longest_sample,
    sizes_to_try,
)
from support.forks import call_forked
from support.preferences import CONTROL, MODEL, PAIRS, preferring, stored
from support.runs import write_run
from support.waiting import LIMIT

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODES = ("none", "selective", "full")
RUNS = itertools.count()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path))
    return tmp_path


class Memory:
    """An attempt that fits while rows times the bytes of a row in its mode stay within a limit."""

    def __init__(self, limit, **rows):
        self.limit, self.rows, self.tried = limit, {"none": 8, "selective": 4, "full": 1} | rows, []

    def __call__(self, rows, how):
        self.tried.append((rows, how))
        if rows * self.rows[how] > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")


def find(attempt, most, modes=MODES, key=None, run=None, device=CPU, **more):
    """Of a run that is new, unless its folder is given."""
    run = run or Path(os.environ["ARTEL_CACHE"], f"run-{next(RUNS)}")
    return find_micro_batch(attempt, most, modes, row_tokens=1, device=device, key=key or {}, run=run, **more)


# The rule of a GPU, with 8 tokens for 8,192, on a device whose memory nobody counts.
AS_ON_A_GPU = {"device": torch.device("meta"), "enough_tokens": 8}


@pytest.mark.parametrize(
    ("limit", "most", "expected"),
    [
        (1000, 64, MicroBatchPlan(64, "none")),
        (300, 64, MicroBatchPlan(32, "none")),
        (8 * 8, 64, MicroBatchPlan(8, "none")),
        (8 * 8 - 1, 64, MicroBatchPlan(8, "selective")),  # 4 rows without computing anything again are not enough
        (4 * 8 - 1, 64, MicroBatchPlan(16, "full")),
        (5, 64, MicroBatchPlan(4, "full")),
        (1, 64, MicroBatchPlan(1, "full")),
        (8 * 7, 7, MicroBatchPlan(7, "none")),  # the whole share, though less than 8
        (8 * 15, 60, MicroBatchPlan(15, "none")),  # a divisor: no row is padding
        (8 * 4, 7, MicroBatchPlan(7, "selective")),
    ],
)
def test_the_largest_that_fits_in_the_first_mode_that_is_enough(limit, most, expected):
    attempt = Memory(limit)
    assert find(attempt, most, **AS_ON_A_GPU) == expected
    assert len(set(attempt.tried)) == len(attempt.tried)  # nothing is tried twice
    assert len(attempt.tried) <= len(MODES) * (1 + math.ceil(math.log2(len(sizes_to_try(most, 1, CPU)) + 1)))
    # On a CPU nothing is computed again for the sake of larger micro-batches: one row is enough.
    mode = next(mode for mode, row in attempt.rows.items() if row <= limit)
    assert find(Memory(limit), most, key={"on": "cpu"}).recompute == mode


def test_what_was_planned_is_tried_first_and_once_more_at_most():
    planned = MicroBatchPlan(16, "none")
    for limit, expected in ((8 * 16, planned), (8 * 15, MicroBatchPlan(8, "none"))):
        attempt = Memory(limit)
        assert find(attempt, 64, key={"limit": limit}, planned=planned, **AS_ON_A_GPU) == expected
        assert attempt.tried == [(16, "none"), (8, "none")][: len(attempt.tried)]
    attempt = Memory(4 * 10)
    assert find(attempt, 10, key={"limit": 40}, exactly=True, planned=MicroBatchPlan(10, "none")) == MicroBatchPlan(
        10, "selective"
    )
    assert attempt.tried == [(10, "none"), (10, "selective")]


def test_a_plan_that_is_wrong_costs_two_attempts():
    assert find(Memory(8), 64, planned=MicroBatchPlan(64, "none"), **AS_ON_A_GPU) == MicroBatchPlan(8, "full")
    of_no_size, options = MicroBatchPlan(5, "none"), {"key": {"limit": 300}, **AS_ON_A_GPU}
    assert find(Memory(300), 64, planned=of_no_size, **options) == MicroBatchPlan(32, "none")


def test_sizes_are_halves_and_divisors_up_to_what_gains():
    assert sizes_to_try(64, 32, CPU) == [1, 2, 4, 8, 16, 32, 64]
    assert sizes_to_try(7, 32, CPU) == [1, 2, 4, 7]
    assert sizes_to_try(512, 1024, CPU) == [1, 2, 4]  # 4,096 tokens
    assert sizes_to_try(512, 1024, CUDA)[-1] == 64  # 65,536 tokens
    assert sizes_to_try(8, 10**6, CUDA) == [1]


def test_asked_for_a_size_only_that_is_tried():
    attempt = Memory(40)
    assert find(attempt, 10, exactly=True) == MicroBatchPlan(10, "selective")
    assert {rows for rows, _ in attempt.tried if rows > 2} == {10}
    with pytest.raises(InputError, match=r"train\.micro_batch: 50 sample"):
        find(Memory(40), 50, exactly=True, key={"other": 1})


@pytest.mark.parametrize(("modes", "where"), [(MODES, "data.block"), (("none",), "train.activation_checkpointing")])
def test_when_nothing_fits_the_key_to_change_is_named(modes, where):
    with pytest.raises(InputError) as error:
        find(Memory(0), 64, modes)
    assert error.value.problems[0].where == where
    assert error.value.problems[0].fix


def test_what_was_found_is_used_without_trying(cache):
    key = {"model": {"layers": 2}}
    first = find(Memory(300), 64, key=key)
    again = Memory(0)
    assert find(again, 64, key=key) == first
    assert again.tried == []
    (file,) = (cache / "micro_batches").iterdir()
    assert json.loads(file.read_text())["for"] == key
    other = Memory(1000)
    assert find(other, 64, key={"model": {"layers": 3}}).rows == 64
    assert other.tried


def test_a_run_goes_on_as_it_began_whatever_became_of_the_cache(cache):
    first = find(Memory(300), 64, run=cache / "run")
    shutil.rmtree(cache / "micro_batches")
    assert find(Memory(10_000), 64).rows == 64  # another run finds more room, and the cache knows that now
    again = Memory(0)
    assert find(again, 64, run=cache / "run") == first
    assert again.tried == []


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"size": 0, "recompute": "none"}', '{"size": 4, "recompute": "x"}']
)
def test_what_is_remembered_wrongly_is_not_believed(cache, content):
    find(Memory(300), 64)
    (file,) = (cache / "micro_batches").iterdir()
    file.write_text(content)
    attempt = Memory(300)
    assert find(attempt, 64).rows == 32
    assert attempt.tried


class Peer:
    """What `all_reduce_min` is where the other process has less memory: it answers by the same search of its own."""

    def __init__(self, limit, known=-1):
        self.attempt, self.known, self.asked = Memory(limit), known, 0

    def watch(self, attempt):
        def both(rows, how):
            self.newest = (rows, how)
            attempt(rows, how)

        return both

    def __call__(self, mine):
        self.asked += 1
        if self.asked <= 2:  # what each remembers, and its negative
            return min(mine, self.known if self.asked == 1 else -self.known)
        if self.asked <= 4:  # what each has planned: both the same
            return mine
        try:
            self.attempt(*self.newest)
        except torch.OutOfMemoryError:
            return 0
        return mine


def test_what_does_not_fit_one_process_is_too_large_for_all():
    peer = Peer(8 * 16)
    assert find(peer.watch(Memory(1000)), 64, all_reduce_min=peer, **AS_ON_A_GPU) == MicroBatchPlan(16, "none")


def test_what_only_one_process_remembers_is_tried_anew():
    find(Memory(1000), 64, **AS_ON_A_GPU)
    attempt, peer = Memory(1000), Peer(8 * 16)
    assert find(peer.watch(attempt), 64, all_reduce_min=peer, **AS_ON_A_GPU) == MicroBatchPlan(16, "none")
    assert attempt.tried


def test_a_mode_that_a_model_cannot_do_is_passed_over():
    def attempt(rows, how):
        if how == "selective":
            raise SelectiveUnsupported([])
        if rows > {"full": 16, "none": 0}[how]:
            raise torch.OutOfMemoryError

    assert find(attempt, 64, **AS_ON_A_GPU) == MicroBatchPlan(16, "full")
    planned = MicroBatchPlan(1, "none")
    assert find(attempt, 1, key={"planned": 1}, planned=planned, **AS_ON_A_GPU) == MicroBatchPlan(1, "full")
    with pytest.raises(SelectiveUnsupported):
        find(attempt, 64, ("selective",), key={"other": 1})


def test_a_real_failed_allocation_is_recognised_and_what_it_held_is_gone():
    held = []

    def attempt(rows, how):
        activations = torch.zeros(1000)
        held.append(weakref.ref(activations))
        cycle = [activations]
        cycle.append(cycle)
        if rows > 2:
            torch.empty(2**50)  # a petabyte: no address space has it

    gc.disable()
    try:
        assert find(attempt, 64) == MicroBatchPlan(2, "none")
    finally:
        gc.enable()
    assert len(held) > 2
    assert all(reference() is None for reference in held)


def test_the_optimizer_that_is_yet_to_come_is_in_the_way():
    assert find(Memory(1000), 2, reserve=1000) == MicroBatchPlan(2, "none")
    with pytest.raises(InputError):
        find(Memory(1000), 2, key={"other": 1}, reserve=2**55)


def test_memory_that_is_not_out_is_told_apart():
    assert is_out_of_memory(MemoryError())
    for error in (RuntimeError("out of cheese"), ValueError("DefaultCPUAllocator: can't allocate memory")):
        assert not is_out_of_memory(error)

        def attempt(rows, how, error=error):
            raise error

        with pytest.raises(type(error), match=str(error)):
            find(attempt, 64)


def test_small_attempts_tell_how_many_rows_the_host_has_memory_for(monkeypatch):
    """Rows of 32 MiB where 1.5 GiB are spare: 40 fit within nine tenths, and larger ones are never tried."""
    tried = []

    def attempt(rows, how):
        tried.append(rows)
        torch.ones(rows * 2**23).sum()

    assert 2**24 < memory().free < 2**50
    monkeypatch.setattr(micro_batch, "memory", lambda: replace(memory(), free=3 * 2**29))
    assert find(attempt, 512) == MicroBatchPlan(32, "none")
    assert max(tried) == 32


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_blocks_are_all_alike(tmp_path, objective):
    model = {"config": {"model_type": "gpt2" if objective == "causal" else "roberta"}}
    run = load_run(str(write_run(tmp_path / "run.yaml", objective=objective, model=model)), {})
    prepared = prepare(run)
    made = build_objective(run, prepared.tokenizer())
    samples = made.dataset(prepared.open().train)
    assert longest_sample(made, samples) == (0, 32)
    assert micro_batch.repeat_sample(made, samples, 0, 3).tensors["input_ids"].shape == (3, 32)


def test_of_samples_that_stand_alone_the_one_with_the_largest_batch_counts(tmp_path):
    """Of pairs of answers not the longest together: both are filled up to the longer one."""
    text = " ".join(" ".join(pair) for pair in PAIRS)
    tokenizer = train_tokenizer(iter([text * 40]), TokenizerTraining(vocab=320, special=CONTROL))
    objective = preferring(tokenizer, tmp_path, "dpo")
    pairs = [PAIRS[0], ("Say hello.", "No. " * 40, "No."), ("Say hello.", "No. " * 30, "No. " * 30)]
    samples = objective.dataset(stored(objective, tmp_path / "store", pairs))
    assert len(samples.read(2).ids) > len(samples.read(1).ids)
    index, tokens = longest_sample(objective, samples)
    assert index == 1
    batch = micro_batch.repeat_sample(objective, samples, index, 3)
    assert batch.tensors["input_ids"].numel() == 3 * tokens
    assert batch.targets == 3
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.vocabulary, **MODEL))

    def attempt(rows, how):
        recompute(model, how)
        objective.loss(model, micro_batch.repeat_sample(objective, samples, index, rows))[0].backward()
        model.zero_grad()

    key = cache_key(objective.config, model, 4, tokens, CPU, 1)
    assert find(attempt, 4, key=key) == MicroBatchPlan(4, "none")
    never = Memory(0)
    # A key is its JSON.
    assert find(never, 4, key=json.loads(json.dumps(key, default=str))) == MicroBatchPlan(4, "none")
    wider = LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.vocabulary, **{**MODEL, "hidden_size": 64}))
    with pytest.raises(InputError):
        find(never, 4, key=cache_key(objective.config, wider, 4, tokens, CPU, 1))


def test_the_settings_of_a_plugins_objective_are_in_the_key(tmp_path):
    Path("wide_objectives.py").write_text(
        "from artel.config import Section\nfrom artel.objectives import Causal\nfrom artel.registry import OBJECTIVES\n"
        "class Wide(Section):\n    outputs: int = 1\n"
        "OBJECTIVES.register('wide', settings=Wide)(type('WideCausal', (Causal,), {}))\n"
    )
    model, keys = LlamaForCausalLM(LlamaConfig(vocab_size=64, **MODEL)), []
    for outputs in (1, 1, 1000):
        wide = {"objective": "wide", "plugins": "wide_objectives", "wide": {"outputs": outputs}}
        keys.append(cache_key(load_run(str(write_run(tmp_path / "run.yaml", **wide))), model, 4, 32, CPU, 1))
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


def train_with_little_memory():
    """In a process of its own, with 400 MiB of address space left; what came out."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 2**14, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.arange(64)[None]
    tried = []

    def forward_backward(rows):
        batch = ids.expand(rows, -1)
        logits = model(input_ids=batch, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()

    def attempt(rows, how):
        tried.append(rows)
        recompute(model, how)
        try:
            forward_backward(rows)
        finally:
            model.zero_grad(set_to_none=True)

    attempt(1, "none")  # what PyTorch sets up once is not counted below
    before, held = process_memory("VmSize"), process_memory("RssAnon")
    resource.setrlimit(resource.RLIMIT_AS, (before + 400 * 2**20, resource.RLIM_INFINITY))
    key, reserve = {"model": model.config.to_dict()}, 8 * sum(p.numel() for p in model.parameters())
    options = {"row_tokens": 64, "device": CPU, "key": key, "reserve": reserve, "run": Path(os.environ["RUN_FOLDER"])}
    tried.clear()
    batch_plan = find_micro_batch(attempt, 64, MODES, **options)
    report = {"size": batch_plan.rows, "recompute": batch_plan.recompute, "tried": tried.copy()}
    # Not of VmSize: glibc sets 64 MiB of addresses aside for each thread that allocates while another does.
    report["left"] = process_memory("RssAnon") - held
    tried.clear()
    assert find_micro_batch(attempt, 64, MODES, **options) == batch_plan
    report["tried_again"] = tried.copy()
    recompute(model, batch_plan.recompute)
    for _ in range(3):
        forward_backward(batch_plan.rows)
        optimizer.step()
        optimizer.zero_grad()
    try:
        attempt(2 * batch_plan.rows, batch_plan.recompute)
    except RuntimeError as error:
        report["larger"] = str(error)
    return report


@pytest.mark.slow
def test_memory_that_really_runs_out(cache):
    """What is found trains, with its optimizer; twice as much does not; it is remembered, and nothing stays behind."""
    results = call_forked(train_with_little_memory, ARTEL_CACHE=str(cache), RUN_FOLDER=str(cache / "run"))
    assert 1 < results["size"] < 64 == max(results["tried"])
    assert results["recompute"] == "none"
    assert "can't allocate memory" in results["larger"]
    assert results["tried_again"] == []
    assert results["left"] < 100 * 2**20


@pytest.mark.skipif(not micro_batch._RESET_FILE.exists(), reason="peaks of memory begin anew on Linux only")
def test_where_memory_is_ample_the_largest_is_reckoned_from_one_attempt():
    tried = []

    def attempt(rows, how):
        tried.append(rows)
        torch.ones(rows * 2**20)  # 4 MiB a row

    assert find(attempt, 64) == MicroBatchPlan(64, "none")
    assert tried == [1]
    assert find(attempt, 64, planned=MicroBatchPlan(32, "none"), is_ample=True, key={"planned": 1}).rows == 32
    assert tried == [1]  # what a plan of ample memory says is taken untried


@pytest.mark.skipif(not micro_batch._RESET_FILE.exists(), reason="peaks of memory begin anew on Linux only")
def test_all_ranks_try_the_same_sizes_whatever_memory_each_measures(monkeypatch):
    """An attempt may need the other ranks. One that measured enough after a single row left the others waiting."""
    meeting, reduction = threading.Barrier(2, timeout=LIMIT), threading.Barrier(2, timeout=LIMIT)
    values, tried = [0, 0], [[], []]

    def search(rank):
        threading.current_thread().name = f"rank {rank}"

        def all_reduce_min(value):
            values[rank] = value
            reduction.wait()
            lowest = min(values)
            reduction.wait()
            return lowest

        def attempt(rows, how):
            tried[rank].append(rows)
            meeting.wait()
            torch.ones(rows * 2**20)  # 4 MiB a row

        return find(attempt, 64, all_reduce_min=all_reduce_min)

    def measure(name):
        return 0 if threading.current_thread().name == "rank 1" else process_memory(name)

    monkeypatch.setattr(micro_batch, "process_memory", measure)
    with ThreadPoolExecutor(2) as ranks:
        plans = list(ranks.map(search, range(2)))
    assert plans == [MicroBatchPlan(64, "none")] * 2
    assert tried == [[1, 2, 64]] * 2
