"""Choose a model and how it is trained for `train.budget`, the text and the hardware: `model: {auto: true}`.

Every size is tried with every batch: the speed says how many tokens the budget has, the fits what loss they end at. The
lowest is chosen. Keys that the run file sets are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from artel.config import RunConfig, TrainConfig
from artel.config.schema.quantities import duration
from artel.errors import InputError, Problem
from artel.planning.budget.auto import with_model
from artel.planning.budget.fits import Fits, Regularization, read_fits
from artel.planning.budget.sizes import DEPTHS, Size
from artel.planning.budget.speed import Speed, measure_smallest, measure_speed, plan_speed
from artel.planning.budget.text import BLOCKS, Text, text_of, with_block
from artel.planning.hardware import Hardware
from artel.planning.plan.batches import planned_data
from artel.planning.plan.plan import processes_on_host
from artel.training.comparison import expected_range

CHOOSING = "choosing the model: two small ones are tried, which takes about 15 s, longer beside other programs"
"""To be said before `choose`."""
TRYING = "trying whether train.budget is long enough for the smallest model, which takes about 5 s"
"""To be said before `check_before_text`."""

_FEWEST_BLOCKS = 16
"""Of the training text."""
_FEWEST_STEPS = 50
"""Below, the rates of warmup and decay make up all of the run."""
_LEAST = 4.0
"""Seconds: loading, the first steps, a validation and a save of a small model took 2 to 3 on two busy cores."""
_DOUBTFUL = 120.0
"""Seconds of a budget that may be too short: 50 steps of the smallest model took 62 on two busy cores."""
_MOST_BATCH = 2**20  # tokens
_LEAST_BATCH = 2048  # tokens, of which the runs of many passes were; fewer ended higher, at the same learning rates
_IN_STEPS = 0.93
"""Share of a budget that is left for steps; the rest goes to loading, validation and saving."""
_BYTES = 16
"""For each parameter: weights, gradients and two averages in float32. As much is left for everything else."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the chosen run is to reach; RUN/choice.json keeps it, and beside it what was reached."""

    bits_per_byte: float | None
    """Of the validation part, by the fits; None where the bytes of a character are not known."""
    tokens_per_second: float
    """While steps are taken."""
    seconds: float
    """`train.budget`."""
    source: str
    """Where the speed is from, for people."""
    how: str
    """Origin of the speed, as a phrase for the user."""

    def beside_plan(self) -> str:
        """Why the speed is not the one of the run's plan, which stands before this."""
        return f"the model was chosen by {self.tokens_per_second:,.0f} tokens/s, {self.how}"


@dataclass(frozen=True, slots=True)
class Choice:
    run: RunConfig
    """With what was chosen in place of `auto`."""
    lines: tuple[str, ...]
    """What was chosen and why, for people."""
    expected: Expected

    def to_json(self) -> dict[str, Any]:
        """The content of RUN/choice.json: the model that was chosen, and what is expected of it."""
        expected = self.expected
        figures = {"bits_per_byte": expected.bits_per_byte, "tokens_per_second": expected.tokens_per_second}
        return {
            "model": self.run.model.config,
            "expected": figures | {"minutes": expected.seconds / 60},
            "speed": expected.source,
        }


@dataclass(frozen=True, slots=True)
class _Option:
    size: Size
    batch: int
    """Blocks."""
    regularization: Regularization
    tokens: float
    """That the budget has time for."""
    loss: float
    """Bits per byte, by the fits."""


