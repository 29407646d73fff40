"""Models that read one sequence and write another: what their decoders are given, and writing by transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput

from artel.models.targets import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from artel.models.generate import Sampling


def decoder_inputs(model: PreTrainedModel, targets: torch.Tensor) -> torch.Tensor:
    """What the decoder reads to predict `targets`, both int64 (rows, length): they come a token later.

    The first token is the model's own choice, most often `decoder_start_token_id`; mBART begins with the last target,
    and so each row needs one: a row of padding is given it.
    """
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        first = torch.arange(targets.shape[1], device=targets.device) == 0
        some_id = int(model.config.pad_token_id == 0)
        empty = (targets == IGNORED).all(dim=1, keepdim=True)
        shifted: torch.Tensor = own(targets.masked_fill(empty & first, some_id))
        return shifted
    inputs = targets.new_empty(targets.shape)
    inputs[:, 1:] = targets[:, :-1]
    inputs[:, 0] = model.config.decoder_start_token_id
    return inputs.masked_fill(inputs == IGNORED, model.config.pad_token_id)


@torch.no_grad()
def write_rows(
    model: PreTrainedModel,
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    sampling: Sampling,
    special_ids: Mapping[str, Any],
    *,
    with_other_ranks: bool = False,
    is_over: Callable[[], bool] | None = None,
    on_row: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """What the model writes for each row of `ids`, int64 (rows, length): int64 (rows, up to `sampling.new_tokens`).

    By transformers' `generate` and the model's generation_config, but for what `sampling` and `special_ids` say: what
    the decoder starts with, and what ends a row, behind which padding follows. The random generators do not change.

    The encoder is run by the whole model: where weights are shared out they are gathered for a call of that.
    `with_other_ranks`: all ranks call this together, each with rows of its own, and go on until the last has written.
    `is_over` is asked after each token: where it is true the rows end there. `on_row` is given a single row after each
    of its tokens, int64 (tokens so far,); not where beams are searched, of which none is the text before the end.
    """
    was_training = model.training
    model.eval()
    settings: dict[str, Any] = {"do_sample": sampling.temperature > 0, "max_new_tokens": sampling.new_tokens}
    if sampling.temperature > 0:
        names = ("temperature", "top_k", "top_p")
        settings |= {name: getattr(sampling, name) for name in names} | {"num_beams": 1}
    elif sampling.beams is not None:
        settings["num_beams"] = sampling.beams
    if sampling.repetition_penalty != 1.0:
        settings["repetition_penalty"] = sampling.repetition_penalty
    beams = settings.get("num_beams", getattr(model.generation_config, "num_beams", None)) or 1
    criteria = StoppingCriteriaList([] if is_over is None else [_Ending(is_over)])
    if on_row is not None and beams == 1 and len(ids) == 1:
        criteria.append(_Watching(on_row))
    try:
        with torch.compiler.set_stance("force_eager"), _own_randomness(sampling.seed, ids.device):
            start = torch.zeros_like(ids[:, :1])
            read = model(input_ids=ids, attention_mask=attention_mask, decoder_input_ids=start, use_cache=False)
            written: torch.Tensor = model.generate(
                encoder_outputs=BaseModelOutput(last_hidden_state=read.encoder_last_hidden_state),
                attention_mask=attention_mask,
                synced_gpus=with_other_ranks and _has_other_ranks(),
                stopping_criteria=criteria,
                **special_ids,
                **settings,
            )
    finally:
        model.train(was_training)
    return written[:, 1:]  # without the token that the decoder starts with


class _Ending(StoppingCriteria):
    """Ends all rows once `is_over` says so."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.BoolTensor:
        ended = torch.full((len(input_ids),), self._is_over(), dtype=torch.bool, device=input_ids.device)
        return cast("torch.BoolTensor", ended)


class _Watching(StoppingCriteria):
    """Gives what is written so far, and ends nothing."""

    def __init__(self, on_row: Callable[[torch.Tensor], None]) -> None:
        self._on_row = on_row

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.BoolTensor:
        self._on_row(input_ids[0, 1:])
        return cast("torch.BoolTensor", torch.zeros(1, dtype=torch.bool, device=input_ids.device))


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is true on any rank. All ranks call it together."""
    if not _has_other_ranks():
        return flag
    number = torch.tensor(int(flag), device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)


def _has_other_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
