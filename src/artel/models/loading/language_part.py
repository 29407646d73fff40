"""The language part of a multimodal model. It is trained as a text model and saved inside the whole model.

transformers has a text class for some of these models in the same file (Gemma3ForCausalLM, Qwen3_5ForCausalLM). For the
rest (Qwen-VL, Mistral 3, LLaVA) this module creates the class: the same body, followed directly by the output head. A
text class from another file may do more: those of Cohere and Granite scale their logits, but the multimodal models with
these bodies do not. In both cases the text model has no vision tower, and is treated like any text model.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from artel.errors import InputError
from artel.models import evaluation_mode
from artel.models.loading.conversion import Conversion, LoadingPlan, plan_loading
from artel.models.loading.on_meta import build_untied
from artel.models.loading.safetensors_files import TensorFiles
from artel.models.lora.adapter_folder import CONFIG, PREFIX, WEIGHTS, AdapterFolder, read_adapter

_CLASSES: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {}
"""The classes of the language parts in this process, by the class of their configuration."""

_FIX = "use a model that transformers' AutoModelForCausalLM opens, or train this one with another tool"


@dataclass(slots=True)
class MultimodalModel:
    """A multimodal model, and the position of its language part."""

    source: str
    """The folder or hub id with its files."""
    config: PreTrainedConfig
    model: PreTrainedModel
    """The whole model, on the meta device and untied."""
    prefixes: tuple[tuple[str, str], ...]
    """(prefix of names in the part, prefix in the whole model): ("model.", "model.language_model."); also the names of
    the two modules themselves."""

    def __deepcopy__(self, memo: dict[int, Any]) -> MultimodalModel:
        return self  # it describes the files, which copies of the language part share

    def full_name(self, name: str) -> str:
        """Return the name in the whole model of a tensor or module of the language part. Keep other names."""
        return _rename_prefix(name, self.prefixes)

    def name_in_part(self, name: str) -> str | None:
        """Return the name in the language part of a tensor or module of the whole model; None if it is outside."""
        renamed = _rename_prefix(name, tuple((full, part) for part, full in self.prefixes), outside="")
        return renamed or None


def is_multimodal(config: PreTrainedConfig, auto_class: str) -> bool:
    """True for next-token prediction with a multimodal model whose language part has a separate configuration."""
    return (
        auto_class == "AutoModelForCausalLM"
        and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and config.get_text_config(decoder=True) is not config
    )


def text_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a language part by its configuration, if it is not one of transformers' text models."""
    return _CLASSES.get(type(config))


def find_language_part(config: PreTrainedConfig, source: str) -> tuple[PreTrainedModel, MultimodalModel]:
    """Return the language part and the whole model, on the meta device, untied. Raise InputError if it cannot train.

    The part's configuration has the whole model's `tie_word_embeddings`.
    """
    classes: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    multimodal = build_untied(classes[0] if isinstance(classes, tuple) else classes, config)
    body, head = multimodal.get_decoder(), multimodal.get_output_embeddings()
    paths = {id(module): name for name, module in multimodal.named_modules()}
    if config.is_encoder_decoder or getattr(body.config, "is_encoder_decoder", False):
        raise _untrainable_error(config, "its text is written by a decoder that reads an encoder")
    if not (isinstance(body, PreTrainedModel) and isinstance(head, nn.Linear)) or id(body) not in paths:
        raise _untrainable_error(config, "its language part has no output head")
    body_name, head_name = paths[id(body)], paths[id(head)]
    text_config = copy.deepcopy(body.config)
    text_config.name_or_path = source
    text_config.tie_word_embeddings = f"{head_name}.weight" in multimodal.all_tied_weights_keys
    if head_name.startswith(f"{body_name}."):
        text_model = build_untied(type(body), text_config)
        prefixes: tuple[tuple[str, str], ...] = (("", f"{body_name}."),)
    else:
        text_model = _build_text_model(multimodal, body, head, text_config)
        text_head = text_model.get_output_embeddings()
        text_head_name = next(name for name, module in text_model.named_modules() if module is text_head)
        modules = ((text_model.base_model_prefix, body_name), (text_head_name, head_name))
        prefixes = (*((f"{name}.", f"{full}.") for name, full in modules), *modules)
    _CLASSES[type(text_config)] = type(text_model)
    described = MultimodalModel(source, config, multimodal, prefixes)
    _check_names(text_model, described)
    return text_model, described


def set_multimodal(model: PreTrainedModel, multimodal: MultimodalModel) -> None:
    """Remember the multimodal model in which a language part will be saved."""
    model._artel_multimodal = multimodal


