"""A teacher's cached outputs, divergences between distributions, and the loss of hidden states.

The cache holds the teacher's k most likely ids. The probability of all other ids is one more class ("ghost token",
Anshumann et al. 2025, "Sparse Logit Sampling"). The student's distribution is reduced to the same k + 1 classes.
Nothing is renormalized: a divergence of the classes never exceeds that of the full distributions, and the student
learns how likely the other ids are in total.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from artel.config.schema.distill import HiddenStatesConfig
from artel.models import IGNORED
from artel.models.compile import repeated_layers
from artel.models.logits_loss import PositionLogits
from artel.models.output_head import output_head
from artel.objectives.distill.other_tokenizer import TeacherInput
from artel.objectives.types import Batch
from artel.tokens.store import id_dtype

ClassLogProbs = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(student's log-probabilities of all ids, positions) → (teacher's log-probabilities of the classes, its likeliest id,
student's log-probabilities of the classes)."""
TopClassesFn = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(teacher's logits, float32 (count, vocabulary)) → (likeliest ids as student ids, int64 (count, k), log-probabilities
of these and of all remaining ids together, (count, k + 1))."""
TeacherResult = tuple[torch.Tensor, dict[str, np.ndarray]]
"""Sums of the teacher's cross-entropy, targets and correct predictions, float64 (3,), and arrays to cache,
(targets, …)."""

_MIN_LOG_PROB = -60_000.0
"""The lowest cached log-probability: float16 ends at 65,504."""


def find_targets(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets and the positions in the flattened rows that predict them, int64 (count,) each."""
    targets, positions = batch.tensors["targets"].flatten(), batch.tensors.get("target_positions")
    if positions is None:
        positions = (targets != IGNORED).nonzero()[:, 0]
    return targets[positions], positions


