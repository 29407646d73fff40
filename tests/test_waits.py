"""No forward and backward pass waits until a GPU has computed a value, except in the architectures listed here."""

import sys
import traceback
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from artel.models.attention_switch import use_artel_attention
from artel.models.experts import compute_experts_in_autocast
from artel.models.loading.build import skip_padding_checks
from artel.models.loss import model_losses, output_head

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from tiny_configs import VOCABULARY, tiny_config

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
           aten.unique_dim.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
           aten.equal.default, aten.bincount.default}  # fmt: skip
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
HEADS = {"AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
         "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}  # fmt: skip
# Their own code reads values: experts one by one, patches of bytes, lengths, images, ranges of numbers.
READING = {"blt", "dbrx", "flaubert", "gemma3", "ibert", "longcat_flash", "qwen4_exp", "qwen4_exp_text",
           "xlm", "xmod"}  # fmt: skip
MASKS = "masking_utils.py"
"""Here transformers reads whether there is padding, for models that keep its attention."""


class Waits(TorchDispatchMode):
    """Notes the files whose operators wait for values."""

    def __init__(self):
        super().__init__()
        self.files = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        by_mask = operator in INDEXED and any(each is not None and each.dtype == torch.bool for each in args[1])
        if operator in WAITING or by_mask:
            frames = [Path(frame.filename) for frame in traceback.extract_stack()]
            own = [file.name for file in frames if {"artel", "transformers"} & set(file.parts[:-1])]
            self.files.add(own[-1] if own else "autograd")
        return operator(*args, **(kwargs or {}))


def waits(auto_class, model_type):
    """Return the files in which a step waits, and if it uses artel's attention; None if the model cannot be built."""
    try:
        config = tiny_config(model_type) | {"vocab_size": VOCABULARY}
        model = getattr(transformers, auto_class).from_config(AutoConfig.for_model(**config))
    except Exception:  # the table of architectures says why
        return None
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.pad_token_id = 0  # as artel sets it
    skip_padding_checks(model)
    switched = use_artel_attention(model)
    compute_experts_in_autocast(model)
    ids = torch.randint(5, 300, (2, 32))
    inputs = {"input_ids": ids} | ({"use_cache": False} if model.can_generate() else {})
    places = torch.arange(0, 64, 2)
    try:
        output_head(model)  # tested once
        model.train()
        with Waits() as seen:
            model_losses(model, inputs, ids, places)[0].backward()
    except Exception:
        return None
    return seen.files, switched and auto_class == "AutoModelForCausalLM"


@pytest.mark.ci
@pytest.mark.slow
def test_no_step_of_any_architecture_waits_for_a_value():
    waiting, tried = defaultdict(set), 0
    for auto_class, names in HEADS.items():
        for model_type in names:
            found = waits(auto_class, model_type)
            if found is None:
                continue
            tried += 1
            files, switched = found
            allowed = set() if switched else {MASKS}
            if files - allowed:
                waiting[model_type] |= files - allowed
    assert waiting.keys() == READING, dict(waiting)
    assert tried >= 200


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "roberta", "qwen3_moe", "gemma3_text"])
def test_no_step_of_a_common_architecture_waits(model_type):
    auto_class = "AutoModelForMaskedLM" if model_type == "roberta" else "AutoModelForCausalLM"
    assert waits(auto_class, model_type)[0] == set()