def get_multimodal(model: nn.Module) -> MultimodalModel | None:
    """Return the multimodal model of a language part; None for a text model."""
    return getattr(model, "_artel_multimodal", None)


def check_language_part(model: PreTrainedModel) -> None:
    """Raise InputError unless a language part computes the same logits for text as the whole model.

    The vision tower has no weights here, so a model that needs it for text is refused too.
    """
    multimodal = get_multimodal(model)
    if multimodal is None:
        return
    ids = torch.arange(3, 11, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    multimodal.model.eval()
    try:
        with evaluation_mode(model), _insert_language_part(model, multimodal):
            expected = multimodal.model(input_ids=ids, use_cache=False).logits
            logits = model(input_ids=ids, use_cache=False).logits
            is_equal = torch.allclose(logits, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise _untrainable_error(
            multimodal.config, f"it cannot read text without images ({' '.join(str(error).split())[:200]})"
        ) from error
    if not is_equal:
        raise _untrainable_error(
            multimodal.config, "its language part alone computes different logits than the full model"
        )


@contextmanager
def _insert_language_part(model: PreTrainedModel, multimodal: MultimodalModel) -> Iterator[None]:
    """Put the body and the head of the language part into the whole model on the meta device, inside the block."""
    modules = [
        (name.removesuffix("."), full.removesuffix(".")) for name, full in multimodal.prefixes if full.endswith(".")
    ]
    original_modules = {full: multimodal.model.get_submodule(full) for _, full in modules}
    try:
        for name, full in modules:
            multimodal.model.set_submodule(full, model.get_submodule(name))
        yield
    finally:
        for full, module in original_modules.items():
            multimodal.model.set_submodule(full, module)


def _build_text_model(
    multimodal: PreTrainedModel, body: PreTrainedModel, head: nn.Linear, config: PreTrainedConfig
) -> PreTrainedModel:
    """Build the language part on the meta device, with the text class in the whole model's file or a new class."""
    text_model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if isinstance(text_model_class, tuple):
        text_model_class = text_model_class[0]
    if text_model_class is not None and text_model_class.__module__ == type(multimodal).__module__:
        model = build_untied(text_model_class, config)
        if type(model.base_model) is type(body) and isinstance(model.get_output_embeddings(), nn.Linear):
            return model
    input_embeddings = body.get_input_embeddings()
    embeddings = next(name for name, module in body.named_modules() if module is input_embeddings)
    body_class: Any = type(body)
    return build_untied(_create_text_class(body_class, embeddings, head.bias is not None), config)


@functools.cache
def _create_text_class(body: Any, embeddings: str, bias: bool) -> type[PreTrainedModel]:
    """Create a text model class like those of transformers: a body with an output head."""
    parent: Any = next(cls for cls in body.__mro__[1:] if issubclass(cls, PreTrainedModel))

    def build(self: Any, config: Any) -> None:
        parent.__init__(self, config)
        self.model = body(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=bias)
        self.post_init()

    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **options,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, positions])
        return CausalLMOutputWithPast(logits=logits, cache=output.cache, hidden_states=output.hidden_states)

    members = {
        "__init__": build,
        "__module__": body.__module__,
        "forward": forward,
        "config_class": body.config_class,
        "base_model_prefix": "model",
        "_tied_weights_keys": {"lm_head.weight": f"model.{embeddings}.weight"},
        "_tp_plan": {"lm_head": "colwise_gather_output"},
        "_pp_plan": {"lm_head": (["hidden_states"], ["logits"])},
        "_can_record_outputs": body._can_record_outputs,
        "input_modalities": ("text",),
    }
    name = f"{body.__name__.removesuffix('Model').removesuffix('Text')}TextForCausalLM"
    return type(name, (parent, GenerationMixin), members)


def _check_names(model: PreTrainedModel, multimodal: MultimodalModel) -> None:
    """Raise InputError unless each tensor of the language part has the same shape in the whole model."""
    shapes = {name: tensor.shape for name, tensor in multimodal.model.state_dict().items()}
    mismatched_names = [
        name for name, tensor in model.state_dict().items() if shapes.get(multimodal.full_name(name)) != tensor.shape
    ]
    if mismatched_names:
        raise _untrainable_error(
            multimodal.config, f"its language part is not a text model of transformers ({mismatched_names[0]})"
        )


