"""`model: {auto: true}`: what is chosen for a time, a text and a machine, and that a run keeps to it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from artel.config import RunConfig, dump_run, load_run, parse_run
from artel.errors import InputError
from artel.planning import check_run
from artel.planning.budget.choose import (
    TextSize,
    check_budget_before_text,
    choose_by_speed,
    choose_model,
    choose_model_for_plan,
    fit_block_to_text,
    is_doubtful,
)
from artel.planning.budget.fits import Regularization, read_fits
from artel.planning.budget.sizes import DEPTHS, Size
from artel.planning.budget.speed import SizeTimes, Speed, limit_slowdown, typical_seconds
from artel.planning.hardware import find_hardware
from artel.planning.plan import describe, make_plan
from artel.planning.plan.run_plan import processes_on_host
from artel.training.comparison import expected_range
from artel.training.same_run import restore_choice
from support.runs import write_run

GIB = 2**30
PLACE = {(): "run.yaml"}
NOVEL = TextSize(480_000, 32_000, 4096, "counted in the prepared text")


def speed(flops_per_second: float = 1e11) -> Speed:
    """Of a machine that computes every size at that rate, with an optimizer that takes as long as 500 tokens."""

    def point(size: Size) -> SizeTimes:
        flops = size.flops_per_token(4096, 256)
        return SizeTimes(size, flops, flops / flops_per_second, 500 * flops / flops_per_second)

    return Speed(point(Size(2)), point(Size(5)), 4096, 256, "in a test")


def auto_run(budget: str = "10min", data: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    tree = {
        "run": "runs/auto",
        "data": {"sources": [{"format": "dummy", "documents": 300}], **(data or {})},
        "tokenizer": {"train": {"vocab": 400}},
        "model": {"auto": True},
        "train": {"budget": budget, **train},
    }
    return parse_run(tree, {}, {})


def chosen(run: RunConfig, text: TextSize = NOVEL, processes: int = 1, memory: float = 64 * GIB, rate: float = 1e11):
    return choose_by_speed(fit_block_to_text(run, text), text, speed(rate), processes, memory).config


def test_a_step_takes_as_long_as_was_measured_and_as_its_flops_beyond():
    of = speed()
    for size in map(Size, DEPTHS):
        assert of.seconds(size, 1000) == pytest.approx(1500 * size.flops_per_token(4096, 256) / 1e11, rel=0.6)
    assert of.seconds(Size(5), 2000) == pytest.approx(2500 * Size(5).flops_per_token(4096, 256) / 1e11)


def test_a_size_that_others_held_up_counts_with_half_of_the_rate_of_the_other():
    small, large = speed().small, speed().large
    held_up = replace(small, seconds_per_token=15 * small.seconds_per_token)
    assert limit_slowdown(held_up, large).seconds_per_token == pytest.approx(2 * small.seconds_per_token)
    assert limit_slowdown(small, large) == small
    assert limit_slowdown(large, small) == large


def test_waiting_of_threads_counts_and_most_of_the_time_of_other_programs_does_not():
    assert typical_seconds([(9.0, 2.9), (2.0, 1.2), (3.0, 1.9)]) == 3.0
    assert typical_seconds([(9.0, 1.5), (40.0, 1.3), (30.0, 1.4)]) == 2.8


def test_more_time_takes_a_larger_model_and_a_faster_machine_too():
    depths = [chosen(auto_run(budget)).model.config["num_hidden_layers"] for budget in ("30s", "10min", "5h")]
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]
    assert chosen(auto_run(), rate=1e13).model.config["num_hidden_layers"] > depths[1]


def test_nothing_is_left_to_choose_and_what_is_chosen_can_be_trained():
    run = chosen(auto_run())
    assert not run.model.auto
    check_run(run)
    assert parse_run(yaml.safe_load(dump_run(run)), {}, dict(PLACE)) == run
    assert (run.train.optimizer, run.train.schedule, run.train.budget) == ("muon", "wsd", 600)


def test_keys_of_the_run_file_are_kept():
    keys = {"batch": 24, "optimizer": "adamw", "learning_rate": 1e-4, "weight_decay": 0.3, "warmup": 5}
    run = chosen(auto_run(data={"block": 96}, **keys))
    assert {key: getattr(run.train, key) for key in keys} == {**keys, "warmup": run.train.warmup}
    assert run.train.warmup.steps == 5
    assert run.data.block == 96


def test_every_process_has_a_part_of_the_batch_and_the_model_is_not_larger_than_memory():
    assert chosen(auto_run("1min"), processes=6).train.batch % 6 == 0
    run = chosen(auto_run("100h"), memory=GIB)
    size = Size(run.model.config["num_attention_heads"])
    assert 16 * size.parameters(NOVEL.vocabulary) < GIB < 2 * 16 * Size(24).parameters(NOVEL.vocabulary)


def test_a_budget_too_short_for_anything_says_the_shortest():
    with pytest.raises(InputError) as error:
        chosen(auto_run("1s"), rate=1e9)
    problem = error.value.problems[0]
    assert problem.where == "train.budget"
    assert not chosen(auto_run(problem.fix.split()[1]), rate=1e9).model.auto
    # On the fastest machine there is still loading and saving.
    with pytest.raises(InputError, match="loading, a validation and a save take 5 s"):
        chosen(auto_run("1s"), rate=1e15)
    assert not chosen(auto_run("5s"), rate=1e15).model.auto


@pytest.mark.slow
def test_a_budget_too_short_is_refused_before_the_text_is_prepared():
    run = auto_run("1s", data={"store": "stores"})
    assert is_doubtful(run, find_hardware("cpu"))
    assert not is_doubtful(auto_run("10min"), find_hardware("cpu"))
    assert not is_doubtful(run, find_hardware("h100-80gb:1"))
    with pytest.raises(InputError, match="1s is too short: 50 steps of the smallest model"):
        check_budget_before_text(run, 1, 1)
    assert not Path("stores").exists()


def test_what_is_expected_is_in_bits_of_the_text_as_it_is_written():
    """A novel of one byte a character has as many bits a character as the Russian one of the fits."""
    run, fits = auto_run(), read_fits()
    (russian, english), unknown = (
        [choose_by_speed(fit_block_to_text(run, text), text, speed(), 1, 64 * GIB) for text in texts]
        for texts in ([replace(NOVEL, bytes_per_character=size) for size in (fits.bytes_per_character, 1.0)], [NOVEL])
    )
    assert russian.config == english.config == unknown[0].config
    assert english.expected.bits_per_byte == pytest.approx(fits.bytes_per_character * russian.expected.bits_per_byte)
    assert unknown[0].expected.bits_per_byte is None
    assert 0.8 < russian.expected.bits_per_byte < 1.4
    low, high = expected_range(english.expected.bits_per_byte)
    assert any(f"expected: {low:.2f} to {high:.2f} bits per byte" in line for line in english.lines)
    assert not any(line.startswith("expected") for line in unknown[0].lines)


def test_the_speed_of_the_choice_and_of_the_plan_are_both_named():
    run = fit_block_to_text(auto_run(), NOVEL)
    choice = choose_by_speed(run, NOVEL, replace(speed(), method="measured on two small models"), 1, 64 * GIB)
    plan = make_plan(choice.config, find_hardware("h100-80gb:1"))
    said = " ".join(describe(plan, choice.expected.speed_note()).split())
    speed_of_choice = f"{choice.expected.tokens_per_second:,.0f} tokens/s"
    assert f"the model was chosen by {speed_of_choice}, measured on two small models" in said
    assert "was chosen" not in describe(plan)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (TextSize(700, 300, 400, ""), ["data.sources"]),
        (TextSize(70_000, 40, 400, ""), ["data.validation"]),
        (TextSize(700, 40, 400, ""), ["data.sources", "data.validation"]),
    ],
)
def test_a_text_too_small_is_refused_and_a_small_one_takes_a_smaller_block(text, where):
    with pytest.raises(InputError) as error:
        fit_block_to_text(auto_run(), text)
    assert [problem.where for problem in error.value.problems] == where
    assert fit_block_to_text(auto_run(), TextSize(3_000, 150, 400, "")).data.block == 128
    assert fit_block_to_text(auto_run(), TextSize(70_000, 0, 400, "")).data.block == 256


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"train.budget": None}, "train.budget"),
        ({"objective": "masked"}, "model.auto"),
        ({"parallel.deepspeed": "ds.json"}, "model.auto"),
        ({"train.optimizer": "sgd"}, "train.learning_rate"),
        ({"parallel.tensor": 2}, "parallel.tensor"),
        ({"parallel.pipeline": 2}, "parallel.pipeline"),
        ({"parallel.context": 2}, "parallel.context"),
    ],
)
def test_what_auto_does_not_go_with(changes, where):
    Path("ds.json").write_text("{}")
    with pytest.raises(InputError) as error:
        check_run(parse_run(dumped(auto_run()), changes, dict(PLACE)))
    assert [problem.where.rpartition(": ")[2] for problem in error.value.problems] == [where]


def dumped(run: RunConfig) -> dict[str, Any]:
    """The tree of a run file with the keys that `auto_run` sets."""
    sections = run.model_dump(mode="json", by_alias=True, exclude_unset=True)
    sections["train"].pop("schedule", None)
    return sections


def test_auto_and_a_model_of_ones_own_exclude_each_other():
    with pytest.raises(InputError, match="auto chooses a new model"):
        parse_run({**dumped(auto_run()), "model": {"auto": True, "config": {"model_type": "gpt2"}}}, {}, dict(PLACE))
    run = parse_run(dumped(auto_run()), {"model.config": {"model_type": "gpt2"}}, dict(PLACE))
    assert not run.model.auto
    assert run.model.config == {"model_type": "gpt2"}
    tree = dumped(auto_run())
    tree["train"]["epochs"] = 2
    with pytest.raises(InputError) as error:  # a budget beside epochs is one contradiction
        parse_run(tree, {}, dict(PLACE))
    (problem,) = error.value.problems
    assert "epochs and budget cannot be combined" in problem.what


@pytest.mark.slow
def test_a_plan_makes_the_choice_from_a_sample_of_the_text_for_the_processes_that_train():
    run = auto_run("1h", data=text_of_words())
    choice = choose_model_for_plan(run, find_hardware("h100-80gb:8"), 2)
    assert choice.config.train.batch % 2 == 0
    assert any("(counted in the whole text)" in line for line in choice.lines)
    # Only the GPUs that train count.
    one_of_eight = choose_model(run, find_hardware("h100-80gb:8"), 1, 1)
    assert one_of_eight == choose_model_for_plan(run, find_hardware("h100-80gb:1"), None)
    # --nproc counts the processes of a node.
    three = find_hardware("cpu", nodes=3)
    assert processes_on_host(run, three, 2) == 2
    assert choose_model_for_plan(run, three, None).config.train.batch % 3 == 0


def text_of_words() -> dict[str, Any]:
    words = random.Random(0)
    Path("text.txt").write_text(" ".join("".join(words.choices("aeiknorst", k=4)) for _ in range(20_000)))
    return {"sources": [{"path": "text.txt"}]}


@pytest.mark.slow
def test_a_gpu_whose_speed_is_not_known_is_refused_and_its_plan_says_so():
    run = auto_run("1h", data=text_of_words())
    unlisted = replace(find_hardware("h100-80gb:1"), name="Tesla K80", peak_flops={})
    with pytest.raises(InputError, match="Tesla K80 is not in the table") as error:
        choose_model_for_plan(run, unlisted, None)
    assert error.value.problems[0].where == "model.auto"
    plan = describe(make_plan(chosen(run), unlisted))
    assert "Tesla K80 is not in the table" in plan
    assert "offload" not in plan
    offloading = parse_run(dumped(run), {"parallel.offload": "cpu", "parallel.data": "fsdp"}, dict(PLACE))
    with pytest.raises(InputError) as error:
        choose_model_for_plan(offloading, find_hardware("h100-80gb:1"), None)
    assert error.value.problems[0].where == "parallel.offload"


def test_constants_that_were_not_measured_are_said_to_be_assumed():
    run = fit_block_to_text(auto_run(), NOVEL)
    (line,) = [line for line in choose_by_speed(run, NOVEL, speed(), 1, 64 * GIB).lines if line.startswith("assumed")]
    assert all(each in line for each in read_fits().assumed)


def test_a_run_goes_on_with_what_was_chosen_when_it_began(tmp_path):
    file = write_run(tmp_path / "run.yaml", model={"config": None, "auto": True}, train={"steps": None, "budget": "1h"})
    run = load_run(str(file))
    assert restore_choice(run) is None  # nothing has begun
    first = chosen(run)
    folder = Path(run.run)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_run(first))
    assert restore_choice(run) is None  # it never came to a checkpoint
    assert restore_choice(run, needs_checkpoint=False) == first
    (folder / "checkpoints" / "step-000000003").mkdir(parents=True)
    assert restore_choice(run) == first
    own = load_run(str(file), {"train.batch": 48})
    assert restore_choice(own).train.batch == 48  # and is refused when the two are compared


def test_a_short_text_gets_no_model_larger_for_it_than_any_that_was_measured():
    """However much time there is: an hour of what an H100 does."""
    text = replace(NOVEL, tokens=50_000)
    size = Size(chosen(auto_run("1h"), text, rate=1e14).model.config["num_attention_heads"])
    assert size.parameters(text.vocabulary) <= read_fits().largest["parameters_per_token"] * text.tokens


def test_a_text_that_is_read_often_is_learned_with_a_weight_decay_that_timescale_half_a_pass():
    text, run = replace(NOVEL, tokens=50_000), auto_run("10min")
    train = chosen(run, text).train
    steps_per_epoch = text.tokens / (train.batch * 256)
    assert train.weight_decay * train.muon_learning_rate * steps_per_epoch == pytest.approx(2, rel=0.05)
    assert chosen(auto_run("10min", weight_decay=0.1), text).train.weight_decay == 0.1
    assert chosen(run, replace(NOVEL, tokens=500_000_000)).train.weight_decay == 0.1
    assert chosen(auto_run("10min", learning_rate=1e-4), text).train.weight_decay == 0.1
    few_steps = chosen(run, replace(NOVEL, tokens=5_000)).train
    assert few_steps.weight_decay * few_steps.muon_learning_rate == pytest.approx(0.1)


def test_after_some_passes_the_loss_rises_again_and_sooner_for_a_larger_model():
    fits = read_fits()
    plain, forgetting = fits.regularizations

    def best_passes(regularization: Regularization, size: Size) -> int:
        unique, parameters = NOVEL.tokens, size.parameters(NOVEL.vocabulary)
        losses = {
            passes: fits.loss(regularization, size.layer_parameters, parameters, passes * unique, 2048, unique)
            for passes in range(1, 30)
        }
        return min(losses, key=losses.__getitem__)

    assert 2 <= best_passes(plain, Size(6)) < best_passes(plain, Size(2)) <= 6
    assert best_passes(forgetting, Size(6)) > best_passes(plain, Size(6))
