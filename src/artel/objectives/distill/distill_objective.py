"""Distillation: a student learns a teacher's distributions beside the tokens themselves (Hinton et al. 2015).

The loss of a target is

    alpha x cross-entropy + (1 - alpha) x T² x divergence(teacher at T, student at T) + hidden.weight x hidden states

and the cross-entropy alone where a teacher with another tokenizer has no such target (`by_text.py`).
The divergence is one of `divergence.py`, and T, the temperature, divides the logits of both. T² keeps the
gradient of the divergence as large as it is at T = 1 (Hinton et al. 2015, section 2).

What is taught is what another objective learns: the next token of texts, the assistant's turns, hidden tokens. That
objective makes samples and batches. With `top_k` the teacher's likeliest ids of each target are kept before training
(`training/teacher/`), in the order of the samples and of the targets in each: which epoch and which step a sample
comes in does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem, WorkError
from artel.models.targets import IGNORED
from artel.objectives.base import Better, Objective
from artel.objectives.causal import Causal
from artel.objectives.chat import Chat
from artel.objectives.distill.other_tokenizer import TokenMap
from artel.objectives.distill.teacher_checks import (
    KEY,
    by_text_problems,
    check_widths,
    layout_problems,
    source_problems,
    teacher_model,
    teacher_problems,
    tokenizer_problems,
)
from artel.objectives.hooks import CachedOutputs, Teacher, TeacherCall
from artel.objectives.masked import Masked
from artel.objectives.per_token import inputs_of, with_balance
from artel.objectives.types import Batch
from artel.tokens import Rows, StoreSplit, Tokenizer
from artel.tokens.store.shards import token_type

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.objectives.distill.teacher_outputs import Classes

_BETTER: dict[str, Better] = {"cross_entropy": "lower", "divergence": "lower", "agreement": "higher"}


class Distillation(Objective):
    """What distillation adds to the objective that it is mixed into, which is that of the section `distill.on`."""

    verb = ""
    does = "learns what a teacher would say, beside the text itself"
    is_offered = False
    section = "distill"
    sums: ClassVar[tuple[str, ...]] = (
        "loss",
        "targets",
        "right",
        "plain",
        "divergence",
        "agreed",
        "taught",
        "aligned",
        "hidden",
        "balance",
    )
    taught: ClassVar[type[Objective]]
    """The objective that it is mixed into."""
    sees_ahead: ClassVar[bool] = False
    """True if tokens see those after them."""

    def __init__(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(run, tokenizer)
        self._config = run.distill
        self._vocabulary = tokenizer.vocabulary
        self._id_type = np.dtype(token_type(self._vocabulary))
        self._kept: dict[bool, CachedOutputs] = {}
        self._token_map: TokenMap | None = None
        self._call_teacher: TeacherCall | None = None
        self._teacher_config: PreTrainedConfig | None = None
        top_k = run.distill.top_k
        if top_k is not None and top_k >= self._vocabulary:
            what = f"{top_k:,} are no part of the {self._vocabulary:,} ids"
            raise InputError.at(
                "distill.top_k", what, f"write {max(1, self._vocabulary // 4):,}, or null for all of them"
            )

    @property
    def loss_description(self) -> str:
        config = self._config
        of = "all ids" if config.top_k is None else f"the teacher's {config.top_k} likeliest ids"
        of += " by their text" if config.tokenizer == "by_text" else ""
        hidden = ", hidden states" if config.hidden is not None else ""
        return f"{config.loss} of {of} at temperature {config.temperature:g}, {config.alpha:g} cross-entropy{hidden}"

    @classmethod
    def for_run(cls, run: RunConfig) -> type[Objective]:
        return next((kind for kind in _KINDS if kind._is_meant(run)), cls)

    @classmethod
    def _is_meant(cls, run: RunConfig) -> bool:
        raise NotImplementedError

    @classmethod
    def small_run(cls, block: int) -> dict[str, Any]:
        return cls.taught.small_run(block)

    @classmethod
    def store_settings(cls, run: RunConfig) -> Any:
        """Those of the objective that it is mixed into: the store knows no teacher."""
        return cls.taught.store_settings(run)

    @classmethod
    def default_tokenizer(cls, run: RunConfig) -> tuple[str, str] | None:
        return (KEY, teacher_model(run)) if run.distill.teacher is not None else None

    @classmethod
    def problems(cls, run: RunConfig) -> list[Problem]:
        sources = source_problems(run, Distill.learns_from, cls.taught.learns_from)
        return [*super().problems(run), *sources, *teacher_problems(run), *layout_problems(run), *by_text_problems(run)]

    # The teacher

    @property
    def teacher(self) -> Teacher:
        config, run = self._config, self.run
        if config.top_k is None:
            return Teacher(teacher_model(run), None)
        blocks = [run.data.block, self.fills_blocks(run), self.isolated_documents]
        settings = {
            "on": self.taught.__name__,
            "blocks": blocks,
            "packing": run.data.packing,
            "top_k": config.top_k,
            "temperature": config.temperature,
        }
        bytes_per_target = config.top_k * self._id_type.itemsize + 2 * (config.top_k + 1)
        if config.tokenizer == "same":
            return Teacher(teacher_model(run), settings, bytes_per_target)
        settings |= {"student_tokenizer": self.tokenizer.fingerprint}
        return Teacher(teacher_model(run), settings, bytes_per_target + 1, reads_text=True)

    def check_teacher(self, tokenizer: Tokenizer) -> None:
        if self._config.tokenizer == "same":
            problems = tokenizer_problems(self.tokenizer, tokenizer, KEY)
            if problems:
                raise InputError(problems)
        elif tokenizer.fingerprint != self.tokenizer.fingerprint:
            self._token_map = TokenMap(self.tokenizer, tokenizer, packs_text=self.packs_text, key=KEY)

    def alignment_note(self, aligned: float) -> str:
        if self._config.tokenizer == "same":
            return ""
        if self._token_map is None:
            return "distill.tokenizer: by_text changes nothing, since teacher and student have one tokenizer"
        return self._token_map.note(aligned)

    def set_teacher(self, call: TeacherCall, config: PreTrainedConfig) -> None:
        self._call_teacher, self._teacher_config = call, config

    def check(self, model: PreTrainedModel) -> None:
        super().check(model)
        if self._config.hidden is not None and self._teacher_config is not None:
            check_widths(self._teacher_config, model.config)

    def set_cached_outputs(self, kept: CachedOutputs, *, validation: bool) -> None:
        self._kept[validation] = kept

    def outputs_to_cache(
        self, model: PreTrainedModel, batch: Batch
    ) -> tuple[torch.Tensor, np.ndarray, dict[str, np.ndarray]]:
        """`ids` (targets, k), the student's, the likeliest first, and `log_probs` float16 (targets, k + 1), at the
        temperature, of these and of all others together. Of a teacher with another tokenizer also `aligned`, bool
        (targets,): whether the target is a token of the teacher, too; zeros are kept for the others.
        """
        import torch

        from artel.models.loading.structure import position_limit
        from artel.objectives.distill.teacher_outputs import TeacherOutputs

        assert self._config.top_k is not None
        outputs = TeacherOutputs(self._config.top_k, self._config.temperature, self._vocabulary)
        counts = (batch.tensors["targets"] != IGNORED).sum(dim=1).cpu().numpy()
        if self._token_map is None:
            sums, kept = outputs.of_ids(model, self._inputs(model, batch), batch)
            return sums, counts, kept
        device = batch.tensors["input_ids"].device
        reading = self._token_map.read(batch, position_limit(model), apart=self.isolated_documents).to(device)
        ids = torch.from_numpy(self._token_map.ids).to(device)
        sums, kept = outputs.by_text(model, self._inputs(model, reading.batch), reading, batch.targets, ids)
        return sums, counts, kept

    # Batches

    def batch(self, rows: Rows) -> Batch:
        """What `taught` makes of the rows, and of what was kept `teacher_ids` int32 (rows, length, k) and
        `teacher_log_probs` float16 (rows, length, k + 1), zeros where there is no target. `teacher_aligned`, bool
        (rows, length), says where the teacher has one, if it is not everywhere.
        """
        import torch

        batch = super().batch(rows)  # type: ignore[safe-super]
        kept = self._kept.get(bool((rows.epochs < 0).any()))
        if kept is None:
            return batch
        targets = batch.tensors["targets"].numpy()
        top_k = self._config.top_k or 0
        ids = np.zeros((*targets.shape, top_k), dtype=np.int32)
        log_probs = np.zeros((*targets.shape, top_k + 1), dtype=np.float16)
        aligned = np.zeros(targets.shape, dtype=bool)
        for row in np.flatnonzero(rows.valid):
            places = np.flatnonzero(targets[row] != IGNORED)
            of_sample = kept.read(int(rows.indices[row]))
            if len(of_sample["ids"]) != len(places):
                what = f"hold {len(of_sample['ids']):,} targets of a sample that has {len(places):,}"
                raise WorkError.at(str(kept.folder), what, "remove the folder: the teacher answers again")
            ids[row, places], log_probs[row, places] = of_sample["ids"], of_sample["log_probs"]
            aligned[row, places] = of_sample.get("aligned", True)
        more = {"teacher_ids": torch.from_numpy(ids), "teacher_log_probs": torch.from_numpy(log_probs)}
        if self._config.tokenizer == "by_text":
            more["teacher_aligned"] = torch.from_numpy(aligned)
        return Batch(batch.tensors | more, batch.targets, batch.tokens)

    # The loss

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        from artel.objectives.distill.teacher_outputs import kept_classes

        if self._call_teacher is not None:
            return self._call_teacher(lambda teacher: self._sums_beside(teacher, model, batch))
        return with_balance(model, batch, lambda: self._sums(model, batch, kept_classes(batch)))

    def _sums_beside(self, teacher: PreTrainedModel, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """The sums with the teacher in memory: it reads the batch first."""
        import torch

        from artel.models.logits_loss import PositionLogits
        from artel.objectives.distill.teacher_outputs import all_classes, hidden_loss, recording, targets_of

        _, places = targets_of(batch)
        hidden, temperature = self._config.hidden, self._config.temperature
        if hidden is None:
            answers = PositionLogits(teacher, self._inputs(teacher, batch), places)
            classes = all_classes(answers, self._vocabulary, temperature)
            return with_balance(model, batch, lambda: self._sums(model, batch, classes))
        with torch.no_grad(), recording(teacher) as theirs:
            answers = PositionLogits(teacher, self._inputs(teacher, batch), places)
        classes = all_classes(answers, self._vocabulary, temperature)
        with recording(model) as own:
            sums = with_balance(model, batch, lambda: self._sums(model, batch, classes))
        matched = hidden_loss(theirs, own, places, hidden)
        at = self.sums.index("hidden")
        return torch.cat([sums[:1] + hidden.weight * matched, sums[1:at], matched.detach()[None], sums[at + 1 :]])

    def _sums(self, model: PreTrainedModel, batch: Batch, classes: Classes | None) -> torch.Tensor:
        """`sums` but the last, float32; `classes` are the teacher's, None where it is not known."""
        import torch
        import torch.nn.functional as F

        from artel.models.logits_loss import loss_of_logits
        from artel.objectives.distill.teacher_outputs import at_temperature, divergence, targets_of

        config = self._config
        labels, places = targets_of(batch)
        aligned = batch.tensors.get("teacher_aligned")
        is_aligned = None if aligned is None else aligned.flatten()[places]

        def of_chunk(logits: torch.Tensor, chunk: slice) -> torch.Tensor:
            plain = F.cross_entropy(logits, labels[chunk], reduction="none")
            guesses = logits.detach().argmax(dim=1)
            right = (guesses == labels[chunk]).sum()
            zero = plain.new_zeros(())
            if classes is None:
                return torch.stack([plain.sum(), right.float(), plain.detach().sum(), zero, zero, zero])
            student = at_temperature(logits[:, : self._vocabulary], config.temperature)
            teacher, first, student = classes(student, chunk)
            apart = divergence(teacher, student, config.loss, config.beta)
            loss = config.alpha * plain + (1 - config.alpha) * config.temperature**2 * apart
            agreed = guesses == first
            if is_aligned is not None:
                loss = torch.where(is_aligned[chunk], loss, plain)
                apart, agreed = apart * is_aligned[chunk], agreed & is_aligned[chunk]
            count = plain.new_tensor(len(plain)) if is_aligned is None else is_aligned[chunk].sum()
            figures = [plain.detach(), apart.detach(), agreed]
            return torch.stack([loss.sum(), right.float(), *(each.sum().float() for each in figures), count.float()])

        inputs = self._inputs(model, batch)
        loss, right, plain, apart, agreed, count = loss_of_logits(model, inputs, places, of_chunk, 6)
        targets = torch.full_like(plain, batch.targets)
        taught = torch.zeros_like(targets) if classes is None else targets
        return torch.stack([loss, targets, right, plain, apart, agreed, taught, count, torch.zeros_like(plain)])

    def _inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
        more = {} if self.sees_ahead else {"use_cache": False}
        return inputs_of(model, batch, causal=not self.sees_ahead) | more

    # Figures

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """`cross_entropy` is that of the tokens, and perplexity, accuracy and bits per byte are of it, as `taught` has
        them. `divergence` is a mean per target at the temperature, without T²; `agreement` the share of targets whose
        likeliest token is the teacher's. `loss` and these two are left out where no teacher is known. Of a teacher with
        another tokenizer both are of the targets that it has, too.
        """
        plain = super().metrics({**totals, "loss": totals["plain"]}, outputs, split)  # type: ignore[safe-super]
        plain = {("cross_entropy" if name == "loss" else name): figure for name, figure in plain.items()}
        if not totals["taught"]:
            return plain
        figures = {"loss": totals["loss"] / totals["targets"], **plain}
        if totals["aligned"]:
            figures |= {"divergence": totals["divergence"] / totals["aligned"]}
            figures |= {"agreement": totals["agreed"] / totals["aligned"]}
        if self._config.hidden is not None:
            figures |= {"hidden_loss": totals["hidden"] / totals["targets"]}
        return figures


