"""Distillation: a student learns a teacher's distributions in addition to the tokens (Hinton et al. 2015).

The loss of a target is

    alpha x cross-entropy + (1 - alpha) x T² x divergence(teacher at T, student at T) + hidden.weight x hidden states

or only the cross-entropy if the teacher has another tokenizer without this target (`other_tokenizer.py`), or only the
divergence if the student wrote the target (`on_policy.py`). The
temperature T divides the logits of both models. T² keeps the gradient of the divergence as large as at T = 1 (Hinton et
al. 2015, section 2).

Another objective makes samples and batches: the next token of texts, the assistant's turns, or hidden tokens. With
`top_k` the teacher's likeliest ids of each target are cached before training (`training/teacher.py`). The cache is
indexed by sample and target, so it serves every epoch and step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem, WorkError
from artel.messages import Phrase
from artel.models import IGNORED
from artel.objectives.base import Objective, directions
from artel.objectives.causal import Causal
from artel.objectives.chat import Chat
from artel.objectives.distill.on_policy import WRITTEN, OnPolicy
from artel.objectives.distill.other_tokenizer import TokenMap
from artel.objectives.distill.teacher_checks import (
    KEY,
    by_text_problems,
    layout_problems,
    on_policy_problems,
    source_problems,
    teacher_model,
    teacher_problems,
    tokenizer_problems,
)
from artel.objectives.hooks import CachedOutputs, Teacher, TeacherCall
from artel.objectives.length_groups import as_tensors
from artel.objectives.masked import Masked
from artel.objectives.per_token import inputs_of, with_balance
from artel.objectives.types import Batch, Presentation
from artel.registry import OBJECTIVES
from artel.tokens import Rows, StoreSplit, Tokenizer
from artel.tokens.store import id_dtype

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.objectives.distill.teacher_outputs import ClassLogProbs

_METRIC_DIRECTIONS = directions(lower=["cross_entropy", "divergence"], higher=["agreement"])


class Distillation(Objective):
    """Mixin that adds distillation to the objective of `distill.on`."""

    section = "distill"
    sums: ClassVar[tuple[str, ...]] = (
        "loss",
        "targets",
        "correct",
        "plain",
        "divergence",
        "agreed",
        "taught",
        "aligned",
        "hidden",
        "balance",
    )
    taught: ClassVar[type[Objective]]
    """The objective that this class is mixed into."""
    sees_ahead: ClassVar[bool] = False
    """True if tokens attend to later tokens."""

    writes_answers: ClassVar[bool] = False
    """True if the student writes answers that it learns from."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._distill = config.distill
        self._vocabulary = tokenizer.vocabulary
        self._id_type = np.dtype(id_dtype(self._vocabulary))
        self._cached: dict[bool, CachedOutputs] = {}
        self._token_map: TokenMap | None = None
        self._call_teacher: TeacherCall | None = None
        self._teacher_config: PreTrainedConfig | None = None
        top_k = config.distill.top_k
        if top_k is not None and top_k >= self._vocabulary:
            what = f"{top_k:,} are more than the {self._vocabulary:,} ids"
            raise InputError.at(
                "distill.top_k", what, f"write {max(1, self._vocabulary // 4):,}, or null for all of them"
            )

    @property
    def loss_description(self) -> str:
        distill = self._distill
        ids = Phrase("of all ids")
        if distill.top_k is not None:
            ids = Phrase("of the teacher's {count} likeliest ids", count=distill.top_k)
        if distill.tokenizer == "by_text":
            ids = Phrase("{ids} by their text", ids=ids)
        description = "{loss} {ids} at temperature {temperature:g}, {alpha:g} cross-entropy"
        loss = Phrase(description, loss=distill.loss, ids=ids, temperature=distill.temperature, alpha=distill.alpha)
        return Phrase("{loss}, hidden states", loss=loss) if distill.hidden is not None else loss

    @classmethod
    def for_run(cls, config: RunConfig) -> type[Objective]:
        chat = DistillOnPolicy if config.distill.on_policy else DistillChat
        if config.distill.on != "auto":
            taught = OBJECTIVES[config.distill.on]
            classes = (Distill, chat, DistillMasked)
            return next(distillation for distillation in classes if distillation.taught is taught)
        yielded = {source.yields for source in config.data.sources}
        return next(
            (distillation for distillation in (Distill, chat) if yielded & {*distillation.taught.learns_from}), cls
        )

    @classmethod
    def small_run(cls, block: int) -> dict[str, Any]:
        return cls.taught.small_run(block)

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        """Return the settings of `taught`: the store does not depend on the teacher."""
        return cls.taught.store_settings(config)

    @classmethod
    def default_tokenizer(cls, config: RunConfig) -> tuple[str, str] | None:
        return (KEY, teacher_model(config)) if config.distill.teacher is not None else None

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        sources = source_problems(config, Distill.learns_from, cls.taught.learns_from)
        return [
            *super().problems(config),
            *sources,
            *teacher_problems(config),
            *layout_problems(config),
            *on_policy_problems(config, has_prompts=cls.writes_answers),
            *by_text_problems(config),
        ]

    # The teacher

    @property
    def teacher(self) -> Teacher:
        distill, config = self._distill, self.config
        if distill.top_k is None:
            return Teacher(teacher_model(config), None)
        blocks = [config.data.block, self.fills_blocks(config), self.isolated_documents]
        settings = {
            "on": self.taught.__name__,
            "blocks": blocks,
            "packing": config.data.packing,
            "top_k": distill.top_k,
            "temperature": distill.temperature,
        }
        bytes_per_target = distill.top_k * self._id_type.itemsize + 2 * (distill.top_k + 1)
        if distill.tokenizer == "same":
            return Teacher(teacher_model(config), settings, bytes_per_target)
        settings |= {"student_tokenizer": self.tokenizer.fingerprint}
        return Teacher(teacher_model(config), settings, bytes_per_target + 1, reads_text=True)

    def check_teacher(self, tokenizer: Tokenizer) -> None:
        if self._distill.tokenizer == "same":
            problems = tokenizer_problems(self.tokenizer, tokenizer, KEY)
            if problems:
                raise InputError(problems)
        elif tokenizer.fingerprint != self.tokenizer.fingerprint:
            self._token_map = TokenMap(self.tokenizer, tokenizer, packs_text=self.packs_text, key=KEY)

    def alignment_note(self, aligned: float) -> str:
        if self._distill.tokenizer == "same":
            return ""
        if self._token_map is None:
            return "distill.tokenizer: by_text has no effect: teacher and student have the same tokenizer"
        return self._token_map.note(aligned)

    def set_teacher(self, call: TeacherCall, model_config: PreTrainedConfig) -> None:
        self._call_teacher, self._teacher_config = call, model_config

    def check(self, model: PreTrainedModel) -> None:
        super().check(model)
        if self._distill.hidden is not None and self._teacher_config is not None:
            configs = (self._teacher_config, model.config)
            teacher, student = (config.get_text_config().hidden_size for config in configs)
            if teacher != student:
                what = f"the teacher's hidden states have {teacher:,} numbers, the student's {student:,}"
                fix = "use a student of the teacher's width, or remove hidden"
                raise InputError.at("distill.hidden", what, fix)

    def set_cached_outputs(self, outputs: CachedOutputs, *, validation: bool) -> None:
        self._cached[validation] = outputs

    def outputs_to_cache(
        self, model: PreTrainedModel, batch: Batch
    ) -> tuple[torch.Tensor, np.ndarray, dict[str, np.ndarray]]:
        """Return `ids` (targets, k) of the student, likeliest first, and `log_probs`, float16 (targets, k + 1).

        `log_probs`: log-probabilities of these ids, plus one entry for all remaining ids, after temperature scaling. A
        teacher with another tokenizer also has `aligned`, bool (targets,): True if the teacher has the same target.
        Targets that are not aligned have zeros.
        """
        import torch

        from artel.models.loading.structure import position_limit
        from artel.objectives.distill.teacher_outputs import TeacherOutputComputer

        assert self._distill.top_k is not None
        computer = TeacherOutputComputer(self._distill.top_k, self._distill.temperature, self._vocabulary)
        counts = (batch.tensors["targets"] != IGNORED).sum(dim=1).cpu().numpy()
        if self._token_map is None:
            sums, cached = computer.compute_from_ids(model, self._inputs(model, batch), batch)
            return sums, counts, cached
        device = batch.tensors["input_ids"].device
        teacher_input = self._token_map.read(batch, position_limit(model), isolated_documents=self.isolated_documents)
        teacher_input = teacher_input.to(device)
        student_id_of = torch.from_numpy(self._token_map.ids).to(device)
        sums, cached = computer.compute_from_text(
            model, self._inputs(model, teacher_input.batch), teacher_input, batch.targets, student_id_of
        )
        return sums, counts, cached

    # Batches

    def batch(self, rows: Rows) -> Batch:
        """Return the batch of `taught` with the cached outputs; positions without a target have zeros.

        `teacher_ids` int32 (rows, length, k), `teacher_log_probs` float16 (rows, length, k + 1), and with another
        tokenizer `teacher_aligned` bool (rows, length).
        """
        batch = super().batch(rows)  # type: ignore[safe-super]
        cached = self._cached.get(bool((rows.epochs < 0).any()))
        if cached is None:
            return batch
        targets = batch.tensors["targets"].numpy()
        top_k = self._distill.top_k or 0
        ids = np.zeros((*targets.shape, top_k), dtype=np.int32)
        log_probs = np.zeros((*targets.shape, top_k + 1), dtype=np.float16)
        aligned = np.zeros(targets.shape, dtype=bool)
        for row in np.flatnonzero(rows.valid):
            positions = np.flatnonzero(targets[row] != IGNORED)
            sample_outputs = cached.read(int(rows.indices[row]))
            if len(sample_outputs["ids"]) != len(positions):
                what = f"hold {len(sample_outputs['ids']):,} targets of a sample that has {len(positions):,}"
                raise WorkError.at(str(cached.folder), what, "remove the folder: the teacher will run again")
            ids[row, positions], log_probs[row, positions] = sample_outputs["ids"], sample_outputs["log_probs"]
            aligned[row, positions] = sample_outputs.get("aligned", True)
        teacher_arrays = {"teacher_ids": ids, "teacher_log_probs": log_probs}
        if self._distill.tokenizer == "by_text":
            teacher_arrays["teacher_aligned"] = aligned
        return Batch(batch.tensors | as_tensors(teacher_arrays), batch.targets, batch.tokens)

    # The loss

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        from artel.objectives.distill.teacher_outputs import cached_classes

        if self._call_teacher is not None:
            return self._call_teacher(lambda teacher: self._sums_with_teacher(teacher, model, batch))
        return with_balance(model, batch, lambda: self._sums(model, batch, cached_classes(batch)))

    def _sums_with_teacher(self, teacher: PreTrainedModel, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the sums with the teacher in memory. The teacher runs before the student."""
        import torch

        from artel.models.logits_loss import PositionLogits
        from artel.objectives.distill.teacher_outputs import (
            all_classes,
            capture_hidden_states,
            find_targets,
            hidden_loss,
        )

        _, positions = find_targets(batch)
        hidden, temperature = self._distill.hidden, self._distill.temperature
        if hidden is None:
            teacher_logits = PositionLogits(teacher, self._inputs(teacher, batch), positions)
            classes = all_classes(teacher_logits, self._vocabulary, temperature)
            return with_balance(model, batch, lambda: self._sums(model, batch, classes))
        with torch.no_grad(), capture_hidden_states(teacher) as teacher_states:
            teacher_logits = PositionLogits(teacher, self._inputs(teacher, batch), positions)
        classes = all_classes(teacher_logits, self._vocabulary, temperature)
        with capture_hidden_states(model) as student_states:
            sums = with_balance(model, batch, lambda: self._sums(model, batch, classes))
        matching_loss = hidden_loss(teacher_states, student_states, positions, hidden)
        index = self.sums.index("hidden")
        return torch.cat(
            [sums[:1] + hidden.weight * matching_loss, sums[1:index], matching_loss.detach()[None], sums[index + 1 :]]
        )

    def _sums(self, model: PreTrainedModel, batch: Batch, classes: ClassLogProbs | None) -> torch.Tensor:
        """Return all `sums` except the last, float32. `classes`: from the teacher; None without a teacher."""
        import torch
        import torch.nn.functional as F

        from artel.models.logits_loss import loss_of_logits
        from artel.objectives.distill.teacher_outputs import at_temperature, divergence, find_targets

        distill = self._distill
        labels, positions = find_targets(batch)
        aligned = batch.tensors.get("teacher_aligned")
        is_aligned = None if aligned is None else aligned.flatten()[positions]
        alpha: Any = distill.alpha
        if WRITTEN in batch.tensors:  # the student learns nothing from its own tokens, only from the teacher's view
            is_written = batch.tensors[WRITTEN].flatten()[positions]
            alpha = torch.where(is_written, 0.0, distill.alpha)

        def chunk_sums(logits: torch.Tensor, chunk: slice) -> torch.Tensor:
            cross_entropy = F.cross_entropy(logits, labels[chunk], reduction="none")
            guesses = logits.detach().argmax(dim=1)
            num_correct = (guesses == labels[chunk]).sum()
            zero = cross_entropy.new_zeros(())
            if classes is None:
                return torch.stack(
                    [cross_entropy.sum(), num_correct.float(), cross_entropy.detach().sum(), zero, zero, zero]
                )
            student = at_temperature(logits[:, : self._vocabulary], distill.temperature)
            teacher, teacher_top, student = classes(student, chunk)
            distance = divergence(teacher, student, distill.loss, distill.beta)
            weight = alpha if isinstance(alpha, float) else alpha[chunk]
            loss = weight * cross_entropy + (1 - weight) * distill.temperature**2 * distance
            agreed = guesses == teacher_top
            if is_aligned is not None:
                loss = torch.where(is_aligned[chunk], loss, cross_entropy)
                distance, agreed = distance * is_aligned[chunk], agreed & is_aligned[chunk]
            count = cross_entropy.new_tensor(len(cross_entropy)) if is_aligned is None else is_aligned[chunk].sum()
            per_target = [cross_entropy.detach(), distance.detach(), agreed]
            sums = [values.sum().float() for values in per_target]
            return torch.stack([loss.sum(), num_correct.float(), *sums, count.float()])

        inputs = self._inputs(model, batch)
        loss, num_correct, cross_entropy, distance, agreed, count = loss_of_logits(
            model, inputs, positions, chunk_sums, 6
        )
        targets = torch.full_like(cross_entropy, batch.targets)
        taught = torch.zeros_like(targets) if classes is None else targets
        balance = torch.zeros_like(cross_entropy)
        return torch.stack([loss, targets, num_correct, cross_entropy, distance, agreed, taught, count, balance])

    def _inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
        settings = {} if self.sees_ahead else {"use_cache": False}
        return inputs_of(model, batch, causal=not self.sees_ahead) | settings

    # Metrics

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return `cross_entropy` and the metrics of `taught` derived from it. With a teacher also return

        `loss`; `divergence`, a mean per target at the temperature, without T²; `agreement`, the fraction of targets
        with the teacher's likeliest token. The last two cover only targets that the teacher also has.
        """
        token_metrics = super().metrics({**totals, "loss": totals["plain"]}, outputs, split)  # type: ignore[safe-super]
        token_metrics = {("cross_entropy" if name == "loss" else name): value for name, value in token_metrics.items()}
        if not totals["taught"]:
            return token_metrics
        metrics = {"loss": totals["loss"] / totals["targets"], **token_metrics}
        if totals["aligned"]:
            metrics |= {"divergence": totals["divergence"] / totals["aligned"]}
            metrics |= {"agreement": totals["agreed"] / totals["aligned"]}
        if self._distill.hidden is not None:
            metrics |= {"hidden_loss": totals["hidden"] / totals["targets"]}
        return metrics


def _describe(taught: type[Objective]) -> Presentation:
    does = "learns what a teacher would say, beside the text itself"
    return replace(taught.presentation, does=does, verb="", is_offered=False)


class Distill(Distillation, Causal):
    """Distillation on the next tokens of texts. Registered for all kinds: `for_run` returns the class of a run."""

    learns_from = ("text", "conversations")
    presentation = _describe(Causal)
    metric_directions = Causal.metric_directions | _METRIC_DIRECTIONS
    taught = Causal


class DistillChat(Distillation, Chat):
    """Distillation on the assistant's turns of conversations."""

    presentation = _describe(Chat)
    metric_directions = Chat.metric_directions | _METRIC_DIRECTIONS
    taught = Chat


class DistillOnPolicy(OnPolicy, DistillChat):
    """Distillation on the assistant's turns of conversations, of which the student writes some itself."""

    writes_answers = True


class DistillMasked(Distillation, Masked):
    """Distillation on hidden tokens. They differ in each epoch, so the teacher stays in memory."""

    presentation = _describe(Masked)
    metric_directions = Masked.metric_directions | _METRIC_DIRECTIONS
    taught = Masked
    sees_ahead = True

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        problems = super().problems(config)
        if config.distill.top_k is not None:
            what = "other tokens are hidden in each epoch, so the teacher's outputs cannot be cached"
            problems.append(Problem("distill.top_k", what, "set null, which runs the teacher during training"))
        return problems
