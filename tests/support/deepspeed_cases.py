"""What tests of DeepSpeed share: a user's file, a small model, and steps through a layout."""

import json
from pathlib import Path

import numpy as np
import torch

from artel.config import RunConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# As large runs have it: eight GPUs, both offloads, sizes as floats, fp16, batch keys left open.
OFFLOAD = {
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 1e9,
        "stage3_prefetch_bucket_size": 1e9,
        "stage3_param_persistence_threshold": 1e9,
    },
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1},
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}  # fmt: skip


def run_of(**train):
    return RunConfig.model_validate({"data": {"sources": [{"format": "dummy"}]}, "train": train})


def gpt2_config():
    from transformers import GPT2Config

    # 33 wide: pieces for two processes are filled up.
    return GPT2Config(vocab_size=101, n_positions=32, n_embd=33, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0,
                      resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip


def resolve(tree, folder, *, world=2, device=CPU, **train):
    from artel.parallel.deepspeed.config import read_deepspeed

    file = Path(folder) / "ds_config.json"
    file.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return read_deepspeed(str(file), run_of(**train), world, device)


ROWS, ACCUMULATION = 2, 2
# Buckets and pieces smaller than some parameters, and no parameter spared from being shared out.
SMALL = {"reduce_bucket_size": 3000, "sub_group_size": 5000, "stage3_param_persistence_threshold": 0,
         "stage3_prefetch_bucket_size": 2000}  # fmt: skip


def bare_objective():
    from artel.objectives.causal import Causal

    class Bare(Causal):  # the loss needs neither run nor tokenizer
        def __init__(self):
            pass

    return Bare()


def batch_of_step(step, number):
    """Rows with a few to many targets: no two micro-batches have equally many."""
    from artel.objectives import Batch
    from artel.objectives.collate import target_tensors

    source = np.random.default_rng((step, number))
    ids = source.integers(0, 101, (ROWS, 17))
    targets = ids[:, 1:].copy()
    for row in targets:
        row[: source.integers(0, 15)] = -100
    tensors = {"input_ids": torch.from_numpy(ids[:, :-1].copy())} | target_tensors(targets)
    return Batch(tensors, int((targets != -100).sum()), targets.size)


def cpu_processes(rank, world):
    from artel.parallel import World

    return World(rank, world, rank, CPU)


def pytorch_optimizer(model, train):
    """PyTorch's optimizer as training makes it."""
    from artel.training.optim.optimizer import optimizer_factory

    return optimizer_factory(model, train, 0)


def train_steps(layout, optimizer, first, last, rank, world):
    """(loss, gradient norm) of each step."""
    results = []
    for step in range(first, last):
        batches = [batch_of_step(step, number) for number in range(2 * ACCUMULATION)]
        targets = float(sum(batch.targets for batch in batches))
        share = len(batches) // world
        sums = layout.run(batches[rank * share : (rank + 1) * share], targets)
        norm, right = optimizer.clip_and_step(1 / (step + 1), layout.gradient_norm())
        assert bool(right)
        results.append((layout.all_reduce_sum([float(sums[0])])[0] / targets, float(norm)))
    return results


def relative_difference(actual, expected):
    return max(abs(a - b) / abs(b) for one, other in zip(actual, expected, strict=True)
               for a, b in zip(one, other, strict=True))  # fmt: skip


def train_section(world, **changes):
    # A rate that moves, and a clip that is reached.
    return {"learning_rate": 0.01, "clip": 0.5, "batch": ROWS * ACCUMULATION * world, "micro_batch": ROWS,
            "precision": "fp32", **changes}  # fmt: skip
