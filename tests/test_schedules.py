"""Schedules with settings, against what transformers and PyTorch compute."""

import pytest
import torch
from transformers import get_cosine_with_hard_restarts_schedule_with_warmup, get_inverse_sqrt_schedule

from artel.config import TrainConfig
from artel.config.converters.tools import convert
from artel.training.schedule import rate

STEPS = 60


def of_transformers(schedule, **options):
    """The rates after warmup, whose first step has a rate of 0 there."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, **options)
    rates = []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("timescale", "warmup"), [(None, 6), (20, 6), (None, 0), (5, 0)])
def test_inverse_sqrt(timescale, warmup):
    train = TrainConfig.model_validate(
        {"schedule": "inverse_sqrt", "inverse_sqrt": {"timescale": timescale}, "warmup": warmup}
    )
    expected = of_transformers(get_inverse_sqrt_schedule, num_warmup_steps=warmup, timescale=timescale)
    assert [rate(train, step, STEPS) for step in range(warmup, STEPS)] == pytest.approx(expected[warmup:])


@pytest.mark.parametrize(("cycles", "warmup"), [(1, 6), (3, 6), (4, 0)])
def test_cosine_with_restarts(cycles, warmup):
    tree = {"schedule": "cosine_with_restarts", "warmup": warmup}
    train = TrainConfig.model_validate(tree | {"cosine_with_restarts": {"num_cycles": cycles}})
    schedule = get_cosine_with_hard_restarts_schedule_with_warmup
    expected = of_transformers(schedule, num_warmup_steps=warmup, num_training_steps=STEPS, num_cycles=cycles)
    assert [rate(train, step, STEPS) for step in range(warmup, STEPS)] == pytest.approx(expected[warmup:])


def test_their_settings_are_carried_over_from_transformers(tmp_path):
    command = "python run_clm.py --model_name_or_path m --train_file a --lr_scheduler_type cosine_with_restarts"
    done = convert(f"""{command} --lr_scheduler_kwargs '{{"num_cycles": 3}}'""", "old")
    assert done.run["train"]["schedule"] == "cosine_with_restarts"
    assert done.run["train"]["cosine_with_restarts"] == {"num_cycles": 3}
    assert not any("lr_scheduler" in line for line in done.not_carried + done.differs)
