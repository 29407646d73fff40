"""A model for a run: from scratch by its transformers configuration, or pretrained from a folder or a hub id.

Weights are read from safetensors, or from `pytorch_model.bin` with tensors only: a pickle that holds code is refused
before anything in it runs. Remote code is never run.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import ModelConfig
from artel.errors import InputError, Problem
from artel.models.folder import cannot_load, check_folder, read_config
from artel.models.heads import check_head, model_class
from artel.tokens import Tokenizer

# When the run file names no model: GPT-2 or RoBERTa, as their authors sized them, with dropout for those who ask.
_GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_ROBERTA = {
    "model_type": "roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@dataclass(slots=True)
class Built:
    """A model on the CPU in float32, and what was done to it that its user should know."""

    model: PreTrainedModel
    notes: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """The number of parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def build_model(
    wanted: ModelConfig,
    tokenizer: Tokenizer,
    *,
    auto_class: str,
    block: int,
    seed: int,
    heads: dict[str, int] | None = None,
) -> Built:
    """Build or load the model of a run.

    `auto_class` is the transformers class an objective asks for (`AutoModelForCausalLM`), `heads` what it adds to it;
    `block` the longest input in tokens; `seed` fixes initial weights, the same on every process. Raises InputError.
    """
    torch.manual_seed(seed)
    if wanted.from_ is not None:
        built = _pretrained(wanted.from_, auto_class, heads or {})
    else:
        built = _from_scratch(wanted.config or _default(auto_class), tokenizer, auto_class, heads or {}, block)
    _grow_vocabulary(built, tokenizer)
    check_positions(built.model, block)
    return built


def check_positions(model: PreTrainedModel, block: int) -> None:
    """Raise InputError when inputs of `block` tokens are longer than the model takes."""
    positions = position_limit(model)
    if positions is not None and positions < block:
        raise InputError(
            [Problem("data.block", f"{block} tokens are more than the model's {positions} positions",
                     f"write data.block: {positions} or less")]
        )  # fmt: skip


def position_limit(model: PreTrainedModel) -> int | None:
    """The longest input in tokens, where the model has a limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return None if limit is None else int(limit) - _position_offset(model)


def _position_offset(model: nn.Module) -> int:
    """RoBERTa and its kin count positions from pad_id + 1; their position embedding shows it by a padding index."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0


def _default(auto_class: str) -> dict[str, Any]:
    return _GPT2 if auto_class == "AutoModelForCausalLM" else _ROBERTA


def _from_scratch(
    wanted: dict[str, Any], tokenizer: Tokenizer, auto_class: str, heads: dict[str, int], block: int
) -> Built:
    config = _configuration(wanted, tokenizer, auto_class)
    build = model_class(config, auto_class, heads)._from_config
    given = {config.attribute_map.get(key, key) for key in wanted}
    try:
        longest = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        if longest not in given and hasattr(config, "max_position_embeddings"):
            with torch.device("meta"):
                offset = _position_offset(build(config))
            config.max_position_embeddings = block + offset
        model = build(config)
    except (ValueError, TypeError, AssertionError, RuntimeError, AttributeError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            [Problem("model.config", f"{config.model_type} cannot be built: {first}", "check its sizes")]
        ) from None
    return Built(model)


def check_model(wanted: ModelConfig, auto_class: str) -> None:
    """Raise InputError for what is wrong with a model before any text is read: its type, keys, folder, head."""
    if wanted.config is not None:
        _, problems = _known_keys(wanted.config)
        if problems:
            raise InputError(problems)
        check_head(wanted.config["model_type"], auto_class, "model.config.model_type")
    elif wanted.from_ is not None and Path(wanted.from_).is_dir():
        check_folder(Path(wanted.from_))
        config, _ = read_config(wanted.from_)
        check_head(config.model_type, auto_class, "model.from")