def choose(
    run: RunConfig, hardware: Hardware, processes: int, on_host: int, tell: Callable[[str], None] = lambda _: None
) -> Choice:
    """The choice for a run with `model.auto` on `processes` processes, `on_host` of them on each host.

    On CPUs, which are this machine's, a few steps are measured. GPUs, one for each process, are known by public
    figures: measuring here would hold memory of one. Of a text that is not prepared a sample counts. Raises InputError.
    """
    text = text_of(run)
    run = fitting_block(run, text)
    if hardware.shares_memory:
        speed = measure_speed(run, planned_data(run), processes, on_host, tell)
        memory = hardware.memory_bytes / on_host
    else:
        used = replace(hardware, count=on_host, nodes=processes // on_host)
        speed = plan_speed(run, text.vocabulary, used)
        memory = hardware.memory_bytes
    return decide(run, text, speed, processes, memory)


def is_doubtful(run: RunConfig, hardware: Hardware) -> bool:
    """Whether the budget may be too short for anything, so that it pays to look before a text is prepared."""
    return hardware.shares_memory and run.train.budget is not None and run.train.budget < _DOUBTFUL


def check_before_text(run: RunConfig, processes: int, on_host: int) -> None:
    """Raise InputError, with the shortest budget, where a few steps of the smallest model say that it is too short.

    It takes some seconds of CPUs, and no text beyond its first documents.
    """
    if "block" not in run.data.model_fields_set:
        run = with_block(run, BLOCKS[-1])
    _check_shortest(run, processes, measure_smallest(run, planned_data(run), processes, on_host))


def decide(run: RunConfig, text: Text, speed: Speed, processes: int, memory: float) -> Choice:
    """The choice where the block, the speed and the memory of a process in bytes are known. Raises InputError."""
    fits = read_fits()
    _check_shortest(run, processes, lambda tokens: speed.seconds(Size(DEPTHS[0]), tokens))
    options = list(_options(run, text, speed, processes, memory, fits))
    best = min(options, key=lambda option: option.loss)
    expected = _expected(run, text, speed, best, fits)
    return Choice(_chosen(run, text, best, fits), tuple(_reasons(run, text, expected, options, best, fits)), expected)


def choose_for_plan(
    run: RunConfig, hardware: Hardware, nproc: int | None, tell: Callable[[str], None] = lambda _: None
) -> Choice:
    """The choice for `artel plan`, with as many processes as `make_plan` takes. Raises InputError."""
    on_host = processes_on_host(run, hardware, nproc)
    return choose(run, hardware, on_host * hardware.nodes, on_host, tell)


def fitting_block(run: RunConfig, text: Text) -> RunConfig:
    """The run with a block that its text fills. Raises InputError for a text that is too small for any."""
    if "block" in run.data.model_fields_set:
        return run
    held_out = text.validation_tokens or None
    for block in BLOCKS:
        if text.tokens > _FEWEST_BLOCKS * block and (held_out is None or held_out > block):
            return with_block(run, block)
    problems = []
    if text.tokens <= _FEWEST_BLOCKS * block:
        what = (
            f"the training text has {text.tokens:,} tokens, and {_FEWEST_BLOCKS * block:,} are the fewest to learn from"
        )
        problems.append(Problem("data.sources", what, "give more text"))
    if held_out is not None and held_out <= block:
        what = f"the validation part has {held_out:,} tokens, too few for one block of {block}"
        problems.append(Problem("data.validation", what, "write a larger share, or give more text"))
    raise InputError(problems)


def _options(run: RunConfig, text: Text, speed: Speed, processes: int, memory: float, fits: Fits) -> Iterator[_Option]:
    """Every size with every batch that the budget has time for, and memory has room for."""
    seconds, block = _seconds_for_steps(run), run.data.block
    for depth in DEPTHS:
        size = Size(depth)
        parameters = size.parameters(text.vocabulary)
        too_large = 2 * _BYTES * parameters > memory or parameters > fits.largest["parameters_a_token"] * text.tokens
        if depth > DEPTHS[0] and too_large:
            return
        for batch in _batches(run, processes):
            step = speed.seconds(size, batch * block)
            if _FEWEST_STEPS * step <= seconds:
                tokens = seconds / step * batch * block
                for each in _regularizations(run, fits, tokens, text.tokens / (batch * block)):
                    loss = fits.loss(each, size.layer_parameters, parameters, tokens, batch * block, text.tokens)
                    yield _Option(size, batch, each, tokens, loss)


def _batches(run: RunConfig, processes: int) -> list[int]:
    """Batches to choose from, in blocks: each process has as many; or the one that the run file sets."""
    if "batch" in run.train.model_fields_set:
        return [run.train.batch]
    each = [2**power for power in range(20)]
    block = run.data.block * processes
    return [processes * rows for rows in each if _LEAST_BATCH <= rows * block <= _MOST_BATCH] or [processes]


def _regularizations(run: RunConfig, fits: Fits, tokens: float, steps_a_pass: float) -> Iterator[Regularization]:
    """To choose from. The second is known with the optimizer and rates that are chosen, and may come to the first."""
    plain, forgetting = fits.regularizations
    yield plain
    train = run.train
    own = {"weight_decay", "learning_rate", "muon_learning_rate"} & train.model_fields_set
    if own or ("optimizer" in train.model_fields_set and train.optimizer != fits.optimizer):
        return
    if forgetting.decay(fits.layers_rate(tokens), steps_a_pass) > plain.weight_decay:
        yield forgetting


def _seconds_for_steps(run: RunConfig) -> float:
    assert run.train.budget is not None
    return _IN_STEPS * run.train.budget


def _check_shortest(run: RunConfig, processes: int, seconds: Callable[[int], float]) -> None:
    """Raise InputError, with the shortest budget, where the smallest model has no time for the fewest steps.

    `seconds` are those of a step of so many tokens.
    """
    fewest = min(seconds(batch * run.data.block) for batch in _batches(run, processes))
    least = max(_LEAST, _FEWEST_STEPS * fewest / _IN_STEPS)
    assert run.train.budget is not None
    if least > run.train.budget:
        shortest = math.ceil(least * 1.1)  # what is measured again may be a little slower
        steps = f"{_FEWEST_STEPS} steps of the smallest model, loading, a validation and a save"
        what = f"{duration(run.train.budget)} is too short: {steps} take {shortest} s"
        raise InputError.at("train.budget", what, f"write {shortest}s or more")


def _chosen(run: RunConfig, text: Text, option: _Option, fits: Fits) -> RunConfig:
    """The run with the choice, in keys that its file does not set."""
    values: dict[str, Any] = {"batch": option.batch, **fits.keys}
    if "optimizer" not in run.train.model_fields_set:
        values["optimizer"] = fits.optimizer
    for key, law in fits.rates.get(values.get("optimizer", run.train.optimizer), {}).items():
        values[key] = float(f"{law.at(option.tokens):.2g}")
    steps_a_pass = text.tokens / (option.batch * run.data.block)
    values["weight_decay"] = float(f"{option.regularization.decay(fits.layers_rate(option.tokens), steps_a_pass):.2g}")
    chosen = {key: value for key, value in values.items() if key not in run.train.model_fields_set}
    train = TrainConfig.model_validate({**run.train.model_dump(), **chosen})
    return with_model(run.model_copy(update={"train": train}), option.size)


def _expected(run: RunConfig, text: Text, speed: Speed, best: _Option, fits: Fits) -> Expected:
    assert run.train.budget is not None
    letters = text.bytes_per_character
    bits = None if letters is None else fits.bits_per_byte(best.loss, letters)
    return Expected(bits, best.tokens / _seconds_for_steps(run), run.train.budget, speed.source, speed.how)


def _reasons(
    run: RunConfig, text: Text, expected: Expected, options: list[_Option], best: _Option, fits: Fits
) -> Iterator[str]:
    """Why, in a few lines."""
    size, train = best.size, _chosen(run, text, best, fits).train
    rates = ", ".join(f"{key} {getattr(train, key):g}" for key in fits.rates.get(train.optimizer, ()))
    yield (
        f"model.auto: {_count(size.parameters(text.vocabulary))} parameters, {size.layers} layers of {size.width}; "
        f"batches of {best.batch} × {run.data.block} tokens, {train.optimizer} ({rates}), "
        f"weight_decay {train.weight_decay:g}"
    )
    yield (
        f"{duration(expected.seconds)} are about {_count(best.tokens)} tokens ({expected.tokens_per_second:,.0f} "
        f"tokens/s {expected.source}): {best.tokens / text.tokens:,.1f} passes over the {_count(text.tokens)} tokens "
        f"of the text, by {text.note}"
    )
    if expected.bits_per_byte is not None:
        low, high = expected_range(expected.bits_per_byte)
        yield f"expected: {low:.2f} to {high:.2f} bits per byte of held-out text, estimated from small runs on a novel"
    others: dict[int, list[float]] = {}
    for option in options:
        others.setdefault(option.size.depth, []).append(option.loss)
    depths = sorted(others)
    place = depths.index(size.depth)
    beside = [
        f"a model of {_count(Size(depth).parameters(text.vocabulary))} would end "
        f"{100 * (min(others[depth]) / best.loss - 1):.1f} % worse"
        for depth in depths[max(0, place - 1) : place + 2]
        if depth != size.depth
    ]
    if beside:
        yield f"estimated from small runs: {' and '.join(beside)}"
    beyond = [
        f"{_count(value)} {key.replace('_', ' ')} (up to {_count(fits.largest[key])} were measured)"
        for key, value in (
            ("layer_parameters", size.layer_parameters),
            ("tokens", best.tokens),
            ("epochs", best.tokens / text.tokens),
        )
        if value > 2 * fits.largest[key]
    ]
    if fits.assumed:
        yield f"assumed, not measured: {'; '.join(fits.assumed)}"
    if beyond:
        yield f"this is beyond what the fits were made of: {'; '.join(beyond)}"


def _count(number: float) -> str:
    for scale, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"
