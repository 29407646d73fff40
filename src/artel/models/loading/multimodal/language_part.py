"""Which part of a multimodal model writes text, as a text model of its own, and what it is called inside the whole.

For some of them transformers has a text class in the same file (Gemma3ForCausalLM, Qwen3_5ForCausalLM). For the others
(Qwen-VL, Mistral 3, LLaVA) the class is made here: the same body, and the whole's output head with nothing behind it.
A text class from elsewhere may do more: Cohere's and Granite's scale their logits, which the wholes with these bodies
do not. Either way the text model holds no vision tower, and everything that is done to text models is done to it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_tie_weights
from transformers.modeling_outputs import CausalLMOutputWithPast

from artel.errors import InputError
from artel.models.evaluating import evaluating
from artel.models.loading.on_meta import build_on_meta

_MADE: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {}
"""The classes of the language parts of this process, by their configurations' class."""

_FIX = "give a model that transformers' AutoModelForCausalLM opens, or train this one by another tool"


@dataclass(slots=True)
class Whole:
    """A multimodal model, and where its language part is in it."""

    source: str
    """The folder or hub id with its files."""
    config: PreTrainedConfig
    model: PreTrainedModel
    """On the meta device, not tied."""
    prefixes: tuple[tuple[str, str], ...]
    """(beginning of names in the part, the same in the whole): ("model.", "model.language_model."); and the two
    modules by themselves."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        return self  # it describes the files, and copies of the language part are of the same ones

    def name_of(self, name: str) -> str:
        """The name in the whole of a tensor or module of the language part; others stay as they are."""
        return _renamed(name, self.prefixes)

    def name_in_part(self, name: str) -> str | None:
        """The name in the language part of a tensor or module of the whole. None where it is outside."""
        renamed = _renamed(name, tuple((whole, part) for part, whole in self.prefixes), outside="")
        return renamed or None


def takes_images(config: PreTrainedConfig, auto_class: str) -> bool:
    """Whether a saved model has a language part of its own configuration, and next tokens are to be learned."""
    return (
        auto_class == "AutoModelForCausalLM"
        and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and config.get_text_config(decoder=True) is not config
    )


def text_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of a language part by its configuration, where transformers has none of its own for it."""
    return _MADE.get(type(config))


def find_language_part(config: PreTrainedConfig, source: str) -> tuple[PreTrainedModel, Whole]:
    """The language part on the meta device, not tied, and the whole around it. Raises InputError where there is none.

    The part's configuration says whether the whole ties its head to its embeddings.
    """
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    whole = _untied(kind[0] if isinstance(kind, tuple) else kind, config)
    body, head = whole.get_decoder(), whole.get_output_embeddings()
    paths = {id(module): name for name, module in whole.named_modules()}
    if config.is_encoder_decoder or getattr(body.config, "is_encoder_decoder", False):
        raise _no_part(config, "its text is written by a decoder that reads an encoder")
    if not (isinstance(body, PreTrainedModel) and isinstance(head, nn.Linear)) or id(body) not in paths:
        raise _no_part(config, "its language part has no output head of its own")
    body_name, head_name = paths[id(body)], paths[id(head)]
    text_config = copy.deepcopy(body.config)
    text_config.name_or_path = source
    text_config.tie_word_embeddings = f"{head_name}.weight" in whole.all_tied_weights_keys
    if head_name.startswith(f"{body_name}."):
        part = _untied(type(body), text_config)
        prefixes: tuple[tuple[str, str], ...] = (("", f"{body_name}."),)
    else:
        part = _part_of(whole, body, head, text_config)
        own_head = next(name for name, module in part.named_modules() if module is part.get_output_embeddings())
        modules = ((part.base_model_prefix, body_name), (own_head, head_name))
        prefixes = (*((f"{name}.", f"{full}.") for name, full in modules), *modules)
    _MADE[type(text_config)] = type(part)
    found = Whole(source, config, whole, prefixes)
    _check_names(part, found)
    return part, found


