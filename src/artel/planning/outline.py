"""The model and the tokenizer of a run before there is either: without weights, with what is known of their sizes."""

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
from artel.models.loading.structure import from_scratch, position_limit, pretrained_structure
from artel.models.lora.adapters import freeze
from artel.objectives import objective_type
from artel.preparing import has_store, tokenizer_name, tokenizer_place
from artel.storage import is_remote
from artel.text.reading.files import is_url
from artel.text.sources.find import all_sources
from artel.text.sources.inputs import input_shards
from artel.tokens import Tokenizer, load_tokenizer
from artel.tokens.tokenizer.train import LARGEST_AUTO, auto_vocabulary

_FEW = 1000  # ids of a tokenizer of which nothing is known: some models cannot be built with a handful


def is_within_reach(name: str | None) -> bool:
    """Whether a model's or a tokenizer's files are read without a network; a wrong folder's name is, too."""
    if name is None or Path(name).is_dir() or name.startswith((".", "/", "~")):
        return True
    if Path(name).exists() or name.count("/") > 1:
        return True  # no name that a hub could have
    return is_in_hub_cache(name) is not False


def tokenizer_here(run: RunConfig) -> Tokenizer | None:
    """Load the run's tokenizer from its folder or the hub's cache. None for one of a store or still to be trained.

    Raises InputError.
    """
    where, name = tokenizer_place(run)
    if name is None or run.data.from_store or has_store(run):
        return None
    if Path(name).exists() or not is_in_hub_cache(name):
        if not run.tokenizer.from_ and not Path(name).is_dir():
            return None  # a hub's, or a model that is not there
        if not Path(name).exists() and not name.startswith((".", "/", "~")):
            return None
    return load_tokenizer(name, where, runs_code=name == run.model.trust_remote_code)


def outline_model(run: RunConfig, auto_class: str) -> PreTrainedModel:
    """The run's model on the meta device; from scratch with a row for each id that the tokenizer is known to have.

    Raises InputError where it cannot be built, or does not take inputs of `data.block` tokens.
    """
    request = ModelRequest(run.model, auto_class, block=run.data.block)
    is_new = run.model.from_ is None
    model = from_scratch(request, known_tokenizer(run)) if is_new else pretrained_structure(request)
    _check_block(run, model)
    freeze_unused(model)
    if run.model.freeze:
        freeze(model, run.model.freeze)
    return model


def _check_block(run: RunConfig, model: PreTrainedModel) -> None:
    """Raise InputError for a block that the model does not take, with what is wrong with the longest that it takes."""
    try:
        check_positions(model, run.data.block)
    except InputError as error:
        block = position_limit(model)
        shorter = run.model_copy(update={"data": run.data.model_copy(update={"block": block})})
        objective = objective_type(run)
        known = objective.problems(run)
        further = [
            replace(problem, what=f"with data.block: {block}, {problem.what}")
            for problem in objective.problems(shorter)
            if problem not in known
        ]
        raise InputError([*error.problems, *further]) from None


def known_tokenizer(run: RunConfig) -> Tokenizer:
    """The run's tokenizer, or in its place one of the size that it will be trained to, or of which nothing is known."""
    with suppress(InputError):  # said by a check of its own
        there = tokenizer_here(run)
        if there is not None:
            return there
    trained = run.tokenizer.train
    if trained is None and tokenizer_name(run) is None and not run.data.from_store:
        trained = TokenizerTraining()
    written = (run.model.config or {}).get("vocab_size")
    unknown = min(_FEW, written) if isinstance(written, int) else _FEW
    size = unknown if trained is None else _planned_vocabulary(run, trained)
    ids: Any = SimpleNamespace(bos_token_id=0, pad_token_id=0, cls_token_id=0, sep_token_id=0)
    return cast(Tokenizer, SimpleNamespace(vocabulary=size, end_id=0, hf=ids))


def _planned_vocabulary(run: RunConfig, training: TokenizerTraining) -> int:
    """Ids of a tokenizer that is still to be trained; those of `auto` by the size of the files on this machine."""
    if training.vocab != "auto":
        return training.vocab
    paths = [path for _, source in all_sources(run.data) for path in source.path]
    with suppress(InputError):  # said by a check of its own
        if not any(is_url(path) or is_remote(path) for path in paths):
            size = sum(shard.size for shard in input_shards(run.data))
            return auto_vocabulary(min(size, training.sample))
    return LARGEST_AUTO
