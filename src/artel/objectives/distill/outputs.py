"""What is kept of a teacher's outputs before training, and the classes that both distributions are summed up in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from artel.models.logits_loss import PositionLogits
from artel.models.targets import IGNORED
from artel.objectives.batch import Batch
from artel.objectives.distill.by_text import TeacherReading
from artel.objectives.distill.divergence import at_temperature, in_classes, mapped_classes
from artel.tokens.store.shards import token_type

Classes = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(the student's log-probabilities of all ids, which positions) → the teacher's of each class, its first id, and the
student's of each class."""
TopClasses = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(the teacher's logits, float32 (count, vocabulary)) → its likeliest ids as the student's, int64 (count, k), and
log-probabilities of these and of all others together, (count, k + 1)."""
Outputs = tuple[torch.Tensor, dict[str, np.ndarray]]
"""The teacher's cross-entropy, targets and right guesses, float64 (3,), and what is kept: arrays (targets, …)."""

_LOWEST = -60_000.0
"""The lowest log-probability that is kept: float16 ends at 65,504."""


def targets_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets, int64 (count,), and the positions in the flattened rows that predict them, int64 (count,)."""
    targets, places = batch.tensors["targets"].flatten(), batch.tensors.get("places")
    if places is None:
        places = (targets != IGNORED).nonzero()[:, 0]
    return targets[places], places


@dataclass(frozen=True, slots=True)
class TeacherOutputs:
    """What is kept of a teacher's outputs: `ids` (targets, k), the likeliest first, and `log_probs` float16 (targets,
    k + 1), at the temperature, of these and of all others together.
    """

    top_k: int
    temperature: float
    vocabulary: int
    """Of the student."""

    def of_ids(self, model: PreTrainedModel, inputs: dict[str, Any], batch: Batch) -> Outputs:
        """Of a teacher that reads the student's ids."""

        def top_classes(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            likeliest = logits.topk(self.top_k, dim=1).indices
            return likeliest, in_classes(at_temperature(logits, self.temperature), likeliest)

        labels, places = targets_of(batch)
        return self._outputs(PositionLogits(model, inputs, places), labels, self.vocabulary, top_classes)

    def by_text(
        self, model: PreTrainedModel, inputs: dict[str, Any], reading: TeacherReading, targets: int, ids: torch.Tensor
    ) -> Outputs:
        """Of a teacher that reads the text of so many `targets`: zeros for those that it does not have, and `aligned`,
        bool (targets,), which it has. `ids` are the student's, as `mapped_classes` takes them.
        """

        def top_classes(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return mapped_classes(at_temperature(logits, self.temperature), ids, self.vocabulary, self.top_k)

        answers = PositionLogits(model, inputs, reading.places)
        sums, of_aligned = self._outputs(answers, reading.labels, len(ids), top_classes)
        kept = {"aligned": np.zeros(targets, dtype=bool)}
        kept["aligned"][reading.targets] = True
        for name, array in of_aligned.items():
            kept[name] = np.zeros((targets, *array.shape[1:]), array.dtype)
            kept[name][reading.targets] = array
        return sums, kept

    def _outputs(
        self, answers: PositionLogits, labels: torch.Tensor, vocabulary: int, top_classes: TopClasses
    ) -> Outputs:
        """Of a teacher of so many ids, whose model may have more rows; `labels`, int64 (count,), are its targets."""
        id_type = np.dtype(token_type(self.vocabulary))
        sums = torch.zeros(3, dtype=torch.float64)
        ids, log_probs = [np.zeros((0, self.top_k), id_type)], [np.zeros((0, self.top_k + 1), np.float16)]
        for chunk in answers.chunks():
            logits = answers.read(chunk)[:, :vocabulary]
            plain = torch.nn.functional.cross_entropy(logits, labels[chunk], reduction="sum")
            right = (logits.argmax(dim=1) == labels[chunk]).sum()
            sums += torch.tensor([float(plain), len(logits), float(right)], dtype=torch.float64)
            likeliest, classes = top_classes(logits)
            ids.append(likeliest.cpu().numpy().astype(id_type))
            log_probs.append(classes.clamp(min=_LOWEST).half().cpu().numpy())
        return sums, {"ids": np.concatenate(ids), "log_probs": np.concatenate(log_probs)}


def all_classes(answers: PositionLogits, vocabulary: int, temperature: float) -> Classes:
    """Every id is a class."""

    def classes(student: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = answers.read(chunk)[:, :vocabulary]
        return at_temperature(logits, temperature), logits.argmax(dim=1), student

    return classes


def kept_classes(batch: Batch) -> Classes | None:
    """The ids that were kept, and all others together."""
    if "teacher_ids" not in batch.tensors:
        return None
    _, places = targets_of(batch)
    ids = batch.tensors["teacher_ids"].flatten(0, 1)[places]
    log_probs = batch.tensors["teacher_log_probs"].flatten(0, 1)[places]

    def classes(student: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        here = ids[chunk].long()
        return log_probs[chunk].float().log_softmax(dim=1), here[:, 0], in_classes(student, here)

    return classes