def set_whole(model: PreTrainedModel, whole: Whole) -> None:
    """Remember what a language part is saved inside of."""
    model._artel_whole = whole


def whole_of(model: nn.Module) -> Whole | None:
    """What a language part is saved inside of; None for a model of text alone."""
    return getattr(model, "_artel_whole", None)


def check_language_part(model: PreTrainedModel) -> None:
    """Raise InputError unless a language part, with its weights, gives the logits that the whole gives for text.

    The whole's other parts have no weights: a model that needs them for text is refused too.
    """
    whole = whole_of(model)
    if whole is None:
        return
    ids = torch.arange(3, 11, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    whole.model.eval()
    try:
        with evaluating(model), _inside(model, whole):
            theirs = whole.model(input_ids=ids, use_cache=False).logits
            ours = model(input_ids=ids, use_cache=False).logits
            same = torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise _no_part(
            whole.config, f"it cannot read text without images ({' '.join(str(error).split())[:200]})"
        ) from error
    if not same:
        raise _no_part(whole.config, "its language part computes other logits by itself than inside the whole")


@contextmanager
def _inside(model: PreTrainedModel, whole: Whole) -> Iterator[None]:
    """Within the block the whole on the meta device has the body and the head of the language part."""
    modules = [(part.removesuffix("."), full.removesuffix(".")) for part, full in whole.prefixes if full.endswith(".")]
    old = {full: whole.model.get_submodule(full) for _, full in modules}
    try:
        for part, full in modules:
            whole.model.set_submodule(full, model.get_submodule(part))
        yield
    finally:
        for full, module in old.items():
            whole.model.set_submodule(full, module)


def _part_of(
    whole: PreTrainedModel, body: PreTrainedModel, head: nn.Linear, config: PreTrainedConfig
) -> PreTrainedModel:
    """The text class of the whole's own file for a body, or one made of it. On the meta device."""
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    known = known[0] if isinstance(known, tuple) else known
    if known is not None and known.__module__ == type(whole).__module__:
        part = _untied(known, config)
        if type(part.base_model) is type(body) and isinstance(part.get_output_embeddings(), nn.Linear):
            return part
    kind: Any = type(body)
    return _untied(_text_class(kind, _embeddings(body), head.bias is not None), config)


def _embeddings(body: PreTrainedModel) -> str:
    """The name of a body's input embeddings."""
    embeddings = body.get_input_embeddings()
    return next(name for name, module in body.named_modules() if module is embeddings)


@functools.cache
def _text_class(body: Any, embeddings: str, bias: bool) -> type[PreTrainedModel]:
    """A body of transformers with an output head, as its own text classes are made."""
    parent: Any = next(kind for kind in body.__mro__[1:] if issubclass(kind, PreTrainedModel))

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
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
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


def _check_names(part: PreTrainedModel, whole: Whole) -> None:
    """Raise InputError unless each tensor of the language part is one of the whole's, of the same shape."""
    shapes = {name: tensor.shape for name, tensor in whole.model.state_dict().items()}
    strange = [name for name, tensor in part.state_dict().items() if shapes.get(whole.name_of(name)) != tensor.shape]
    if strange:
        raise _no_part(whole.config, f"its language part is no text model of transformers ({strange[0]})")


def _untied(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    with no_tie_weights():
        return build_on_meta(kind, config, dtype=torch.float32)


def _renamed(name: str, prefixes: tuple[tuple[str, str], ...], outside: str | None = None) -> str:
    for old, new in prefixes:
        if (name.startswith(old) and (not old or old.endswith("."))) or name == old:
            return new + name.removeprefix(old)
    return name if outside is None else outside


def _no_part(config: PreTrainedConfig, why: str) -> InputError:
    return InputError.at("model.from", f"{config.model_type} takes images, and {why}: its text cannot be trained", _FIX)
