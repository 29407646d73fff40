"""Choose a model and its training for `train.budget`, the text and the hardware: `model: {auto: true}`.

Every size is combined with every batch. The measured speed gives the number of tokens that fit into the budget. The
fits give the loss for that number of tokens. The lowest loss wins. Keys set in the run file do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from artel.config import RunConfig, TrainConfig
from artel.config.schema.quantities import format_duration
from artel.errors import InputError, Problem
from artel.planning.budget.fits import Fits, Regularization, read_fits
from artel.planning.budget.sizes import DEPTHS, Size, with_model_size
from artel.planning.budget.speed import Speed, measure_smallest, measure_speed, plan_speed
from artel.planning.hardware import Hardware
from artel.planning.plan.batches import plan_data
from artel.planning.plan.length import plan_length
from artel.planning.plan.run_plan import processes_on_host
from artel.preparing import prepare_silently
from artel.text import Ledger, read_documents
from artel.training.comparison import expected_range

CHOOSING_MESSAGE = "choosing the model: trying two small ones, which takes about 15 s, longer if other programs run"
"""Logged before `choose_model`."""
TRYING_MESSAGE = "trying whether train.budget is long enough for the smallest model, which takes about 5 s"
"""Logged before `check_budget_before_text`."""

BLOCKS = (256, 128, 64)
"""Block lengths to choose from, in tokens. The fits were made with the first."""
_MAX_DOCUMENTS = 200  # of a text that is not prepared, to count its bytes and characters
_MIN_BLOCKS = 16
"""Minimum size of the training text."""
_MIN_STEPS = 50
"""In shorter runs, warmup and decay would take all of the steps."""
_MIN_BUDGET_SECONDS = 4.0
"""Shortest budget in seconds: loading, the first steps, a validation and a save took 2 to 3 on two busy cores."""
_DOUBTFUL_SECONDS = 120.0
"""Seconds below which a budget may be too short: 50 steps of the smallest model took 62 on two busy cores."""
_MAX_BATCH_TOKENS = 2**20
_MIN_BATCH_TOKENS = 2048  # as in the runs with many epochs; smaller batches ended higher, at the same learning rates
_STEP_FRACTION = 0.93
"""Fraction of a budget spent on steps. Loading, validation and saving take the remaining time."""
_BYTES_PER_PARAMETER = 16
"""Weights, gradients and two averages in float32. Activations and buffers get the same amount."""


@dataclass(frozen=True, slots=True)
class TextSize:
    """Size of a text: tokens to train on and to validate on."""

    tokens: int
    """Tokens of the training part."""
    validation_tokens: int | None
    """0 if no text is held out. None if unknown until the text is prepared."""
    vocabulary: int
    note: str
    """Source of the number of tokens."""
    bytes_per_character: float | None = None
    """In UTF-8; None if unknown."""


@dataclass(frozen=True, slots=True)
class ExpectedResults:
    """Expected results of the chosen run. RUN/choice.json keeps them, next to the measured ones."""

    bits_per_byte: float | None
    """On the validation part, by the fits. None if the bytes per character are unknown."""
    tokens_per_second: float
    """During steps."""
    seconds: float
    """`train.budget`."""
    source: str
    """Source of the speed, for people."""
    method: str
    """Origin of the speed, as a phrase for the user."""

    def speed_note(self) -> str:
        """Return a line to print after the run's plan, whose speed may differ."""
        return f"the model was chosen by {self.tokens_per_second:,.0f} tokens/s, {self.method}"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    config: RunConfig
    """The run with the chosen values in place of `auto`."""
    lines: tuple[str, ...]
    """The choice and its reasons, for people."""
    expected: ExpectedResults

    def to_json(self) -> dict[str, Any]:
        """Return the content of RUN/choice.json: the chosen model and the expected results."""
        expected = self.expected
        metrics = {"bits_per_byte": expected.bits_per_byte, "tokens_per_second": expected.tokens_per_second}
        return {
            "model": self.config.model.config,
            "expected": metrics | {"minutes": expected.seconds / 60},
            "speed": expected.source,
        }


@dataclass(frozen=True, slots=True)
class _Option:
    size: Size
    batch: int
    """Blocks."""
    regularization: Regularization
    tokens: float
    """Tokens that fit into the budget."""
    loss: float
    """Bits per byte, by the fits."""


