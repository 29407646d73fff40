"""Distillation: a student learns a teacher's distributions beside the tokens themselves (Hinton et al. 2015).

The loss of a target is

    alpha x cross-entropy + (1 - alpha) x T² x divergence(teacher at T, student at T) + hidden.weight x hidden states

where the divergence is one of `divergence.py`, and T, the temperature, divides the logits of both. T² keeps the
gradient of the divergence as large as it is at T = 1 (Hinton et al. 2015, section 2).

What is taught is what another objective learns: the next token of texts, the assistant's turns, hidden tokens. That
objective makes samples and batches. With `top_k` the teacher's likeliest ids of each target are kept before training
(`training/teacher/`), in the order of the samples and of the targets in each: which epoch and which step a sample
comes in does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem, WorkError
from artel.models.targets import IGNORED
from artel.objectives.base import Better, Objective
from artel.objectives.batch import Batch
from artel.objectives.causal import Causal
from artel.objectives.chat import Chat
from artel.objectives.distill.teacher import (
    KEY,
    check_widths,
    layout_problems,
    source_problems,
    teacher_model,
    teacher_problems,
    tokenizer_problems,
)
from artel.objectives.masked import Masked
from artel.objectives.per_token import inputs_of, with_balance
from artel.objectives.teachers import KeptOutputs, Teacher, TeacherCall
from artel.tokens import Rows, StoreSplit, Tokenizer
from artel.tokens.store.shards import token_type

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.models.logits_loss import PositionLogits

_LOWEST = -60_000.0
"""The lowest log-probability that is kept: float16 ends at 65,504."""
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
        self._kept: dict[bool, KeptOutputs] = {}
        self._call_teacher: TeacherCall | None = None
        self._teacher_config: PreTrainedConfig | None = None
        top_k = run.distill.top_k
        if top_k is not None and top_k >= self._vocabulary:
            what = f"{top_k:,} are no part of the {self._vocabulary:,} ids"
            raise InputError.at(
                "distill.top_k", what, f"write {max(1, self._vocabulary // 4):,}, or null for all of them"
            )

    @property
    def loss_in_words(self) -> str:
        config = self._config
        of = "all ids" if config.top_k is None else f"the teacher's {config.top_k} likeliest ids"
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
        return [*super().problems(run), *sources, *teacher_problems(run), *layout_problems(run)]

    # The teacher

    @property
    def teacher(self) -> Teacher:
        config, run = self._config, self.run
        if config.top_k is None:
            return Teacher(teacher_model(run), None)
        blocks = [run.data.block, self.fills_blocks(run), self.apart]
        settings = {
            "on": self.taught.__name__,
            "blocks": blocks,
            "packing": run.data.packing,
            "top_k": config.top_k,
            "temperature": config.temperature,
        }
        bytes_per_target = config.top_k * self._id_type.itemsize + 2 * (config.top_k + 1)
        return Teacher(teacher_model(run), settings, bytes_per_target)

    def check_teacher(self, tokenizer: Tokenizer) -> None:
        problems = tokenizer_problems(self.tokenizer, tokenizer, KEY)
        if problems:
            raise InputError(problems)

    def set_teacher(self, call: TeacherCall, config: PreTrainedConfig) -> None:
        self._call_teacher, self._teacher_config = call, config

    def check(self, model: PreTrainedModel) -> None:
        super().check(model)
        if self._config.hidden is not None and self._teacher_config is not None:
            check_widths(self._teacher_config, model.config)

    def set_kept(self, kept: KeptOutputs, *, validation: bool) -> None:
        self._kept[validation] = kept

    def outputs_to_keep(
        self, model: PreTrainedModel, batch: Batch
    ) -> tuple[torch.Tensor, np.ndarray, dict[str, np.ndarray]]:
        """`ids` (targets, k), the likeliest first, and `log_probs` float16 (targets, k + 1), at the temperature, of
        these and of all others together.
        """
        import torch

        from artel.models.logits_loss import PositionLogits
        from artel.objectives.distill.divergence import in_classes

        labels, places = _targets(batch)
        teacher = PositionLogits(model, self._inputs(model, batch), places)
        top_k = self._config.top_k
        assert top_k is not None
        sums = torch.zeros(3, dtype=torch.float64)
        ids, log_probs = [np.zeros((0, top_k), self._id_type)], [np.zeros((0, top_k + 1), np.float16)]
        for chunk in teacher.chunks():
            logits = teacher.read(chunk)[:, : self._vocabulary]
            plain = torch.nn.functional.cross_entropy(logits, labels[chunk], reduction="sum")
            likeliest = logits.topk(top_k, dim=1).indices
            right = (likeliest[:, 0] == labels[chunk]).sum()
            sums += torch.tensor([float(plain), len(logits), float(right)], dtype=torch.float64)
            classes = in_classes(self._at_temperature(logits), likeliest).clamp(min=_LOWEST)
            ids.append(likeliest.cpu().numpy().astype(self._id_type))
            log_probs.append(classes.half().cpu().numpy())
        counts = (batch.tensors["targets"] != IGNORED).sum(dim=1).cpu().numpy()
        return sums, counts, {"ids": np.concatenate(ids), "log_probs": np.concatenate(log_probs)}

    # Batches

    def batch(self, rows: Rows) -> Batch:
        """What `taught` makes of the rows, and of what was kept `teacher_ids` int32 (rows, length, k) and
        `teacher_log_probs` float16 (rows, length, k + 1), zeros where there is no target.
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
        for row in np.flatnonzero(rows.valid):
            places = np.flatnonzero(targets[row] != IGNORED)
            of_sample = kept.read(int(rows.indices[row]))
            if len(of_sample["ids"]) != len(places):
                what = f"hold {len(of_sample['ids']):,} targets of a sample that has {len(places):,}"
                raise WorkError.at(str(kept.folder), what, "remove the folder: the teacher answers again")
            ids[row, places], log_probs[row, places] = of_sample["ids"], of_sample["log_probs"]
        more = {"teacher_ids": torch.from_numpy(ids), "teacher_log_probs": torch.from_numpy(log_probs)}
        return Batch(batch.tensors | more, batch.targets, batch.tokens)

    # The loss

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        if self._call_teacher is not None:
            return self._call_teacher(lambda teacher: self._sums_beside(teacher, model, batch))
        return with_balance(model, batch, lambda: self._sums(model, batch, _kept_classes(batch)))

    def _sums_beside(self, teacher: PreTrainedModel, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """The sums with the teacher in memory: it reads the batch first."""
        import torch

        from artel.models.logits_loss import PositionLogits
        from artel.objectives.distill.hidden_states import hidden_loss, recording

        _, places = _targets(batch)
        hidden = self._config.hidden
        if hidden is None:
            answers = PositionLogits(teacher, self._inputs(teacher, batch), places)
            return with_balance(model, batch, lambda: self._sums(model, batch, self._all_classes(answers)))
        with torch.no_grad(), recording(teacher) as theirs:
            answers = PositionLogits(teacher, self._inputs(teacher, batch), places)
        with recording(model) as own:
            sums = with_balance(model, batch, lambda: self._sums(model, batch, self._all_classes(answers)))
        matched = hidden_loss(theirs, own, places, hidden)
        at = self.sums.index("hidden")
        return torch.cat([sums[:1] + hidden.weight * matched, sums[1:at], matched.detach()[None], sums[at + 1 :]])

    def _sums(self, model: PreTrainedModel, batch: Batch, classes: _Classes | None) -> torch.Tensor:
        """`sums` but the last, float32; `classes` are the teacher's, None where it is not known."""
        import torch
        import torch.nn.functional as F

        from artel.models.logits_loss import loss_of_logits
        from artel.objectives.distill.divergence import divergence

        config = self._config
        labels, places = _targets(batch)

        def of_chunk(logits: torch.Tensor, chunk: slice) -> torch.Tensor:
            plain = F.cross_entropy(logits, labels[chunk], reduction="sum")
            guesses = logits.detach().argmax(dim=1)
            right = (guesses == labels[chunk]).sum()
            zero = plain.new_zeros(())
            if classes is None:
                return torch.stack([plain, right.float(), plain.detach(), zero, zero])
            student = self._at_temperature(logits[:, : self._vocabulary])
            teacher, first, student = classes(student, chunk)
            apart = divergence(teacher, student, config.loss, config.beta).sum()
            loss = config.alpha * plain + (1 - config.alpha) * config.temperature**2 * apart
            agreed = (guesses == first).sum()
            return torch.stack([loss, right.float(), plain.detach(), apart.detach(), agreed.float()])

        inputs = self._inputs(model, batch)
        loss, right, plain, apart, agreed = loss_of_logits(model, inputs, places, of_chunk, 5)
        targets = torch.full_like(plain, batch.targets)
        taught = torch.zeros_like(targets) if classes is None else targets
        return torch.stack([loss, targets, right, plain, apart, agreed, taught, torch.zeros_like(plain)])

    def _all_classes(self, answers: PositionLogits) -> _Classes:
        """Every id is a class."""

        def classes(student: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = answers.read(chunk)[:, : self._vocabulary]
            return self._at_temperature(logits), logits.argmax(dim=1), student

        return classes

    def _at_temperature(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, float32."""
        temperature = self._config.temperature
        return (logits if temperature == 1 else logits / temperature).log_softmax(dim=1)

    def _inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
        more = {} if self.sees_ahead else {"use_cache": False}
        return inputs_of(model, batch, causal=not self.sees_ahead) | more

    # Figures

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, part: StoreSplit) -> dict[str, float]:
        """`cross_entropy` is that of the tokens, and perplexity, accuracy and bits per byte are of it, as `taught` has
        them. `divergence` is a mean per target at the temperature, without T²; `agreement` the share of targets whose
        likeliest token is the teacher's. `loss` and these two are left out where no teacher is known.
        """
        plain = super().metrics({**totals, "loss": totals["plain"]}, outputs, part)  # type: ignore[safe-super]
        plain = {("cross_entropy" if name == "loss" else name): figure for name, figure in plain.items()}
        if not totals["taught"]:
            return plain
        means = {name: totals[name] / totals["targets"] for name in ("loss", "divergence", "agreed", "hidden")}
        figures = {"loss": means["loss"], **plain, "divergence": means["divergence"], "agreement": means["agreed"]}
        return figures if self._config.hidden is None else figures | {"hidden_loss": means["hidden"]}


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
_Classes = Callable[["torch.Tensor", slice], "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"]
"""(the student's log-probabilities of all ids, which positions) → the teacher's of each class, its first id, and the
student's of each class."""


def _means(run: RunConfig, name: str, taught: type[Objective]) -> bool:
    """Whether a run means distillation of an objective: by its name, or by the kind of its sources."""
    kinds = {source.yields for source in run.data.sources}
    return run.distill.on == name or (run.distill.on == "auto" and bool(kinds & set(taught.learns_from)))


def _targets(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets, int64 (count,), and the positions in the flattened rows that predict them, int64 (count,)."""
    targets, places = batch.tensors["targets"].flatten(), batch.tensors.get("places")
    if places is None:
        places = (targets != IGNORED).nonzero()[:, 0]
    return targets[places], places


def _kept_classes(batch: Batch) -> _Classes | None:
    """The ids that were kept, and all others together."""
    if "teacher_ids" not in batch.tensors:
        return None
    from artel.objectives.distill.divergence import in_classes

    _, places = _targets(batch)
    ids = batch.tensors["teacher_ids"].flatten(0, 1)[places]
    log_probs = batch.tensors["teacher_log_probs"].flatten(0, 1)[places]

    def classes(student: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        here = ids[chunk].long()
        return log_probs[chunk].float().log_softmax(dim=1), here[:, 0], in_classes(student, here)

    return classes
