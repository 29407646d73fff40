"""An adapter merged with its base model: one model that needs no peft."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from transformers import PreTrainedModel

from artel.errors import InputError
from artel.models.lora.adapters import CONFIG, WEIGHTS, AdapterFolder, check_used, peft_warnings_off, unfit


def merge_adapter(model: PreTrainedModel, adapter: AdapterFolder) -> PreTrainedModel:
    """The base model, in float32, with a saved adapter's changes added to its weights.

    Tied embeddings that were trained with the adapter become untied, also in the configuration. Raises InputError if
    base and adapter do not fit, or the result is no model of its own.
    """
    from peft import PeftModel

    if adapter.config.layer_replication:
        what = "repeats layers of its base (layer_replication), which share their weights: they cannot be merged"
        raise InputError.at(str(adapter.folder / CONFIG), what, "use it as an adapter: leave --merge out")
    _dequantize(model, adapter)
    try:
        with peft_warnings_off():
            adapted = PeftModel.from_pretrained(model, str(adapter.folder))
            # Once more: from_pretrained does not return what it could not use.
            unused = adapted.load_adapter(str(adapter.folder), adapted.active_adapter).unexpected_keys
            check_used(adapter, unused)
            _untie_adapted(adapted)
            merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except InputError:
        raise
    except Exception as error:  # PyTorch and peft raise their own
        raise unfit(adapter, error) from None
    _check_ties(merged, adapter)
    return merged


def _dequantize(model: PreTrainedModel, adapter: AdapterFolder) -> None:
    """Unpack the weights of a base that is saved quantized: rounded once more, they would lose what an adapter adds."""
    if getattr(model.config, "quantization_config", None) is None:
        return
    try:
        model.dequantize(torch.float32)
    except NotImplementedError as error:
        what = f"its base {adapter.base} is saved quantized: {' '.join(str(error).split())[:200]}"
        fix = f"write the model as it was before as base_model_name_or_path in {adapter.folder / CONFIG}"
        raise InputError.at("--merge", what, fix) from None


def _untie_adapted(model: nn.Module) -> None:
    """Give layers with adapters a copy of weights that they share, as a head shares those of the embeddings.

    Merged into the shared weights, a change of one of them would be a change of all. peft then sets
    `tie_word_embeddings` in the configuration.
    """
    from peft.tuners.lora import LoraLayer

    shared = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for layer in [module for module in model.modules() if isinstance(module, LoraLayer)]:
        base = layer.get_base_layer()
        weight = getattr(base, "weight", None)
        if isinstance(weight, nn.Parameter) and shared[id(weight)] > 1:
            base.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)


def _check_ties(merged: PreTrainedModel, adapter: AdapterFolder) -> None:
    """Raise InputError if two weights differ that transformers ties again when it opens the merged model.

    Embeddings and head may differ: then the configuration says that they are not tied.
    """
    ends = (merged.get_input_embeddings(), merged.get_output_embeddings())
    free = {f"{name}.weight" for name, module in merged.named_modules() if any(module is end for end in ends)}
    weights = dict(merged.named_parameters(remove_duplicate=False))
    for target, source in merged.all_tied_weights_keys.items():
        pair = [weights[name] for name in (target, source) if name in weights]
        if {target, source} <= free or len(pair) < 2 or torch.equal(*pair):
            continue
        what = f"changes only one of {source} and {target}, which {type(merged).__name__} saves as one"
        raise InputError.at(str(adapter.folder / WEIGHTS), what, "use it as an adapter: leave --merge out")
