"""The YAML of torchtune's recipes as a run file: its data set, model, adapter and training.

A key that is not carried over is reported, also an unknown one.
"""

from __future__ import annotations

import re

from artel.config.converters.fitting import fit_together
from artel.config.converters.keys import Converted, YamlKeys, a_text
from artel.config.converters.tool import Tool
from artel.config.converters.torchtune.data import carry_data
from artel.config.converters.torchtune.interpolation import resolve
from artel.config.converters.torchtune.model import carry_model, carry_precision
from artel.config.converters.torchtune.names import leave_the_rest
from artel.config.converters.torchtune.training import carry_training
from artel.errors import InputError
from artel.registry import OBJECTIVES


def is_torchtune(text: str) -> bool:
    """True for torchtune's YAML, also a broken one."""
    return re.search(r"(^|[\s{,])[\"']?_component_[\"']?\s*:", text) is not None


def convert_torchtune(text: str, place: str) -> Converted:
    """The run file of a recipe's configuration. Raises InputError with all problems."""
    old = YamlKeys(text, place, _DEFAULTS)
    _refuse_others(old)
    resolve(old)
    old.carry("output_dir", "run", a_text)
    carry_data(old)
    carry_model(old)
    carry_precision(old)
    carry_training(old)
    leave_the_rest(old)
    fit_together(old)
    return old.converted(_ORDER)


def _refuse_others(old: YamlKeys) -> None:
    """Recipes that train by what artel has not, or that do not train. Raises InputError."""
    place, error = _reason_to_refuse(old)
    if error:
        old.refuse(place, error)
        raise InputError(old.problems)


def _reason_to_refuse(old: YamlKeys) -> tuple[str, str]:
    """(key, `what is wrong; the remedy`); empty where the recipe can be converted."""
    known = ", ".join(OBJECTIVES.names)
    for key in old.given():
        section = key.partition(".")[0]
        if section in ("teacher_model", "kd_loss"):
            return key, "distils, which is not carried over: write objective: distill and distill.teacher yourself"
        if section in ("reward_functions", "policy_model", "reward_and_value_model", "grpo_samples", "orchestration"):
            return key, f"is for reinforcement learning, which artel does not do; its objectives are {known}"
        if section == "quantizer" and not old.below("optimizer"):
            return key, "quantizes and trains nothing; artel export RUN DIR --gguf q4_k_m quantizes a trained model"
        if "multimodal" in str(old.peek(key)) or "vision" in str(old.peek("model._component_")):
            return "model._component_", "learns from images; artel learns from text alone"
    if not old.below("optimizer"):
        fix = "artel evaluate, artel generate and artel chat put a trained model to use"
        return "output_dir", f"the recipe trains nothing: it has no optimizer; {fix}"
    return "", ""


_ORDER = tuple(
    "run seed objective data tokenizer model chat preference train validate parallel checkpoint log profile "
    "track".split()
)
# Defaults of torchtune's recipes and builders that differ from artel's, so that the run stays the same.
_DEFAULTS = {
    "epochs": 1,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "model.lora_rank": 8,
    "model.lora_alpha": 16,
    "model.lora_dropout": 0,
}
TORCHTUNE = Tool("torchtune", is_torchtune, convert_torchtune, is_no_run_file=True)
