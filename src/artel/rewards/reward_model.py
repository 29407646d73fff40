"""Score answers with a reward model: a sequence classifier with one output, in a folder.

Prompt and answer are one conversation, as the model's chat template writes it. The score is the model's output.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from artel.config import ModelConfig, ShortSection
from artel.errors import InputError
from artel.host import process_memory
from artel.rewards.completion import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_KEY = "model.from"
_PASS_TOKENS = 4096
"""Tokens of a forward pass, padding included."""


class ModelRewardConfig(ShortSection):
    """The output of a reward model in a folder, computed on the CPU."""

    from_: str = Field(
        alias="from", description="Folder of a sequence classifier with one output, e.g. runs/reward/model."
    )


class ModelReward:
    """The output of the model, in float32. An answer that the model cannot read gets no score, with the reason."""

    batch = True
    resident = True

    def __init__(self, settings: ModelRewardConfig) -> None:
        from artel.models.loading.build import load_model
        from artel.models.loading.model_folder import check_folder, read_config
        from artel.models.loading.request import ModelRequest
        from artel.models.loading.structure import position_limit
        from artel.tokens import load_tokenizer
        from artel.tokens.tokenizer.chat_template import resolve_template

        name = settings.from_
        if not Path(name).is_dir():
            raise InputError.at(_KEY, f"there is no folder {name}", "write the folder of a reward model")
        check_folder(Path(name))
        saved, _ = read_config(name)
        _check_head(name, saved)
        _check_memory(name, saved)
        self._tokenizer = load_tokenizer(name, _KEY)
        if not self._tokenizer.hf.chat_template:
            fix = "add the template of its training to the folder, as chat_template.jinja"
            raise InputError.at(_KEY, f"{name} has no chat template, so the form of its texts is unknown", fix)
        self._template = resolve_template(self._tokenizer, "auto")
        request = ModelRequest(ModelConfig.model_validate({"from": name}), "AutoModelForSequenceClassification")
        self._model = load_model(request, self._tokenizer)
        self._limit = position_limit(self._model)

    def __call__(self, completions: list[Completion]) -> list[float | Exception]:
        scores: list[float | Exception] = []
        rows: dict[int, np.ndarray] = {}
        for index, completion in enumerate(completions):
            try:
                rows[index] = self._ids(completion)
                scores.append(0.0)
            except Exception as error:
                scores.append(error)
        for index, score in zip(rows, self._score([*rows.values()]), strict=True):
            scores[index] = score
        return scores

    def _ids(self, completion: Completion) -> np.ndarray:
        """Return the ids of prompt and answer. Raise an exception if the model cannot read them."""
        from artel.tokens.tokenizer.chat_template import render

        messages = completion.messages or [{"role": "user", "content": completion.prompt}, *completion.turns]
        for message in messages:
            for token in self._tokenizer.control_tokens:
                if token in str(message):  # also in calls of tools
                    raise ValueError(f"a text has the special token {token} of the reward model")
        text = render(self._tokenizer, self._template, messages, False)
        ids = self._tokenizer.add_frame(np.array(self._tokenizer.encode_control([text]), dtype=np.int64))
        if self._limit is not None and len(ids) > self._limit:
            raise ValueError(f"{len(ids):,} tokens with the prompt, but the reward model accepts {self._limit:,}")
        return ids

    def _score(self, rows: Sequence[np.ndarray]) -> list[float]:
        """Return the outputs of the model for rows of ids, those of similar length in one forward pass."""
        import torch

        from artel.models import evaluation_mode

        scores = [0.0] * len(rows)
        try:
            with evaluation_mode(self._model):
                for indices in _batches([len(row) for row in rows]):
                    tensors = [torch.from_numpy(rows[index]) for index in indices]
                    ids = torch.nn.utils.rnn.pad_sequence(tensors, True, self._tokenizer.pad_id)
                    lengths = torch.tensor([len(row) for row in tensors])
                    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
                    for index, score in zip(indices, self._model(ids, mask).logits[:, 0].tolist(), strict=True):
                        scores[index] = score
        except RuntimeError as error:
            if "can't allocate memory" in str(error):
                raise MemoryError from None
            raise
        return scores


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of the rows of each forward pass, the longest first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        count = max(1, _PASS_TOKENS // lengths[order[0]])
        yield order[:count]
        order = order[count:]


def _check_head(name: str, config: PreTrainedConfig) -> None:
    """Raise InputError unless the model is a sequence classifier with one output."""
    architecture = (config.architectures or ["no model class"])[0]
    if not architecture.endswith("ForSequenceClassification"):
        what = f"{name} is a {architecture}, but a reward model is a sequence classifier"
        raise InputError.at(_KEY, what, "train one: objective: reward")
    if config.num_labels != 1:
        what = f"{name} has {config.num_labels} outputs, but a reward model has one"
        raise InputError.at(_KEY, what, "use a reward model; for labels, write a reward function of yours")


def _check_memory(name: str, config: PreTrainedConfig) -> None:
    """Raise InputError if the weights in float32 take more memory than this process may allocate."""
    from artel.models.loading.safetensors_files import find_files

    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    with find_files(name, config) as files:
        needed = 4 * sum(math.prod(files.shape(key)) for key in files.names)
    free = limit - process_memory("VmData")
    if limit != resource.RLIM_INFINITY and needed > free:
        what = f"the weights of {name} take {needed / 1e9:.1f} GB, but a reward process may allocate {free / 1e9:.1f}"
        advised = math.ceil(1.5 * needed / 1e9) + 1  # with room for activations
        raise InputError.at(_KEY, what, f"write policy.reward_memory: {advised}G")
