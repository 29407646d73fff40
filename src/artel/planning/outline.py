"""Outlines of a run's model and tokenizer before they exist: without weights, with their known sizes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from transformers import PreTrainedModel

from artel.config import RunConfig, TokenizerTraining
from artel.config.model_name import is_in_hub_cache
from artel.errors import InputError
from artel.models.loading.check import check_positions
from artel.models.loading.heads import freeze_unused
from artel.models.loading.request import ModelRequest
from artel.models.loading.structure import build_from_scratch, build_pretrained_structure, position_limit
from artel.models.lora.adapters import freeze
from artel.objectives import objective_type
from artel.preparing import has_store, tokenizer_location, tokenizer_name
from artel.storage import is_remote
from artel.text.reading.files import is_url
from artel.text.sources.find import list_sources
from artel.text.sources.inputs import input_shards
from artel.tokens import Tokenizer, load_tokenizer
from artel.tokens.tokenizer.train import MAX_AUTO_VOCABULARY, TRAINING_BYTES, auto_vocabulary

_PLACEHOLDER_IDS = 1000  # ids of an unknown tokenizer; some models cannot be built with only a few


def is_available_offline(name: str | None) -> bool:
    """True if a model or tokenizer can be read without a network. Also true for the name of a missing folder."""
    if name is None or Path(name).is_dir() or name.startswith((".", "/", "~")):
        return True
    if Path(name).exists() or name.count("/") > 1:
        return True  # not a valid hub id
    return is_in_hub_cache(name) is not False


def local_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Load the run's tokenizer from its folder or the hub's cache. None if it is in a store or still to be trained.

    Raise InputError if it cannot be loaded.
    """
    where, name = tokenizer_location(config)
    if name is None or config.data.from_store or has_store(config):
        return None
    if Path(name).exists() or not is_in_hub_cache(name):
        if not config.tokenizer.from_ and not Path(name).is_dir():
            return None  # on the hub, or a missing model
        if not Path(name).exists() and not name.startswith((".", "/", "~")):
            return None
    return load_tokenizer(name, where, runs_code=name == config.model.trust_remote_code)


def outline_model(config: RunConfig, auto_class: str) -> PreTrainedModel:
    """Return the run's model on the meta device. A new model has as many embeddings as the tokenizer will have ids.

    Raise InputError if it cannot be built, or does not take inputs of `data.block` tokens.
    """
    request = ModelRequest(config.model, auto_class, block=config.data.block)
    is_new = config.model.from_ is None
    model = build_from_scratch(request, known_tokenizer(config)) if is_new else build_pretrained_structure(request)
    _check_block(config, model)
    freeze_unused(model)
    if config.model.freeze:
        freeze(model, config.model.freeze)
    return model


def _check_block(config: RunConfig, model: PreTrainedModel) -> None:
    """Raise InputError if the block is too long for the model, with the problems of its longest block."""
    try:
        check_positions(model, config.data.block)
    except InputError as error:
        block = position_limit(model)
        shorter = config.model_copy(update={"data": config.data.model_copy(update={"block": block})})
        objective = objective_type(config)
        problems = objective.problems(config)
        longest_block_problems = [
            replace(problem, what=f"with data.block: {block}, {problem.what}")
            for problem in objective.problems(shorter)
            if problem not in problems
        ]
        raise InputError([*error.problems, *longest_block_problems]) from None


def known_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the run's tokenizer, or a stand-in with the number of ids that it will probably have."""
    with suppress(InputError):  # reported by another check
        tokenizer = local_tokenizer(config)
        if tokenizer is not None:
            return tokenizer
    training = config.tokenizer.train
    if training is None and tokenizer_name(config) is None and not config.data.from_store:
        training = TokenizerTraining()
    config_size = (config.model.config or {}).get("vocab_size")
    placeholder = min(_PLACEHOLDER_IDS, config_size) if isinstance(config_size, int) else _PLACEHOLDER_IDS
    vocabulary = placeholder if training is None else _planned_vocabulary(config, training)
    ids: Any = SimpleNamespace(bos_token_id=0, pad_token_id=0, cls_token_id=0, sep_token_id=0)
    return cast(Tokenizer, SimpleNamespace(vocabulary=vocabulary, end_id=0, hf=ids))


def _planned_vocabulary(config: RunConfig, training: TokenizerTraining) -> int:
    """Return the number of ids of a tokenizer to be trained; for `auto`, from the size of the local files."""
    if training.vocab != "auto":
        return training.vocab
    paths = [path for _, source in list_sources(config.data) for path in source.path]
    with suppress(InputError):  # reported by another check
        if not any(is_url(path) or is_remote(path) for path in paths):
            text_bytes = sum(shard.size for shard in input_shards(config.data))
            return auto_vocabulary(min(text_bytes, TRAINING_BYTES))
    return MAX_AUTO_VOCABULARY