def _rename_prefix(name: str, prefixes: tuple[tuple[str, str], ...], outside: str | None = None) -> str:
    for prefix, replacement in prefixes:
        if (name.startswith(prefix) and (not prefix or prefix.endswith("."))) or name == prefix:
            return replacement + name.removeprefix(prefix)
    return name if outside is None else outside


def _untrainable_error(config: PreTrainedConfig, reason: str) -> InputError:
    return InputError.at(
        "model.from", f"{config.model_type} takes images, and {reason}: its language part cannot be trained", _FIX
    )


@dataclass(slots=True)
class PartConversion(Conversion):
    """A conversion of the whole model's tensors, under the names of the language part."""

    multimodal: MultimodalModel | None = None

    def convert(
        self, reference: PreTrainedModel, files: TensorFiles, rows: slice | None = None
    ) -> dict[str, torch.Tensor]:
        """Like `Conversion.convert`."""
        assert self.multimodal is not None
        inner = Conversion(self.multimodal.full_name(self.first_target), self.converter, self.sources)
        tensors = inner.convert(self.multimodal.model, files, rows)
        return {self.multimodal.name_in_part(name) or name: tensor for name, tensor in tensors.items()}


def plan_multimodal(multimodal: MultimodalModel, files: TensorFiles) -> LoadingPlan:
    """Plan how to load the whole model from its files, and store the conversions in it, to revert them in saving."""
    plan = plan_loading(multimodal.model, files)
    multimodal.model._weight_conversions = plan.used_entries
    return plan


def plan_part(multimodal: MultimodalModel, plan: LoadingPlan) -> LoadingPlan:
    """Restrict the plan to the language part, under its names. Unused tensors of the whole model stay listed."""
    names = {full: name for full in multimodal.model.state_dict() if (name := multimodal.name_in_part(full))}
    converted: dict[str, Conversion] = {
        names[full]: _part_conversion(multimodal, entry)
        for full, entry in plan.conversion_of_target.items()
        if full in names
    }
    info = replace(
        plan.info,
        missing_keys={names[full] for full in plan.info.missing_keys if full in names},
        mismatched_keys={(names[full], *shapes) for full, *shapes in plan.info.mismatched_keys if full in names},
    )
    key_of_target = {names[full]: key for full, key in plan.key_of_target.items() if full in names}
    return LoadingPlan(key_of_target, converted, info, plan.used_entries, plan.unused)


def _part_conversion(multimodal: MultimodalModel, entry: Conversion) -> PartConversion:
    names = [multimodal.name_in_part(name) or name for name in entry.targets]
    first = multimodal.name_in_part(entry.first_target) or entry.first_target
    return PartConversion(first, entry.converter, entry.sources, names, multimodal)


def rename_for_multimodal(multimodal: MultimodalModel, folder: Path) -> None:
    """Rename an adapter trained in the language part for the whole model, so that peft and vLLM can load it there."""
    _rename_adapter(folder, multimodal.full_name, dict(multimodal.model.named_modules()))


@contextmanager
def renamed_for_language_part(model: nn.Module, adapter: AdapterFolder) -> Iterator[AdapterFolder]:
    """Yield the adapter, renamed if `model` is the language part of a multimodal model."""
    multimodal = get_multimodal(model)
    if multimodal is None:
        yield adapter
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(adapter.folder / name, folder / name)
        _rename_adapter(folder, lambda name: multimodal.name_in_part(name) or name, dict(model.named_modules()))
        renamed = read_adapter(temporary)
        assert renamed is not None
        yield replace(renamed, base=adapter.base)


def _rename_adapter(folder: Path, rename: Callable[[str], str], modules: Mapping[str, nn.Module]) -> None:
    """Rename tensors and modules in an adapter's files. `modules`: the modules of the model with the new names."""
    tensors = load_file(folder / WEIGHTS)
    renamed_tensors = {PREFIX + rename(name.removeprefix(PREFIX)): tensor for name, tensor in tensors.items()}
    save_file(renamed_tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    adapted = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in renamed_tensors if ".lora_" in name}
    layers = sorted(name for name in adapted if isinstance(modules.get(name), nn.Linear))
    config["target_modules"] = _peft_targets(layers, config["target_modules"] or [], modules)
    if config.get("modules_to_save"):
        config["modules_to_save"] = [rename(name) for name in config["modules_to_save"]]
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _peft_targets(layers: list[str], endings: list[str] | str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return target names for peft: endings, or full names if other modules (in the vision tower) share them."""
    if isinstance(endings, list):
        matched = [name for name in modules if any(f".{name}".endswith(f".{ending}") for ending in endings)]
        if sorted(matched) == layers:
            return endings
    return layers
