"""A model for a run: from scratch by its transformers configuration, or pretrained from a folder or a hub id.

Weights are read from safetensors, or from `pytorch_model.bin` with tensors only: a pickle that holds code is refused
before anything in it runs. Code that comes with a model is run only where the run names its repository.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import ModelConfig
from artel.errors import InputError
from artel.models.adapters import (
    AdapterFolder,
    adapter_problems,
    add_adapters,
    freeze,
    load_adapter,
    require_peft,
)
from artel.models.loading.heads import check_head, model_class, own_classes
from artel.models.loading.init_weights import initialise_again
from artel.models.loading.materialize import Weights, materialize
from artel.models.loading.missing_weights import check_lacking, check_vocabulary, has_embeddings
from artel.models.loading.model_config import configuration, known_keys
from artel.models.loading.model_folder import cannot_load, check_folder, read_config
from artel.models.loading.safetensors_files import check_shapes
from artel.models.quantization import count, keep_trainable, loading_options, require_bitsandbytes
from artel.tokens import Tokenizer

# When the run file names no model: GPT-2 or RoBERTa, as their authors sized them, with dropout for those who ask.
_GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_ROBERTA = {
    "model_type": "roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@dataclass(slots=True)
class Built:
    """A model in float32 on the CPU (quantised: where it computes), and what was done to it that one should know."""

    model: PreTrainedModel
    notes: list[str] = field(default_factory=list)
    anew: list[str] = field(default_factory=list)
    """Modules with weights that are not from the pretrained model, but initialised."""

    @property
    def parameters(self) -> int:
        """The number of parameters, tied ones counted once, those of adapters among them."""
        return sum(count(parameter) for parameter in self.model.parameters())

    @property
    def trained(self) -> int:
        """How many of them are trained."""
        return sum(count(parameter) for parameter in self.model.parameters() if parameter.requires_grad)


def build_model(
    wanted: ModelConfig,
    tokenizer: Tokenizer,
    *,
    auto_class: str,
    block: int,
    seed: int,
    heads: dict[str, int] | None = None,
    learns: bool = True,
) -> Built:
    """Build or load the model of a run, with its adapters; what is not trained needs no gradient.

    `auto_class` is the transformers class an objective asks for (`AutoModelForCausalLM`), `heads` what it adds to it;
    `block` the longest input in tokens; `seed` fixes initial weights, the same on every process. A pretrained model's
    heads may be new where it `learns`, else its files must have all of its weights. Raises InputError.
    """
    torch.manual_seed(seed)
    if wanted.from_ is not None:
        whole = wanted.lora.save if wanted.lora is not None else []
        built = _pretrained(
            wanted.from_, tokenizer, auto_class, heads or {}, wanted.quantise, whole, seed, wanted.runs_code, learns
        )
        check_positions(built.model, block)
    else:
        built = from_scratch(wanted.config, tokenizer, auto_class, heads or {}, block)
        check_positions(built.model, block)
        try:
            materialize(built.model, Weights(copy.deepcopy(built.model), seed), device="cpu")
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            what = f"{built.parameters:,} parameters, of 4 bytes each, find no room in this machine's memory"
            raise InputError.at("model.config", what, "write smaller sizes") from None
    finish(built, wanted, auto_class, seed)
    return built


def finish(built: Built, wanted: ModelConfig, auto_class: str, seed: int) -> None:
    """Adapters, and parameters that stay as they are. Raises InputError."""
    if wanted.lora is not None:
        generates = auto_class == "AutoModelForCausalLM"
        done = add_adapters(
            built.model, wanted.lora, base=wanted.from_ or "", generates=generates, anew=built.anew, seed=seed
        )
        built.notes.append(f"{done}: {built.trained:,} parameters are trained")
    if wanted.freeze:
        freeze(built.model, wanted.freeze)
        built.notes.append(f"{built.trained:,} parameters are trained, the others stay as they are")


def build_adapted(
    adapter: AdapterFolder,
    tokenizer: Tokenizer,
    *,
    auto_class: str,
    heads: dict[str, int],
    quantise: str = "none",
    runs_code: bool = False,
) -> Built:
    """The base model of a saved adapter, quantised or not, with the adapter in it. Raises InputError."""
    built = build_base(adapter, tokenizer, auto_class=auto_class, heads=heads, quantise=quantise, runs_code=runs_code)
    load_adapter(built.model, adapter)
    return built


def build_base(
    adapter: AdapterFolder,
    tokenizer: Tokenizer,
    *,
    auto_class: str,
    heads: dict[str, int],
    quantise: str = "none",
    runs_code: bool = False,
) -> Built:
    """The base model of a saved adapter, with rows for the tokenizer that came with it. Raises InputError."""
    whole = list(adapter.config.modules_to_save or [])
    # What the base has not is initialised here, then comes with the adapter.
    return _pretrained(adapter.base, tokenizer, auto_class, heads, quantise, whole, 0, runs_code, False)


def check_positions(model: PreTrainedModel, block: int) -> None:
    """Raise InputError when inputs of `block` tokens are longer than the model takes."""
    positions = position_limit(model)
    if positions is not None and positions < block:
        raise InputError.at(
            "data.block",
            f"{block} tokens are more than the model's {positions} positions",
            f"write data.block: {positions} or less",
        )


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


def from_scratch(
    wanted: dict[str, Any] | None, tokenizer: Tokenizer, auto_class: str, heads: dict[str, int], block: int
) -> Built:
    """The model of a configuration, on the meta device; of none given the default's. Raises InputError."""
    wanted = wanted or _default(auto_class)
    config = configuration(wanted, tokenizer, auto_class)
    given = {config.attribute_map.get(key, key) for key in wanted}
    try:
        build = model_class(config, auto_class, heads)._from_config
        with torch.device("meta"):
            longest = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
            if longest not in given and hasattr(config, "max_position_embeddings"):
                config.max_position_embeddings = block + _position_offset(build(config))
            model = build(config)
    except InputError:
        raise
    except Exception as error:  # each architecture refuses sizes in its own way
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError.at(
            "model.config", f"{config.model_type} cannot be built: {first}", "check its sizes"
        ) from None
    return Built(model)


