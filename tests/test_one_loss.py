"""Principle 2 in one process: loss and gradient of a batch of 7 are the same in micro-batches of 7 and of 2."""

import numpy as np
import pytest
import torch

from artel.config import load_run
from artel.inference import open_untrained
from artel.parallel.data_parallel import DataParallel
from artel.parallel.process_group import World
from artel.preparing import prepare
from artel.tokens.batches import micro_batches
from support.objectives import objective_run
from support.runs import write_run

BATCH = 7
NAMES = ["causal", "masked", "span_qa", "tokens", "chat", "kto", "labels_of_pairs", "reward", "rerank", "embedding",
         "seq2seq"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_do_not_depend_on_the_micro_batch(tmp_path, name):
    file = tmp_path / "run.yaml"
    run = load_run(str(write_run(file) if name == "causal" else objective_run(file, name)))
    opened = open_untrained(run)
    objective, split = opened.objective, prepare(run).open().train
    objective.check(opened.model)
    objective.fit_statistics(split)
    if objective.needs_reference:
        objective.set_reference(np.zeros((split.samples, len(objective.outputs))), validation=False)
    samples = objective.dataset(split)
    strategy = DataParallel(opened.model, objective, World(0, 1, 0, torch.device("cpu")), "fp32")
    opened.model.train()

    def step(size):
        rows = micro_batches(
            samples, np.arange(BATCH), np.zeros(BATCH), rank=0, world_size=1, batch_size=BATCH, max_rows=size
        )
        batches = [objective.batch(each) for each in rows]
        opened.model.zero_grad()
        sums = strategy.run(batches, sum(batch.targets for batch in batches))
        gradients = [each.grad for each in opened.model.parameters() if each.grad is not None]  # BERT has a pooler
        return len(batches), sums, torch.cat([each.flatten() for each in gradients])

    count, sums, gradient = step(BATCH)
    other_count, other_sums, other_gradient = step(2)
    assert (count, other_count) == (1, 4)  # the last of the 4 has a row of padding
    torch.testing.assert_close(other_sums, sums, rtol=1e-5, atol=1e-5)
    assert gradient.norm() > 0
    assert (other_gradient - gradient).norm() < 1e-5 * gradient.norm()
