"""Names of optimizers in other tools, and what stands for each in a run file."""

from __future__ import annotations

import re

from artel.config.converters.keys import Section, a_name, a_share, above_zero, not_negative
from artel.registry import OPTIMIZERS

# (pattern, artel's optimizer, what is different). The first that matches the whole name is taken; an optimizer that
# none matches is one that artel has not.
_STEPS = "its step is the learning rate times the parameter's root mean square here, so learning_rate must be set anew"
_EIGHT_BITS = "its averages are those of bitsandbytes' AdamW8bit, on the device"
_FLOAT = "its averages are in fp32, on the device"
MUON_RATE = "its rate is train.muon_learning_rate here, and that of the rest learning_rate: both are what is written"
_OPTIMIZERS = (
    (r"adamw_(8bit|bnb_8bit)", "adamw8bit", ""),
    (r"adamw8bit|Adam8bit", "adamw8bit", ""),
    (
        r"paged_adamw_8bit|PagedAdamW8bit|(ao_)?adamw_(torch_)?8bit|ao_adamw_fp8|adamw_torch_8bit",
        "adamw8bit",
        _EIGHT_BITS,
    ),
    (r"(ao_)?adamw_(torch_)?4bit", "adamw8bit", f"artel has none of 4 bits; {_EIGHT_BITS}"),
    (r"paged_adamw(_32bit)?|PagedAdamW", "adamw", _FLOAT),
    (r"adamw|adam|adamw_(hf|torch|torch_fused|torch_xla|torch_npu_fused|apex_fused|anyprecision)", "adamw", ""),
    (r"optimi_adamw|flash_adamw|AdamW|Adam|FusedAdam|DeepSpeedCPUAdam", "adamw", ""),
    (r"adafactor|Adafactor", "adafactor", _STEPS),
    (r"muon|Muon", "muon", MUON_RATE),
    (r"sgd|SGD|flash_sgdw?", "sgd", ""),
)


def optimizer_of(name: str) -> tuple[str, str]:
    """(artel's optimizer, how it differs) of another tool's name; adamw, with the names of all, where there is none."""
    for pattern, optimizer, difference in _OPTIMIZERS:
        if re.fullmatch(pattern, name):
            return optimizer, difference
    missing = f"artel has no such optimizer, and adamw is taken; write train.optimizer: {', '.join(OPTIMIZERS.names)}"
    return "adamw", missing


def carry_optimizer(trainer: Section) -> None:
    """The optimizer of TrainingArguments with its numbers."""
    trainer.carry("learning_rate", "train.learning_rate", above_zero)
    trainer.carry("weight_decay", "train.weight_decay", not_negative)
    trainer.carry("adam_epsilon", "train.epsilon", above_zero)
    betas = [trainer.read(f"adam_beta{number}", a_share) for number in (1, 2)]
    if None not in betas:
        trainer.put("train.betas", betas, "adam_beta1", "adam_beta2")
    clip = trainer.read("max_grad_norm", not_negative)
    if clip is not None:
        trainer.put("train.clip", clip or None, "max_grad_norm")  # 0 is for no clipping
    name = trainer.read("optim", a_name)
    if name is None:
        return
    optimizer, difference = optimizer_of(name)
    trainer.put("train.optimizer", optimizer, "optim")
    if optimizer == "muon":
        trainer.carry("learning_rate", "train.muon_learning_rate", above_zero)
    if difference:
        trainer.leave("optim", difference)
    for option in ("optim_args", "optim_target_modules"):
        trainer.leave(option, f"the optimizer {optimizer} has train.betas, epsilon, momentum and weight_decay")
