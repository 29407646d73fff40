"""Models small enough to train for a few steps in every precision."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from artel.config import TrainConfig
from artel.models.device import autocast_dtype
from artel.training.optim.loss_scaler import LossScale
from artel.training.optim.optimizer import Optimizer, clip_divisor

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 48, "vocab_size": 64}  # fmt: skip
GEMMA = {"model_type": "gemma", **{key: LLAMA[key] for key in LLAMA if key != "model_type"}, "head_dim": 16,
         "num_key_value_heads": 2}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32,
        "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


def model_of(**keys):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys))


def learn(
    model, steps: int, precision: str, scale: LossScale | None = None, loss_times: float = 1.0, **train
) -> list[float]:
    """The losses of a few steps on the same 4 rows, done as the loop does them; without steps that were left out."""
    optimizer = Optimizer(model, TrainConfig(**{"learning_rate": 1e-2, **train}))
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    dtype = autocast_dtype(precision)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(input_ids=ids, labels=ids).loss
        (loss * loss_times * (scale.scale if scale else 1)).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).float()
        if scale is None:
            optimizer.step(1.0, clip_divisor(norm, 1.0))
            losses.append(float(loss.detach()))
            continue
        norm = norm / scale.scale
        result = scale.overflow_flag(norm)
        optimizer.step(1.0, scale.divisor(clip_divisor(norm, 1.0)), result)
        scale.update(result)
        if not result:
            losses.append(float(loss.detach()))
    return losses