def check_model(wanted: ModelConfig, auto_class: str) -> None:
    """Raise InputError for what is wrong with a model before any text is read.

    That is its type, keys, folder and head, packages that it needs, and names of layers and parameters it has not.
    """
    if wanted.lora is not None:
        require_peft()
    if wanted.quantise != "none":
        require_bitsandbytes()
    if wanted.config is not None:
        _, problems = known_keys(wanted.config)
        if problems:
            raise InputError(problems)
        check_head(wanted.config["model_type"], auto_class, "model.config.model_type")
    elif wanted.from_ is not None and Path(wanted.from_).is_dir():
        check_folder(Path(wanted.from_))
        config, _ = read_config(wanted.from_, runs_code=wanted.runs_code)
        check_head(config.model_type, auto_class, "model.from", own_classes(config, runs_code=wanted.runs_code))
    if wanted.lora is not None or wanted.freeze:
        _check_names(wanted, auto_class)


def _check_names(wanted: ModelConfig, auto_class: str) -> None:
    """Raise InputError for names in `lora` and `freeze` that the model has not, asked of it on the meta device."""
    skeleton = outline(wanted, auto_class)
    if skeleton is None:
        return
    problems = adapter_problems(skeleton, wanted.lora) if wanted.lora is not None else []
    if auto_class == "AutoModelForQuestionAnswering":
        # Its objective adds heads, which the other names may be of: they are looked for when the model is built.
        problems = [problem for problem in problems if problem.where == "model.lora.target"]
    elif wanted.freeze:
        freeze(skeleton, wanted.freeze)
    if problems:
        raise InputError(problems)


def outline(wanted: ModelConfig, auto_class: str) -> PreTrainedModel | None:
    """The model of a run on the meta device, before there is a tokenizer: for questions about its structure.

    None where it cannot be built, for which `build_model` gives the reason. Raises InputError where it cannot be found.
    """
    if wanted.from_ is not None:
        config, _ = read_config(wanted.from_, runs_code=wanted.runs_code)
    else:
        values = dict(wanted.config or _default(auto_class))
        try:
            config = CONFIG_MAPPING[values.pop("model_type")](**values)
        except Exception:  # a value it refuses is told, with the tokenizer's ids in place, when it is built
            return None
    try:
        return without_weights(config, auto_class, {}, wanted.runs_code)
    except Exception:  # likewise
        return None


