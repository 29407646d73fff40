"""A peer of benchmarks/train_speed.py: PyTorch without a trainer, on transformers' model, compiled as a whole.

    python benchmarks/train_speed.py --peer benchmarks/peers/bare_loop.py:train

The loop has what nanoGPT's has: bf16 autocast, attention without a mask, one compiled graph with the loss, fused AdamW,
clipping. It imports nothing of artel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

if TYPE_CHECKING:
    from contestant import AfterStep, Work


def train(work: Work, after_step: AfterStep) -> None:
    """Train until killed; see contestant.py."""
    auto_class = AutoModelForCausalLM if work.objective == "causal" else AutoModelForMaskedLM
    model = auto_class.from_pretrained(work.model, attn_implementation="sdpa").to(work.device)
    model.config.pad_token_id = None  # transformers would look for padding in each step
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), work.learning_rate, work.betas, work.epsilon, work.weight_decay, fused=True
    )

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    compute = torch.compile(loss_of) if work.device == "cuda" else loss_of
    for step in range(len(work.inputs) // work.batch):
        inputs, targets = (tensor.to(work.device, non_blocking=True) for tensor in work.batch_of(step))
        with torch.autocast(work.device, torch.bfloat16):
            loss = compute(inputs, targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step(loss.detach())


train.precision = "bf16"
