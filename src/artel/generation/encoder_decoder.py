"""Encoder-decoder models: inputs of the decoder, and generation with transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput

from artel.models import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from artel.generation.generate import Sampling


def decoder_inputs(model: PreTrainedModel, targets: torch.Tensor) -> torch.Tensor:
    """Return decoder inputs for `targets`, both int64 (rows, length): the targets shifted right by one token.

    The model chooses the first token, usually `decoder_start_token_id`. mBART starts with the last target, so each row
    needs one: a padding row gets an arbitrary one.
    """
    shift_targets = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift_targets is not None:
        is_first = torch.arange(targets.shape[1], device=targets.device) == 0
        any_id = int(model.config.pad_token_id == 0)  # any id except padding
        empty = (targets == IGNORED).all(dim=1, keepdim=True)
        shifted: torch.Tensor = shift_targets(targets.masked_fill(empty & is_first, any_id))
        return shifted
    inputs = targets.new_empty(targets.shape)
    inputs[:, 1:] = targets[:, :-1]
    inputs[:, 0] = model.config.decoder_start_token_id
    return inputs.masked_fill(inputs == IGNORED, model.config.pad_token_id)


@torch.no_grad()
def generate_rows(
    model: PreTrainedModel,
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    sampling: Sampling,
    special_ids: Mapping[str, Any],
    *,
    with_other_ranks: bool = False,
    should_stop: Callable[[], bool] | None = None,
    on_row: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Generate for each row of `ids`, int64 (rows, length). Return int64 (rows, up to `sampling.new_tokens`).

    Uses transformers' `generate` and the model's generation_config, overridden by `sampling` and `special_ids` (start
    and end tokens). Padding follows the end token. The state of the random generators does not change.

    The encoder runs through the full model's forward, where sharded weights are gathered. `with_other_ranks`: all ranks
    call this together, each with different rows, and continue until the last one has finished. Generation stops when
    `should_stop`, called after each token, returns True. `on_row` gets a single row after each token, int64 (tokens so
    far,); it is not called in beam search, where no beam is final before the end.
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
    criteria = StoppingCriteriaList([] if should_stop is None else [_ExternalStop(should_stop)])
    if on_row is not None and beams == 1 and len(ids) == 1:
        criteria.append(_TokenCallback(on_row))
    try:
        with torch.compiler.set_stance("force_eager"), _fix_seed(sampling.seed, ids.device):
            start = torch.zeros_like(ids[:, :1])
            output = model(input_ids=ids, attention_mask=attention_mask, decoder_input_ids=start, use_cache=False)
            generated: torch.Tensor = model.generate(
                encoder_outputs=BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state),
                attention_mask=attention_mask,
                synced_gpus=with_other_ranks and _has_other_ranks(),
                stopping_criteria=criteria,
                **special_ids,
                **settings,
            )
    finally:
        model.train(was_training)
    return generated[:, 1:]  # without the decoder's start token


class _ExternalStop(StoppingCriteria):
    """Ends all rows when `should_stop` returns True."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.BoolTensor:
        ended = torch.full((len(input_ids),), self._should_stop(), dtype=torch.bool, device=input_ids.device)
        return cast("torch.BoolTensor", ended)


class _TokenCallback(StoppingCriteria):
    """Passes the row generated so far to `on_row`. Never stops."""

    def __init__(self, on_row: Callable[[torch.Tensor], None]) -> None:
        self._on_row = on_row

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.BoolTensor:
        self._on_row(input_ids[0, 1:])
        return cast("torch.BoolTensor", torch.zeros(1, dtype=torch.bool, device=input_ids.device))


@contextmanager
def _fix_seed(seed: int, device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def any_rank(flag: bool, device: torch.device) -> bool:
    """True if the flag is set on any rank. Collective: all ranks must call it."""
    if not _has_other_ranks():
        return flag
    result = torch.tensor(int(flag), device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return bool(result)


def _has_other_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
