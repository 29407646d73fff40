"""What a model writes while it trains: samples.jsonl."""

import json
from pathlib import Path

import pytest
import torch

from artel.config import load_run
from artel.parallel import World
from artel.preparing import prepare
from artel.training.loop import train
from support.runs import write_run


class Killed(Exception): ...


@pytest.mark.slow
@pytest.mark.parametrize(("every", "dies"), [("never", 1), (1, 1), (1, 3)])
def test_samples_of_each_step_stand_once_also_where_a_killed_run_begins_again(every, dies):
    """The first are written before the first step, by the untrained model."""
    validate = {"every": 2, "prompts": ["The", "A"], "new_tokens": 3}
    checkpoint = {"every": every, "asynchronous": False}
    file = write_run(Path("run.yaml"), train={"steps": 4, "batch": 4}, validate=validate, checkpoint=checkpoint)
    config = load_run(str(file))

    def start(*callbacks):
        return train(config, prepare(config), World(0, 1, 0, torch.device("cpu")), callbacks)

    def kill(run):
        if run.step == dies:
            raise Killed

    with pytest.raises(Killed):
        start(kill)
    start()
    samples = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in samples] == [(s, p) for s in (0, 2, 4) for p in ("The", "A")]
    assert all(line["text"] for line in samples)
