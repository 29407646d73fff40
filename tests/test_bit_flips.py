"""A bit flipped in any file of a checkpoint or a token store: found, named, and recovered from. 100 flips, seeded."""

import json
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from artel.config import load_run
from artel.parallel import join_world
from artel.preparing import prepare
from artel.preparing.stores import find_damage
from artel.training.checkpoint.format import full_weights, load_checkpoint
from artel.training.checkpoint.items import checkpoint_items
from artel.training.loop import train
from artel.training.optim.optimizer import Optimizer
from support import WORKERS
from support.messages import logged
from support.ranks import run_ranks
from support.runs import write_run
from support.stores import run_of

RUN = {"train": {"steps": 6, "batch": 16, "micro_batch": 8}, "checkpoint": {"every": 2, "keep": 9}}


def flip(file: Path, chance: Random) -> bytes:
    """Flip a bit of a file; what it was before."""
    before = file.read_bytes()
    bit = chance.randrange(8 * len(before))
    changed = bytearray(before)
    changed[bit // 8] ^= 1 << bit % 8
    file.write_bytes(changed)
    return before


def files_in(folder: Path) -> dict[str, bytes]:
    """Content by name, but for empty ones, of which no bit can be flipped."""
    found = {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
    return {name: content for name, content in found.items() if content}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The file of a run that is over, its checkpoints written by one process."""
    file = write_run(tmp_path_factory.mktemp("whole") / "run.yaml", **RUN)
    run = load_run(str(file))
    with join_world(run.train.threads) as processes:  # as the command has it: other threads add up otherwise
        train(run, prepare(run), processes)
    return file


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory):
    """The same, each process's pieces in a file of its own."""
    file = write_run(tmp_path_factory.mktemp("pieces") / "run.yaml", parallel={"data": "fsdp"}, **RUN)
    cases = WORKERS / "layout_cases.py"
    assert run_ranks(2, cases, "run_files", 300, CASES=str(file)) == [[None]] * 2
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "flips"), [("trained", 35), pytest.param("trained_by_two", 35, marks=pytest.mark.processes)]
)
def test_of_a_damaged_checkpoint_the_one_before_is_taken(which, flips, request):
    file = request.getfixturevalue(which)
    folder = file.with_suffix("") / "checkpoints"
    model = AutoModelForCausalLM.from_pretrained(file.with_suffix("") / "model")
    optimizer = Optimizer(model, load_run(str(file)).train)
    earlier = full_weights(folder / "step-000000004")
    newest, chance = folder / "step-000000006", Random(which)
    names = sorted(files_in(newest))
    assert any(name.startswith("shard") for name in names) == (which == "trained_by_two")
    for number in range(flips):
        name = names[number % len(names)]
        before = flip(newest / name, chance)
        said = logged()
        progress = load_checkpoint(folder, checkpoint_items(optimizer))
        assert progress.step == 4, name
        (told,) = said
        assert told.startswith(f"{newest} is damaged"), name
        # Of its own damage checksums.json tells as of another file's, or that it cannot be read.
        assert name in told or name == "checksums.json"
        assert all(torch.equal(tensor, earlier[key]) for key, tensor in optimizer.weights().items())
        (newest / name).write_bytes(before)
    said = logged()
    assert load_checkpoint(folder, checkpoint_items(optimizer)).step == 6
    assert not said


@pytest.mark.long
def test_a_damaged_store_is_made_anew_byte_for_byte(tmp_path):
    lines = [json.dumps({"text": f"a text of words, and its number is {number}"}) for number in range(120)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]))
    data = {"sources": [{"path": str(tmp_path / "a.jsonl")}], "validation": 0.2, "max_bad": 0.5}
    run = run_of(tmp_path, data=data)
    store = prepare(run).folder
    whole, chance = files_in(store), Random(0)
    assert {"manifest.json", "ledger.json", "rejected.jsonl", "tokenizer/tokenizer.json", "train/00000.ends"} <= set(
        whole
    )
    for number in range(30):
        name = sorted(whole)[number % len(whole)]
        flip(store / name, chance)
        assert Path(find_damage(store).where) == store / name
        said = logged()
        prepared = prepare(run, verify=True)
        assert (prepared.is_new, prepared.folder) == (True, store)
        assert files_in(store) == whole, name
        (line,) = [line for line in said if "rebuilding the store" in line]
        assert line.startswith(f"{store / name} ")
        assert not list(store.parent.glob("*.damaged"))
    assert not prepare(run, verify=True).is_new
    (store / "manifest.json").unlink()  # a file that is gone, too
    assert prepare(run).is_new
    assert files_in(store) == whole


@pytest.mark.slow
def test_a_run_goes_on_over_both_as_if_nothing_had_been(trained, tmp_path, artel_here):
    folder = tmp_path / "run"
    shutil.copytree(trained.parent / "stores", tmp_path / "stores")
    shutil.copytree(trained.with_suffix(""), folder, symlinks=True)
    expected = (folder / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "model")
    (folder / "result.json").unlink()
    flip(folder / "checkpoints" / "step-000000006" / "optimizer.safetensors", Random(1))
    (tokens,) = Path("stores").glob("*/train/00000.tokens")  # relative, as the message names it
    flip(tokens, Random(2))
    file = write_run(tmp_path / "run.yaml", **RUN)
    done = artel_here("train", file)
    assert done.returncode == 0, done.stderr
    checksum = f"{tokens} does not have the checksum"
    for part in (checksum, "rebuilding the store", "step-000000006 is damaged", "resuming from step 4"):
        assert part in done.stderr
    assert (folder / "model" / "model.safetensors").read_bytes() == expected