def choose_model(config: RunConfig, hardware: Hardware, processes: int, on_host: int) -> ModelChoice:
    """Choose the model of a run with `model.auto` on `processes` processes, `on_host` of them on each host.

    On this machine's CPU, measure a few steps. For GPUs, one per process, use published numbers, because a measurement
    would occupy GPU memory. Without a token store, read a sample of the text. Raise InputError if the text or the
    budget is too small.
    """
    text = measure_text(config)
    config = fit_block_to_text(config, text)
    if hardware.shares_memory:
        speed = measure_speed(config, plan_data(config), processes, on_host)
        memory = hardware.memory_bytes / on_host
    else:
        used_hardware = replace(hardware, count=on_host, nodes=processes // on_host)
        speed = plan_speed(config, text.vocabulary, used_hardware)
        memory = hardware.memory_bytes
    return choose_by_speed(config, text, speed, processes, memory)


def is_doubtful(config: RunConfig, hardware: Hardware) -> bool:
    """True if the budget may be too short for every model. Then check it before the text is prepared."""
    return hardware.shares_memory and config.train.budget is not None and config.train.budget < _DOUBTFUL_SECONDS


def check_budget_before_text(config: RunConfig, processes: int, on_host: int) -> None:
    """Measure a few steps of the smallest model. Raise InputError if the budget is too short.

    Takes some seconds of CPU time, and reads only the first documents of the text.
    """
    if "block" not in config.data.model_fields_set:
        config = with_block(config, BLOCKS[-1])
    _check_shortest(config, processes, measure_smallest(config, plan_data(config), processes, on_host))


def choose_by_speed(config: RunConfig, text: TextSize, speed: Speed, processes: int, memory: float) -> ModelChoice:
    """Choose by the speed of each size and the memory per process in bytes.

    The block of `config` must fit the text. Raise InputError if the budget is too short.
    """
    fits = read_fits()
    _check_shortest(config, processes, lambda tokens: speed.seconds(Size(DEPTHS[0]), tokens))
    options = list(_list_options(config, text, speed, processes, memory, fits))
    best = min(options, key=lambda option: option.loss)
    expected = _expect_results(config, text, speed, best, fits)
    reasons = tuple(_explain_choice(config, text, expected, options, best, fits))
    return ModelChoice(_apply_choice(config, text, best, fits), reasons, expected)


def choose_model_for_plan(config: RunConfig, hardware: Hardware, nproc: int | None) -> ModelChoice:
    """Choose for `artel plan`, with the number of processes that `make_plan` uses.

    Raise InputError if the text or the budget is too small.
    """
    on_host = processes_on_host(config, hardware, nproc)
    return choose_model(config, hardware, on_host * hardware.nodes, on_host)


def measure_text(config: RunConfig) -> TextSize:
    """Count tokens in the token store, or estimate them from a sample.

    Raise InputError if no sample is representative.
    """
    if "block" not in config.data.model_fields_set:
        config = with_block(config, BLOCKS[-1])  # a small text has no larger block
    # Without a budget, the planned length is one epoch.
    config = config.model_copy(update={"train": config.train.model_copy(update={"budget": None})})
    data = plan_data(config)
    vocabulary = data.tokenizer.vocabulary
    if data.store is not None:
        train, validation = data.store.train.tokens, data.store.validation.tokens
        bytes_per_character = _bytes_per_character(prepare_silently(config).ledger()["parts"])
        return TextSize(train, validation, vocabulary, "counted in the prepared text", bytes_per_character)
    length = plan_length(config, data)
    if length is None or length.epoch_tokens is None:
        raise InputError.at(
            "data.sources", "the amount of text cannot be estimated from a sample", "run artel prepare first"
        )
    texts = [document.record.text for document in islice(read_documents(config.data, Ledger()), _MAX_DOCUMENTS)]
    counts = {"bytes": sum(len(text.encode()) for text in texts), "characters": sum(map(len, texts))}
    bytes_per_character = _bytes_per_character({"train": counts})
    return TextSize(round(length.epoch_tokens), None, vocabulary, length.note, bytes_per_character)


def _bytes_per_character(parts: dict[str, Any]) -> float | None:
    """Return bytes per character over all splits of a ledger. None if it counts no characters (imported tokens)."""
    num_bytes, characters = (sum(counts.get(unit, 0) for counts in parts.values()) for unit in ("bytes", "characters"))
    return num_bytes / characters if num_bytes and characters else None


def with_block(config: RunConfig, block: int) -> RunConfig:
    return config.model_copy(update={"data": config.data.model_copy(update={"block": block})})


def fit_block_to_text(config: RunConfig, text: TextSize) -> RunConfig:
    """Return the run with the largest block that its text can fill.

    Raise InputError if the text is too small for every block.
    """
    if "block" in config.data.model_fields_set:
        return config
    held_out = text.validation_tokens or None
    for block in BLOCKS:
        if text.tokens > _MIN_BLOCKS * block and (held_out is None or held_out > block):
            return with_block(config, block)
    problems = []
    if text.tokens <= _MIN_BLOCKS * block:
        what = f"the training text has {text.tokens:,} tokens, but at least {_MIN_BLOCKS * block:,} are needed"
        problems.append(Problem("data.sources", what, "add more text"))
    if held_out is not None and held_out <= block:
        what = f"the validation part has {held_out:,} tokens, too few for one block of {block}"
        problems.append(Problem("data.validation", what, "use a larger fraction, or more text"))
    raise InputError(problems)


def _list_options(
    config: RunConfig, text: TextSize, speed: Speed, processes: int, memory: float, fits: Fits
) -> Iterator[_Option]:
    """Yield every size with every batch that fits into the budget and into memory."""
    seconds = _seconds_for_steps(config)
    block = config.data.block
    for depth in DEPTHS:
        size = Size(depth)
        parameters = size.parameters(text.vocabulary)
        too_large = (
            2 * _BYTES_PER_PARAMETER * parameters > memory
            or parameters > fits.largest["parameters_per_token"] * text.tokens
        )
        if depth > DEPTHS[0] and too_large:
            return
        for batch in _batch_sizes(config, processes):
            step_seconds = speed.seconds(size, batch * block)
            if _MIN_STEPS * step_seconds <= seconds:
                tokens = seconds / step_seconds * batch * block
                for regularization in _regularizations(config, fits, tokens, text.tokens / (batch * block)):
                    loss = fits.loss(
                        regularization, size.layer_parameters, parameters, tokens, batch * block, text.tokens
                    )
                    yield _Option(size, batch, regularization, tokens, loss)


def _batch_sizes(config: RunConfig, processes: int) -> list[int]:
    """Return the batch sizes to choose from, in blocks, or the one set in the run file.

    All processes get equal rows.
    """
    if "batch" in config.train.model_fields_set:
        return [config.train.batch]
    rows_per_process = [2**power for power in range(20)]
    block = config.data.block * processes
    return [
        processes * rows for rows in rows_per_process if _MIN_BATCH_TOKENS <= rows * block <= _MAX_BATCH_TOKENS
    ] or [processes]


def _regularizations(config: RunConfig, fits: Fits, tokens: float, steps_per_epoch: float) -> Iterator[Regularization]:
    """Yield the regularizations to choose from.

    The one per epoch was measured only with default optimizer and rates.
    """
    constant, per_epoch = fits.regularizations
    yield constant
    train = config.train
    user_keys = {"weight_decay", "learning_rate", "muon_learning_rate"} & train.model_fields_set
    if user_keys or ("optimizer" in train.model_fields_set and train.optimizer != fits.optimizer):
        return
    if per_epoch.decay(fits.layers_rate(tokens), steps_per_epoch) > constant.weight_decay:
        yield per_epoch


def _seconds_for_steps(config: RunConfig) -> float:
    assert config.train.budget is not None
    return _STEP_FRACTION * config.train.budget


def _check_shortest(config: RunConfig, processes: int, seconds: Callable[[int], float]) -> None:
    """Raise InputError, with the shortest budget, if there is no time for the minimum steps of the smallest model.

    `seconds(tokens)` is the time of a step of that many tokens.
    """
    min_step_seconds = min(seconds(batch * config.data.block) for batch in _batch_sizes(config, processes))
    min_seconds = max(_MIN_BUDGET_SECONDS, _MIN_STEPS * min_step_seconds / _STEP_FRACTION)
    assert config.train.budget is not None
    if min_seconds > config.train.budget:
        shortest = math.ceil(min_seconds * 1.1)  # a repeated measurement may be a little slower
        steps = f"{_MIN_STEPS} steps of the smallest model, loading, a validation and a save"
        what = f"{format_duration(config.train.budget)} is too short: {steps} take {shortest} s"
        raise InputError.at("train.budget", what, f"use {shortest}s or more")


def _apply_choice(config: RunConfig, text: TextSize, option: _Option, fits: Fits) -> RunConfig:
    """Return the run with the chosen values for all keys that its file does not set."""
    values: dict[str, Any] = {"batch": option.batch, **fits.keys}
    if "optimizer" not in config.train.model_fields_set:
        values["optimizer"] = fits.optimizer
    for key, law in fits.rates.get(values.get("optimizer", config.train.optimizer), {}).items():
        values[key] = float(f"{law.value_at(option.tokens):.2g}")
    steps_per_epoch = text.tokens / (option.batch * config.data.block)
    values["weight_decay"] = float(
        f"{option.regularization.decay(fits.layers_rate(option.tokens), steps_per_epoch):.2g}"
    )
    new_values = {key: value for key, value in values.items() if key not in config.train.model_fields_set}
    train = TrainConfig.model_validate({**config.train.model_dump(), **new_values})
    return with_model_size(config.model_copy(update={"train": train}), option.size)


def _expect_results(config: RunConfig, text: TextSize, speed: Speed, best: _Option, fits: Fits) -> ExpectedResults:
    assert config.train.budget is not None
    bytes_per_character = text.bytes_per_character
    bits = None if bytes_per_character is None else fits.bits_per_byte(best.loss, bytes_per_character)
    return ExpectedResults(
        bits, best.tokens / _seconds_for_steps(config), config.train.budget, speed.source, speed.method
    )


def _explain_choice(
    config: RunConfig, text: TextSize, expected: ExpectedResults, options: list[_Option], best: _Option, fits: Fits
) -> Iterator[str]:
    """Yield the reasons for the choice, a line each."""
    size = best.size
    train = _apply_choice(config, text, best, fits).train
    rates = ", ".join(f"{key} {getattr(train, key):g}" for key in fits.rates.get(train.optimizer, ()))
    yield (
        f"model.auto: {_format_count(size.parameters(text.vocabulary))} parameters in {size.layers} layers of "
        f"{size.width}; batches of {best.batch} × {config.data.block} tokens, {train.optimizer} ({rates}), "
        f"weight_decay {train.weight_decay:g}"
    )
    yield (
        f"{format_duration(expected.seconds)} at {expected.tokens_per_second:,.0f} tokens/s ({expected.source}) is "
        f"about {_format_count(best.tokens)} tokens = {best.tokens / text.tokens:,.1f} epochs of the text, which has "
        f"{_format_count(text.tokens)} ({text.note})"
    )
    if expected.bits_per_byte is not None:
        low, high = expected_range(expected.bits_per_byte)
        yield f"expected: {low:.2f} to {high:.2f} bits per byte of held-out text, estimated from small runs on a novel"
    losses: dict[int, list[float]] = {}
    for option in options:
        losses.setdefault(option.size.depth, []).append(option.loss)
    depths = sorted(losses)
    index = depths.index(size.depth)
    neighbors = [
        f"{100 * (min(losses[depth]) / best.loss - 1):.1f} % with "
        f"{_format_count(Size(depth).parameters(text.vocabulary))} parameters"
        for depth in depths[max(0, index - 1) : index + 2]
        if depth != size.depth
    ]
    if neighbors:
        yield f"other sizes would end with more bits per byte (estimated from small runs): {', '.join(neighbors)}"
    extrapolated = [
        f"{_format_count(value)} {key.replace('_', ' ')}, measured up to {_format_count(fits.largest[key])}"
        for key, value in (
            ("layer_parameters", size.layer_parameters),
            ("tokens", best.tokens),
            ("epochs", best.tokens / text.tokens),
        )
        if value > 2 * fits.largest[key]
    ]
    if fits.assumed:
        yield f"assumed, not measured: {'; '.join(fits.assumed)}"
    if extrapolated:
        yield f"the estimate extrapolates: {'; '.join(extrapolated)}"


def _format_count(count: float) -> str:
    for scale, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= scale:
            return f"{count / scale:.3g}{unit}"
    return f"{count:.3g}"
