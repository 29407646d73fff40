"""The YAML of axolotl as a run file: its data sets, model, adapter, training and processes.

A key that is not carried over is reported, also an unknown one.
"""

from __future__ import annotations

from artel.config.converters.axolotl.data import carry_data
from artel.config.converters.axolotl.model import carry_adapter, carry_model, carry_precision
from artel.config.converters.axolotl.names import leave_the_rest
from artel.config.converters.axolotl.tasks import carry_tasks
from artel.config.converters.axolotl.training import carry_parallel, carry_training
from artel.config.converters.fitting import fit_together
from artel.config.converters.keys import Converted, YamlKeys, a_text, top_level_keys
from artel.config.converters.tool import Tool


def is_axolotl(text: str) -> bool:
    """True for axolotl's YAML, also a broken one."""
    keys = top_level_keys(text)
    own = {"datasets", "pretraining_dataset", "sequence_len", "adapter", "micro_batch_size", "rl", "num_epochs"}
    return "base_model" in keys and bool(keys & own) and "data" not in keys


def convert_axolotl(text: str, place: str) -> Converted:
    """The run file of axolotl's configuration. Relative paths start at the current folder, as in axolotl.

    Raises InputError with all problems.
    """
    old = YamlKeys(text, place, _DEFAULTS)
    old.carry("output_dir", "run", a_text)
    carry_data(old)
    carry_model(old)
    carry_adapter(old)
    carry_precision(old)
    carry_training(old)
    carry_tasks(old)
    carry_parallel(old)
    leave_the_rest(old)
    fit_together(old)
    return old.converted(_ORDER)


_ORDER = tuple(
    "run seed objective data prepare tokenizer model chat preference train validate parallel checkpoint log "
    "track".split()
)
# Defaults of axolotl that differ from artel's, so that the run stays the same.
_DEFAULTS = {
    "sequence_len": 512,
    "val_set_size": 0,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "weight_decay": 0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "lora_r": 8,
    "lora_alpha": 8,
    "lora_dropout": 0,
    "save_total_limit": 4,
    "eval_strategy": "no",
}
AXOLOTL = Tool("axolotl", is_axolotl, convert_axolotl, is_no_run_file=True)
