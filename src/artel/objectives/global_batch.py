"""What an objective computes from the whole global batch, before or in place of the loss of each micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.objectives.batch import Batch


class GlobalBatchHooks:
    """For losses that are no sums over samples. Most objectives need none of this."""

    needs_global_statistics: bool = False
    """True if the loss depends on sums over the whole global batch."""

    def batch_statistics(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """float32 (any,): sums over a micro-batch, without gradient; only if `needs_global_statistics`."""
        raise NotImplementedError

    def set_global_statistics(self, totals: list[float]) -> None:  # if `needs_global_statistics`
        """The sums of `batch_statistics` over the global batch; called before its first `loss`."""

    needs_global_outputs: bool = False
    """True if the loss depends on what the model makes of all samples of the global batch: on vectors of texts, say.

    A strategy then computes `batch_outputs` of each micro-batch of all ranks, `global_loss` of them together, and the
    gradients of the weights from those of the outputs; `loss` is that of a micro-batch alone.
    """

    def batch_outputs(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """float32 (rows, size), with gradient: what `global_loss` is computed from."""
        raise NotImplementedError

    def output_keys(self, batch: Batch) -> torch.Tensor:
        """int64 (any, columns): what `global_loss` must know of the samples beside their outputs."""
        raise NotImplementedError

    def global_loss(self, outputs: torch.Tensor, keys: torch.Tensor, part: slice) -> torch.Tensor:
        """What `loss` returns, over the targets among the rows `part`, which are those of one micro-batch.

        `outputs` and `keys` are those of all micro-batches of the global batch, one after another.
        """
        raise NotImplementedError