def without_weights(
    config: PreTrainedConfig, auto_class: str, heads: dict[str, int], runs_code: bool = False
) -> PreTrainedModel:
    """The model without weights, for questions about its structure."""
    with torch.device("meta"):
        return model_class(config, auto_class, heads, runs_code=runs_code)._from_config(copy.deepcopy(config))


def pretrained_config(name: str, auto_class: str, *, runs_code: bool = False) -> tuple[PreTrainedConfig, list[str]]:
    """The configuration of a model that can be loaded, and what its user should know of it. Raises InputError."""
    folder = Path(name)
    if folder.is_dir():
        check_folder(folder)
    elif folder.exists() or name.startswith((".", "/", "~")):
        raise InputError.at("model.from", f"{name} is not a folder", "give a folder with config.json, or a hub id")
    config, notes = read_config(name, runs_code=runs_code)
    check_head(config.model_type, auto_class, "model.from", own_classes(config, runs_code=runs_code))
    return config, notes


def _pretrained(
    name: str,
    tokenizer: Tokenizer,
    auto_class: str,
    heads: dict[str, int],
    quantise: str,
    whole: list[str],
    seed: int,
    runs_code: bool,
    learns: bool,
) -> Built:
    """The whole model with its weights, and with rows for all of the tokenizer's ids. Raises InputError."""
    config, notes = pretrained_config(name, auto_class, runs_code=runs_code)
    try:
        reference = without_weights(config, auto_class, heads, runs_code)
        check_shapes(reference, name, config)
    except InputError:
        raise
    except Exception as error:  # each architecture refuses sizes in its own way
        raise cannot_load(name, error) from None
    options = loading_options(quantise, reference, whole) if quantise != "none" else {}
    try:
        model, info = model_class(config, auto_class, heads, runs_code=runs_code).from_pretrained(
            name, config=config, dtype=torch.float32, trust_remote_code=False, output_loading_info=True, **options
        )
    except Exception as error:  # the hub, the file system, safetensors and each architecture raise their own kinds
        raise cannot_load(name, error) from None
    keep_trainable(model)
    built = Built(model, notes)
    missing = info.get("missing_keys") or set()
    check_lacking(model, name, missing, learns=learns, elsewhere=whole)
    tell_what_differs(built, name, missing, info.get("unexpected_keys") or set())
    if not learns and not has_embeddings(model, whole):
        check_vocabulary(model, tokenizer, name)
        return built
    grown = grow_vocabulary(built, tokenizer)
    grow_vocabulary(Built(reference), tokenizer)
    initialise_again(model, reference, grown | dict.fromkeys(missing, 0), seed)
    return built


def tell_what_differs(built: Built, name: str, missing: set[str], unexpected: set[str]) -> None:
    """Note what the files of a model have not, or have beside it."""
    if missing:
        lacking = sorted(missing)
        built.anew += dict.fromkeys(key.rpartition(".")[0] for key in lacking)
        built.notes.append(f"not in {name}, so initialised anew: {', '.join(lacking)}")
    if unexpected:
        built.notes.append(f"in {name} but not in this model, so left out: {', '.join(sorted(unexpected)[:8])}")


def grow_vocabulary(built: Built, tokenizer: Tokenizer) -> dict[str, int]:
    """Make room for all of the tokenizer's ids: the parameters that have more rows now, and how many they had."""
    model = built.model
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.vocabulary <= rows:
        return {}
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.resize_token_embeddings(tokenizer.vocabulary, mean_resizing=False)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    built.anew += [name for name, module in model.named_modules() if any(module is end for end in ends)]
    built.notes.append(
        f"the tokenizer has {tokenizer.vocabulary} ids, the model had {rows} embeddings: "
        f"{tokenizer.vocabulary - rows} new ones were added, initialised anew"
    )
    after = dict(model.named_parameters())
    return {name: shape[0] for name, shape in before.items() if name in after and after[name].shape != shape}
