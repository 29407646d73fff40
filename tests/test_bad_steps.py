"""Bad steps: NaN gradients and spikes of the loss, made in real runs; skipped, undone, told, and alike on all ranks."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from artel.config import load_run
from artel.config.schema.run import TrainConfig
from artel.errors import InputError, WorkError
from artel.messages import from_json
from artel.models.compile import repeated_layers
from artel.parallel import World
from artel.preparing import prepare
from artel.training.loop import train
from artel.training.model_setup import check_layout
from artel.training.optim.bf16_adamw import hold_in_bf16
from artel.training.optim.optimizer import Optimizer
from support.messages import logged
from support.ranks import run_ranks
from support.runs import losses, write_run

ALONE = World(0, 1, 0, torch.device("cpu"))


class Ended(Exception):
    """A run's end from outside, as by a kill."""


class Bad:
    """An occasion that spoils given steps of a run on one rank: NaN gradients, or a loss that jumps."""

    def __init__(self, nan=(), jump=(), end=None, rank=0):
        self.nan, self.jump, self.end, self.rank = nan, jump, end, rank
        self.weights, self.state, self.known = {}, {}, {}
        self.hook = None

    def __call__(self, run):
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        if run.world.size == 1:
            self.weights[run.step] = {name: tensor.detach().clone() for name, tensor in run.optimizer.weights().items()}
            self.state[run.step] = {name: tensor.clone() for name, tensor in run.optimizer.state().items()}
            self.known[run.step] = len(run.progress.losses)
        if run.step == self.end:
            raise Ended
        if run.world.rank == self.rank and run.step + 1 in {*self.nan, *self.jump}:
            if run.step + 1 in self.nan:
                self.hook = repeated_layers(run.strategy.model)[-1].register_forward_hook(self._with_nan)
            else:
                self.hook = run.strategy.model.base_model.register_forward_hook(self._louder)

    @staticmethod
    def _with_nan(module, inputs, output):
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * float("nan"))

    @staticmethod
    def _louder(module, inputs, output):
        output.last_hidden_state = 100 * output.last_hidden_state
        return output


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One folder, and so one token store, for all runs here."""
    return tmp_path_factory.mktemp("bad")


def run(place, name, bad, processes=ALONE, **changes):
    """Train, or go on: (folder, what was said). A run that is ended from outside is gone on with by a second call."""
    changes = {"checkpoint": {"every": 4, "keep": 99}, "validate": {"every": "never"}} | changes
    file = place / f"{name}-{processes.rank}.yaml"  # each rank its own: they write at the same time
    config = load_run(str(write_run(file, run=str(place / name), **changes)), {})
    said = logged()
    train(config, prepare(config), processes, callbacks=[bad])
    return place / name, said


def written(folder):
    return [from_json(json.loads(line)) for line in (folder / "bad_steps.jsonl").read_text().splitlines()]


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def final(folder):
    return load_file(folder / "model" / "model.safetensors")


def test_a_skipped_step_changes_nothing_and_is_told(place):
    bad = Bad(nan=[3])
    folder, said = run(place, "skip", bad, train={"on_bad_step": "skip", "batch": 8})
    assert equal(bad.weights[2], bad.weights[3])
    assert equal(bad.state[2], bad.state[3])
    assert not equal(bad.weights[3], bad.weights[4])
    (line,) = written(folder)
    assert line["step"] == 3
    assert line["did"] == "skip"
    assert line["loss"] > 1  # the gradient alone was spoilt
    assert line["gradient_norm"] is None  # JSON has no NaN
    assert "NaN or infinite" in line["what"]
    assert line["documents"]
    assert all("dummy" in name for name in line["documents"])
    (message,) = [text for text in said if text.startswith("step 3:")]
    assert "the step is skipped" in message
    assert line["documents"][0] in message
    by_step = losses(folder)
    assert sorted(by_step) == [1, 2, 4, 5, 6]
    assert all(torch.isfinite(torch.tensor(by_step[step])).all() for step in by_step)
    # The host learns of it a step later where nothing is logged in between, and then leaves it out of the mean.
    late, _ = run(place, "late", Bad(nan=[3]), train={"on_bad_step": "skip", "batch": 8}, log={"every": 100})
    assert equal(final(folder), final(late))
    assert written(late) == [line]
    mean = losses(late)[6][0]
    assert mean == pytest.approx(sum(by_step[step][0] for step in by_step) / 5, rel=1e-5)


@pytest.mark.parametrize("every", [1, 100])
def test_after_rewind_training_goes_on_from_the_checkpoint_with_the_next_step(place, every):
    """Bit for bit as if the steps since the checkpoint, and the bad one, had all been left out."""
    changes = {"train": {"steps": 10, "batch": 8}, "log": {"every": every}}
    changes["train"]["on_bad_step"] = "skip"
    without, _ = run(place, f"without-{every}", Bad(nan=[5, 6, 7]), **changes)
    changes["train"]["on_bad_step"] = "rewind"
    folder, said = run(place, f"rewind-{every}", Bad(nan=[7]), **changes)
    assert [(line["step"], line["did"]) for line in written(folder)] == [(7, "rewind")]
    assert any("from the weights of step 4" in text for text in said)
    assert equal(final(folder), final(without))
    last = "step-000000010"
    one, other = (load_file(each / "checkpoints" / last / "optimizer.safetensors") for each in (folder, without))
    assert equal(one, other)


def test_rewind_without_a_checkpoint_skips(place):
    train = {"on_bad_step": "rewind", "batch": 8, "steps": 3}
    bad = Bad(nan=[2])
    folder, said = run(place, "none-yet", bad, train=train)
    assert equal(bad.weights[1], bad.weights[2])
    assert [line["did"] for line in written(folder)] == ["skip"]
    assert any("there is no checkpoint to return to yet" in text for text in said)


def test_a_spike_is_found_once_enough_steps_are_known(place):
    bad = Bad(jump=[10, 25])
    train = {"on_bad_step": "skip", "spike": 1.5, "batch": 8, "steps": 27}
    folder, _ = run(place, "spike", bad, train=train)
    (line,) = written(folder)
    assert line["step"] == 25
    assert "above 1.5 times" in line["what"]
    assert line["gradient_norm"] > 0
    by_step = losses(folder)
    assert by_step[10][0] > 1.5 * by_step[9][0]
    assert line["loss"] > 1.5 * by_step[24][0]
    assert 25 not in by_step
    assert equal(bad.weights[24], bad.weights[25])
    assert not equal(bad.weights[9], bad.weights[10])


@pytest.mark.slow
@pytest.mark.parametrize("did", ["skip", "rewind"])
def test_a_run_that_is_killed_ends_bit_equal(place, did):
    """What a spike is measured by comes back with the checkpoint of step 24, so that the spike of step 26 is found."""
    changes = {
        "train": {"on_bad_step": did, "spike": 1.5, "batch": 8, "steps": 28},
        "log": {"every": 6},
        "checkpoint": {"every": 12},
    }
    spoilt = {"nan": [14], "jump": [26]}
    whole, _ = run(place, f"whole-{did}", Bad(**spoilt), **changes)
    for end in (15, 27):
        with pytest.raises(Ended):
            run(place, f"broken-{did}", Bad(**spoilt, end=end), **changes)
    again = Bad(**spoilt)
    broken, _ = run(place, f"broken-{did}", again, **changes)
    assert min(again.known) == 25
    assert again.known[25] >= 20
    assert [(line["step"], line["did"]) for line in written(whole)] == [(14, did), (26, did)]
    assert written(broken) == written(whole)
    assert losses(broken) == losses(whole)
    assert equal(final(broken), final(whole))


def test_a_spike_stops_the_run_unless_told_otherwise(place):
    with pytest.raises(WorkError, match=r"step 25: .*above 1.5 times") as error:
        run(place, "stopped", Bad(jump=[25]), train={"spike": 1.5, "batch": 8, "steps": 40})
    assert "dummy" in str(error.value)
    assert [(line["step"], line["did"]) for line in written(place / "stopped")] == [(25, "stop")]


def test_ten_bad_steps_in_a_row_stop_the_run_whatever_is_asked(place):
    bad = Bad(nan=range(3, 99))
    with pytest.raises(WorkError, match="10th bad step in a row"):
        run(place, "row", bad, train={"on_bad_step": "skip", "batch": 8, "steps": 40})
    assert [line["step"] for line in written(place / "row")] == list(range(3, 13))
    assert [line["did"] for line in written(place / "row")] == ["skip"] * 9 + ["stop"]
    assert equal(bad.weights[2], bad.weights[max(bad.weights)])


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": "adamw"}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "muon"},
     {"optimizer": "adafactor"}, {"optimizer": "adamw", "weights": "bf16"}],
)  # fmt: skip
@pytest.mark.parametrize("spike", [False, True])
def test_no_optimizer_moves_in_a_bad_step(settings, spike):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32))
    if "weights" in settings:
        hold_in_bf16(model)
    optimizer = Optimizer(model, TrainConfig(**settings))

    def step(bad):
        ids = torch.arange(12)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).float()
        if bad and not spike:
            next(model.parameters()).grad[0, 0] = norm = torch.tensor(float("inf"))
        _, good = optimizer.clip_and_step(1.0, norm, guarded=True, spike=bad and spike)
        assert bool(good) is not bad
        assert all(each.grad is None for each in model.parameters())
        return {name: tensor.detach().clone() for name, tensor in (optimizer.weights() | optimizer.state()).items()}

    first = step(False)
    assert equal(step(True), first)
    after = step(False)
    assert not equal(after, first)


def test_deepspeed_steps_by_itself_and_is_refused(place):
    (place / "zero.json").write_text("{}")
    file = write_run(place / "deepspeed.yaml", train={"on_bad_step": "skip", "spike": 3},
                     parallel={"deepspeed": str(place / "zero.json")})  # fmt: skip
    with pytest.raises(InputError) as error:
        check_layout(load_run(str(file), {}), "AutoModelForCausalLM", 1, 1)
    assert {"train.on_bad_step", "train.spike"} <= {problem.where for problem in error.value.problems}


def on_two_ranks(rank, world):
    """Rank 1's steps are spoilt: what is written, by run."""
    place = Path(os.environ["PLACE"])
    processes = World(rank, world, rank, torch.device("cpu"), on_host=world)
    results = {}
    for data in ("ddp", "fsdp"):
        for did, bad in (("skip", Bad(nan=[5, 6, 7], rank=1)), ("rewind", Bad(nan=[7], rank=1))):
            train = {"on_bad_step": did, "batch": 8, "steps": 9}
            name = f"{data}-{did}"
            run(place, name, bad, processes, train=train, parallel={"data": data}, log={"every": 100})
            results[name] = written(place / name)
    train = {"on_bad_step": "rewind", "spike": 1.2, "batch": 8, "steps": 26}
    run(place, "ddp-spike", Bad(jump=[25], rank=1), processes, train=train, parallel={"data": "ddp"})
    return results | {"ddp-spike": written(place / "ddp-spike")}


@pytest.mark.processes
def test_all_ranks_decide_alike(place):
    run(place, "alone", Bad(), train={"batch": 8, "steps": 1})  # the text is prepared once
    results = run_ranks(2, __file__, "on_two_ranks", seconds=200, PLACE=str(place))
    assert results[0] == results[1]
    expected = {"skip": [(5, "skip"), (6, "skip"), (7, "skip")], "rewind": [(7, "rewind")], "spike": [(25, "rewind")]}
    for name, lines in results[0].items():
        assert [(line["step"], line["did"]) for line in lines] == expected[name.partition("-")[2]]
    for data in ("ddp", "fsdp"):
        assert equal(final(place / f"{data}-skip"), final(place / f"{data}-rewind"))