def _known_keys(wanted: dict[str, Any]) -> tuple[set[str], list[Problem]]:
    """The keys that the model type has, and a problem for each key in `wanted` that it has not."""
    keys = {key: value for key, value in wanted.items() if key != "model_type"}
    model_type = wanted["model_type"]
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), 1)
        fix = f"did you mean {near[0]}?" if near else "see the model types of transformers"
        raise InputError([Problem("model.config.model_type", f"transformers knows no {model_type!r}", fix)])
    plain = CONFIG_MAPPING[model_type]()
    known = {*plain.to_dict(), *plain.attribute_map}
    problems = []
    for key in keys.keys() - known:
        near = difflib.get_close_matches(key, sorted(known), 1)
        fix = f"did you mean {near[0]}?" if near else f"see transformers' {type(plain).__name__}"
        problems.append(Problem(f"model.config.{key}", f"{model_type} has no such key", fix))
    return known, problems


def _configuration(wanted: dict[str, Any], tokenizer: Tokenizer, auto_class: str) -> PreTrainedConfig:
    keys = {key: value for key, value in wanted.items() if key != "model_type"}
    model_type = wanted["model_type"]
    known, problems = _known_keys(wanted)
    vocabulary = keys.get("vocab_size", tokenizer.vocabulary)
    if not isinstance(vocabulary, int) or vocabulary < tokenizer.vocabulary:
        problems.append(
            Problem("model.config.vocab_size", f"{vocabulary} is less than the tokenizer's {tokenizer.vocabulary}",
                    "leave it out: the tokenizer's size is taken")
        )  # fmt: skip
    if problems:
        raise InputError(problems)
    ids: dict[str, Any] = {
        "eos_token_id": tokenizer.end_id,
        "bos_token_id": tokenizer.hf.bos_token_id,
        "pad_token_id": tokenizer.hf.pad_token_id,
        **{name: getattr(tokenizer.hf, name) for name in ("cls_token_id", "sep_token_id") if name in known},
    }
    values = {**ids, **keys, "vocab_size": vocabulary}
    if "is_decoder" in known and auto_class == "AutoModelForCausalLM":
        values.setdefault("is_decoder", True)  # an encoder's architecture with a causal mask
    try:
        return CONFIG_MAPPING[model_type](**values)
    except Exception as error:  # each configuration checks its own way; huggingface_hub wraps what it finds
        first = " ".join(str(error).split())[:300]
        raise InputError([Problem("model.config", f"{model_type} refuses it: {first}", "check its values")]) from None


def _pretrained(name: str, auto_class: str, heads: dict[str, int]) -> Built:
    folder = Path(name)
    if folder.is_dir():
        check_folder(folder)
    elif folder.exists() or name.startswith((".", "/", "~")):
        raise InputError(
            [Problem("model.from", f"{name} is not a folder", "give a folder with config.json, or a hub id")]
        )
    config, notes = read_config(name)
    check_head(config.model_type, auto_class, "model.from")
    try:
        model, info = model_class(config, auto_class, heads).from_pretrained(
            name, config=config, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # the hub, the file system, safetensors and each architecture raise their own kinds
        raise cannot_load(name, error) from None
    built = Built(model, notes)
    missing = sorted(info.get("missing_keys") or ())
    if len(missing) > len(model.state_dict()) // 2:
        raise InputError(
            [Problem("model.from", f"{name} has no weights for {len(missing)} of this model's tensors ({missing[0]} …)",
                     "the weights and config.json are of different models")]
        )  # fmt: skip
    if missing:
        built.notes.append(f"not in {name}, so initialised anew: {', '.join(missing)}")
    unexpected = sorted(info.get("unexpected_keys") or ())
    if unexpected:
        built.notes.append(f"in {name} but not in this model, so left out: {', '.join(unexpected[:8])}")
    return built


def _grow_vocabulary(built: Built, tokenizer: Tokenizer) -> None:
    rows = built.model.get_input_embeddings().weight.shape[0]
    if tokenizer.vocabulary > rows:
        built.model.resize_token_embeddings(tokenizer.vocabulary, mean_resizing=False)
        built.notes.append(
            f"the tokenizer has {tokenizer.vocabulary} ids, the model had {rows} embeddings: "
            f"{tokenizer.vocabulary - rows} new ones were added, initialised anew"
        )