class Distill(Distillation, Causal):
    """The next token of texts. Registered for all kinds: `for_run` gives the one that a run means."""

    learns_from = ("text", "conversations")
    better: ClassVar[dict[str, Better]] = {**Causal.better, **_BETTER}
    taught = Causal

    @classmethod
    def _is_meant(cls, run: RunConfig) -> bool:
        return _means(run, "causal", Causal)


class DistillChat(Distillation, Chat):
    """The assistant's turns of conversations."""

    better: ClassVar[dict[str, Better]] = {**Chat.better, **_BETTER}
    taught = Chat

    @classmethod
    def _is_meant(cls, run: RunConfig) -> bool:
        return _means(run, "chat", Chat)


class DistillMasked(Distillation, Masked):
    """Hidden tokens, other ones in each epoch: the teacher must be there."""

    better: ClassVar[dict[str, Better]] = {**Masked.better, **_BETTER}
    taught = Masked
    sees_ahead = True

    @classmethod
    def _is_meant(cls, run: RunConfig) -> bool:
        return run.distill.on == "masked"

    @classmethod
    def problems(cls, run: RunConfig) -> list[Problem]:
        problems = super().problems(run)
        if run.distill.top_k is not None:
            what = "other tokens are hidden in each epoch, so what the teacher says of them is not kept"
            problems.append(Problem("distill.top_k", what, "write null: the teacher answers while the student trains"))
        return problems


_KINDS: tuple[type[Distillation], ...] = (Distill, DistillChat, DistillMasked)


def _means(run: RunConfig, name: str, taught: type[Objective]) -> bool:
    """Whether a run means distillation of an objective: by its name, or by the kind of its sources."""
    kinds = {source.yields for source in run.data.sources}
    return run.distill.on == name or (run.distill.on == "auto" and bool(kinds & set(taught.learns_from)))