@dataclass(frozen=True, slots=True)
class TeacherOutputComputer:
    """Computes the outputs to cache.

    `ids`, (targets, k): the k likeliest ids, likeliest first. `log_probs`, float16 (targets, k + 1): of these ids, plus
    one entry for all remaining ids, after temperature scaling.
    """

    top_k: int
    temperature: float
    vocabulary: int
    """Size of the student's vocabulary."""

    def compute_from_ids(self, model: PreTrainedModel, inputs: dict[str, Any], batch: Batch) -> TeacherResult:
        """Return the outputs of a teacher that reads the student's ids."""

        def top_classes(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            likeliest = logits.topk(self.top_k, dim=1).indices
            return likeliest, reduce_to_classes(at_temperature(logits, self.temperature), likeliest)

        labels, positions = find_targets(batch)
        return self._compute(PositionLogits(model, inputs, positions), labels, self.vocabulary, top_classes)

    def compute_from_text(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        teacher_input: TeacherInput,
        targets: int,
        student_id_of: torch.Tensor,
    ) -> TeacherResult:
        """Return the outputs of a teacher with another tokenizer for `targets` targets, and `aligned`, bool (targets,).

        Targets that are not aligned have zeros. `student_id_of`: see `map_classes`.
        """

        def top_classes(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return map_classes(at_temperature(logits, self.temperature), student_id_of, self.vocabulary, self.top_k)

        teacher_logits = PositionLogits(model, inputs, teacher_input.positions)
        sums, aligned_arrays = self._compute(teacher_logits, teacher_input.labels, len(student_id_of), top_classes)
        cached = {"aligned": np.zeros(targets, dtype=bool)}
        cached["aligned"][teacher_input.targets] = True
        for name, array in aligned_arrays.items():
            cached[name] = np.zeros((targets, *array.shape[1:]), array.dtype)
            cached[name][teacher_input.targets] = array
        return sums, cached

    def _compute(
        self, teacher_logits: PositionLogits, labels: torch.Tensor, vocabulary: int, top_classes: TopClassesFn
    ) -> TeacherResult:
        """Return the sums and the arrays to cache.

        `labels`: the teacher's targets, int64 (count,). `vocabulary`: number of its ids.
        """
        id_type = np.dtype(id_dtype(self.vocabulary))
        sums = torch.zeros(3, dtype=torch.float64)
        ids, log_probs = [np.zeros((0, self.top_k), id_type)], [np.zeros((0, self.top_k + 1), np.float16)]
        for chunk in teacher_logits.chunks():
            logits = teacher_logits.read(chunk)[:, :vocabulary]
            cross_entropy = torch.nn.functional.cross_entropy(logits, labels[chunk], reduction="sum")
            num_correct = (logits.argmax(dim=1) == labels[chunk]).sum()
            sums += torch.tensor([float(cross_entropy), len(logits), float(num_correct)], dtype=torch.float64)
            likeliest, classes = top_classes(logits)
            ids.append(likeliest.cpu().numpy().astype(id_type))
            log_probs.append(classes.clamp(min=_MIN_LOG_PROB).half().cpu().numpy())
        return sums, {"ids": np.concatenate(ids), "log_probs": np.concatenate(log_probs)}


def all_classes(teacher_logits: PositionLogits, vocabulary: int, temperature: float) -> ClassLogProbs:
    """Return one class per id, without a class for other ids."""

    def classes(student: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = teacher_logits.read(chunk)[:, :vocabulary]
        return at_temperature(logits, temperature), logits.argmax(dim=1), student

    return classes


def cached_classes(batch: Batch) -> ClassLogProbs | None:
    """Return one class per cached id and one for all remaining ids. None if nothing is cached."""
    if "teacher_ids" not in batch.tensors:
        return None
    _, positions = find_targets(batch)
    ids = batch.tensors["teacher_ids"].flatten(0, 1)[positions]
    log_probs = batch.tensors["teacher_log_probs"].flatten(0, 1)[positions]

    def classes(student: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chunk_ids = ids[chunk].long()
        teacher = log_probs[chunk].float().log_softmax(dim=1)
        return teacher, chunk_ids[:, 0], reduce_to_classes(student, chunk_ids)

    return classes


def kl_divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return KL(P || Q) in nats, (count,), from log-probabilities (count, classes)."""
    return (p.exp() * (p - q)).sum(dim=-1)


def divergence(teacher: torch.Tensor, student: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    """Return the divergence of teacher T and student S in nats, (count,), from log-probabilities (count, classes).

    forward_kl: KL(T || S) (Hinton et al. 2015). reverse_kl: KL(S || T) (Gu et al. 2024, "MiniLLM"). js: the generalized
    Jensen-Shannon divergence, beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S (Agarwal et al.
    2024, "On-Policy Distillation of Language Models", section 2).
    """
    if kind == "forward_kl":
        return kl_divergence(teacher, student)
    if kind == "reverse_kl":
        return kl_divergence(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)


def at_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log-probabilities of logits (count, vocabulary) divided by the temperature."""
    return (logits if temperature == 1 else logits / temperature).log_softmax(dim=1)


def reduce_to_classes(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Reduce log-probabilities (count, vocabulary) to those of `ids` plus one of all remaining ids, (count, k + 1).

    `ids`: int64 (count, k).
    """
    remaining = log_probs.scatter(1, ids, -torch.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), remaining], dim=1)


def map_classes(
    log_probs: torch.Tensor, student_id_of: torch.Tensor, vocabulary: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a teacher's likeliest ids as student ids, int64 (count, k), and log-probabilities, (count, k + 1).

    `log_probs`: (count, teacher's vocabulary). `student_id_of`, int64 (teacher's vocabulary,): the student's id of
    each teacher's id, -1 for none. `vocabulary`: size of the student's.
    """
    has_id = student_id_of >= 0
    probabilities = log_probs.exp()
    shared = probabilities.new_zeros(len(log_probs), vocabulary).index_add(
        1, student_id_of[has_id], probabilities[:, has_id]
    )
    likeliest = shared.topk(top_k, dim=1).indices
    remaining = shared.scatter(1, likeliest, 0).sum(dim=1, keepdim=True)
    remaining = remaining + probabilities[:, ~has_id].sum(dim=1, keepdim=True)
    classes = torch.cat([shared.gather(1, likeliest), remaining], dim=1)
    return likeliest, classes.clamp(min=torch.finfo(classes.dtype).tiny).log()  # log(0) would dominate reverse KL


@contextmanager
def capture_hidden_states(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Collect the outputs of the model's layers inside the block, (rows, length, width) each, in order."""
    states: list[torch.Tensor] = []

    def record(_: torch.nn.Module, __: Any, output: Any) -> None:
        if len(states) < len(layers):  # not again if activations are recomputed
            states.append(output[0] if isinstance(output, tuple) else output)

    output_head(model)  # finding it runs the model once, before any hook
    layers = repeated_layers(model)
    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def hidden_loss(
    teacher: list[torch.Tensor], student: list[torch.Tensor], positions: torch.Tensor, hidden: HiddenStatesConfig
) -> torch.Tensor:
    """Return the sum over positions of the mean loss of matched layers, float32 (). Both models have the same width.

    Romero et al. 2015, "FitNets"; Sanh et al. 2019, DistilBERT. States are taken before the model's last norm.
    """
    pairs = [(len(teacher) - 1, len(student) - 1)]
    if hidden.layers == "even":
        matched = [round((layer + 1) * len(teacher) / len(student)) - 1 for layer in range(len(student))]
        # A match of -1 means that the student has twice as many layers.
        pairs = [(max(0, teacher_layer), layer) for layer, teacher_layer in enumerate(matched)]
    losses = []
    for teacher_layer, student_layer in pairs:
        expected = teacher[teacher_layer].flatten(0, 1)[positions].float()
        actual = student[student_layer].flatten(0, 1)[positions].float()
        if hidden.loss == "cosine":
            losses.append((1 - torch.cosine_similarity(actual, expected, dim=-1)).sum())
        else:
            losses.append((actual - expected).square().mean(dim=-1).sum())
    return torch.stack(losses).mean()
