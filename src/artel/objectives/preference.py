"""Preference optimization: learning which of two answers is better.

DPO (Rafailov et al. 2023), IPO (Azar et al. 2023), KTO (Ethayarajh et al. 2024), ORPO (Hong et al. 2024), SimPO (Meng
et al. 2024). DPO, IPO and KTO compare with a reference, the model before training: its log-probabilities of the answers
are computed once before the first step and stored with the run, so that no second model is in memory.

A sample is both answers, each after the prompt: ids of the chosen answer, then of the rejected one. For KTO the answer
of another sample after this prompt follows. Its numbers are the lengths, 0 for a missing answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models import IGNORED
from artel.objectives.answer_rows import Answer, AnswerSums, answer_tensors
from artel.objectives.base import Objective, directions
from artel.objectives.chat import Chat, template_problems, template_version
from artel.objectives.collate import next_token_view
from artel.objectives.conversation.frame import ConversationError
from artel.objectives.conversation.writer import ConversationWriter
from artel.objectives.types import Batch, DocumentSamples, Presentation, TokenView
from artel.text import Conversation, Document, DroppedRecord, Message, Preference, Rejected
from artel.tokens import Rows, Sample, StoreSplit, Tokenizer, TokenStore, UnpackedSamples

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
_CHOSEN, _REJECTED, _OTHER = 0, 1, 2
_OTHER_ROWS = "other_"


class PreferenceOptimization(Objective):
    auto_class = "AutoModelForCausalLM"
    learns_from = ("preferences",)
    presentation = Presentation(
        "of two answers gives the better one", "prefer", "text-generation", finetuning_rate=5e-6
    )
    section = "preference"
    generates = True
    sums = ("loss", "targets", "pairs", "correct", "chosen", "chosen_reward", "rejected", "rejected_reward",
            "tokens", "entropy")  # fmt: skip
    outputs = ("chosen_logp", "rejected_logp", "other_logp")
    metric_directions = directions(lower=["loss", "rejected_reward"], higher=["accuracy", "margin", "chosen_reward"])

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._chat = Chat(config, tokenizer)
        self.inserts_date = self._chat.inserts_date
        self._writer = ConversationWriter(tokenizer, self._chat.template)
        self._preference = config.preference
        self._beta = _BETA[config.preference.loss] if config.preference.beta is None else config.preference.beta
        self.needs_reference = config.preference.loss in ("dpo", "ipo", "kto")
        self.needs_global_statistics = config.preference.loss == "kto"
        self._reference: dict[bool, torch.Tensor] = {}
        self._kl = 0.0
        self._shares_prompts = False

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        problems = [*super().problems(config), *template_problems(config)]
        if config.preference.loss != "dpo" and config.preference.smoothing > 0:
            problems.append(Problem("preference.smoothing", f"{config.preference.loss} has none", "remove it"))
        return problems

    @classmethod
    def special_tokens(cls, config: RunConfig) -> list[str]:
        return Chat.special_tokens(config)

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        return [config.data.block, config.chat.template, config.preference.loss == "kto", template_version(config)]

    @property
    def loss_description(self) -> str:
        return f"{self._preference.loss}, beta {self._beta:g}"

    def check(self, model: PreTrainedModel) -> None:
        """Let answers to one prompt share a row if the model supports it."""
        from artel.models.document_mask import obeys_shared_prefixes

        self._shares_prompts = obeys_shared_prefixes(model)

    def plan_for(self, build: Callable[[], PreTrainedModel], device: str) -> None:
        from artel.models.document_mask import can_share_prefixes

        super().plan_for(build, device)
        self._shares_prompts = can_share_prefixes(build(), device)

    @property
    def decoding(self) -> Chat:
        """The decoding of `chat`, whose models answer in the same way."""
        return self._chat

    def output_ids(self, sample: Sample) -> np.ndarray | None:
        return None if sample.flags is None else sample.ids[sample.flags > 0]

    def check_store(self, store: TokenStore) -> None:
        self._chat.check_store(store)
        if self._preference.loss != "kto" or not store.train.samples:
            return
        for column, name in ((_CHOSEN, "good"), (_REJECTED, "bad")):
            if not store.train.numbers()[:, column].any():
                what = f"no answer is labeled as {name}, but kto needs both kinds"
                fix = f"give {name} answers too; to learn from one kind only, set objective: chat"
                raise InputError.at("preference.loss", what, fix)

    def notes(self, documents: Iterable[Document]) -> list[str]:
        """Return the notes of `Chat` on the conversations that end with the chosen answers."""
        conversations = []
        for document in documents:
            pair = document.record.fields
            assert isinstance(pair, Preference)
            if pair.chosen is not None:
                conversation = Conversation((*pair.prompt, pair.chosen), pair.tools)
                conversations.append(replace(document, record=document.record._replace(fields=conversation)))
        return self._chat.notes(conversations)

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        for document in documents:
            record = document.record
            assert isinstance(record.fields, Preference)
            self._writer.check_tools(_pair_messages(record.fields), record.fields.tools, record.origin)
            try:
                yield self._convert(record.fields)
            except ConversationError as error:
                yield Rejected(record.origin, "template", f"{error}; fix it", record.set_name)

    def _convert(self, pair: Preference) -> DocumentSamples | DroppedRecord:
        answers = [answer for answer in (pair.chosen, pair.rejected) if answer is not None]
        if len(answers) < 2 and self._preference.loss != "kto":
            raise ConversationError(
                f"it has one answer, but {self._preference.loss} needs two (preference.loss: kto accepts such rows)"
            )
        if self._writer.has_control_token(_pair_messages(pair), pair.tools):
            return DroppedRecord("control_token")
        missing = Sample(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint8))
        samples = [
            self._writer.sample([*pair.prompt, answer], {len(pair.prompt)}, pair.tools) if answer else missing
            for answer in (pair.chosen, pair.rejected)
        ]
        lengths = tuple(len(sample.ids) for sample in samples)
        if max(lengths) > self.config.data.block:
            return DroppedRecord("longer_than_block")
        ids, flags = (np.concatenate(arrays) for arrays in zip(*((s.ids, s.flags) for s in samples), strict=True))
        return DocumentSamples([Sample(ids, flags, lengths)])

    def dataset(self, split: StoreSplit) -> UnpackedSamples:
        if self._preference.loss == "kto":
            return _KTOSamples(split, self.config.data.block)
        return UnpackedSamples(split)

    def batch(self, rows: Rows) -> Batch:
        """Return `answer_tensors` of the chosen and rejected answers, and `present` bool (rows, answers).

        With KTO, the third answer is one to another prompt. In training it has separate rows (`other_input_ids`, …).
        `reference` (rows, 3): the log-probabilities before training, if known.
        """
        import torch

        samples = [_split_answers(rows, row) for row in range(len(rows.numbers))]
        present = np.array([[length > 0 for length in lengths] for lengths in rows.numbers]) & rows.valid[:, None]
        is_validation = bool((rows.epochs < 0).any())
        if self.needs_global_statistics and not is_validation:
            other_tensors = self._tensors([sample[_OTHER:] for sample in samples])
            tensors = {f"{_OTHER_ROWS}{name}": tensor for name, tensor in other_tensors.items()}
            # At least as long as the other rows: a pipeline allocates memory for these rows only.
            tensors |= self._tensors([sample[:_OTHER] for sample in samples], other_tensors["input_ids"].shape[1])
        else:
            tensors = self._tensors(samples)
        tensors["present"] = torch.from_numpy(present)
        if is_validation in self._reference:
            tensors["reference"] = self._reference[is_validation][torch.from_numpy(rows.indices)]
        targets = present[:, :_OTHER].sum() if self._preference.loss == "kto" else present[:, :_OTHER].all(axis=1).sum()
        count = int(rows.numbers[rows.valid][:, :_OTHER].sum())
        return Batch(tensors, targets=int(targets), tokens=count)

    def _tensors(self, samples: list[list[Answer]], min_length: int = 1) -> dict[str, torch.Tensor]:
        return answer_tensors(samples, share_prompts=self._shares_prompts, min_length=min_length)

    def token_views(self, rows: Rows) -> list[TokenView]:
        names = ("chosen", "rejected", "of another prompt")
        return [
            next_token_view(answer.ids, np.where(answer.flags[1:] > 0, answer.ids[1:], IGNORED), name)
            for name, answer in zip(names, _split_answers(rows, 0), strict=False)
            if len(answer.ids)
        ]

    # The reference that the loss compares with

    def set_reference(self, outputs: np.ndarray, *, validation: bool) -> None:
        """Take the log-probabilities (samples, 3) of a split's answers before training."""
        import torch

        self._reference[validation] = torch.from_numpy(outputs).float()

    def batch_statistics(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the sum of log(policy / reference) of the answers to other prompts, and their count, (2,)."""
        import torch

        present = batch.tensors["present"][:, _OTHER]
        has_other_rows = f"{_OTHER_ROWS}input_ids" in batch.tensors
        logps = self._answer_sums(model, batch, _OTHER_ROWS if has_other_rows else "").log_probs[:, -1]
        ratios = (logps - batch.tensors["reference"][:, _OTHER])[present]
        return torch.stack([ratios.sum(), present.sum().float()])

    def set_global_statistics(self, totals: list[float]) -> None:
        """Set KTO's reference point: how far the model has moved, at least 0 (Ethayarajh et al. 2024, section 4.1)."""
        self._kl = max(0.0, totals[0] / max(1.0, totals[1]))

    # The loss

    def _answer_sums(self, model: PreTrainedModel, batch: Batch, prefix: str = "") -> AnswerSums:
        """Return sums over the tokens of each answer.

        `prefix`: prefix of the tensors' names; `_OTHER_ROWS` for the answers to other prompts.
        """
        from artel.models.document_mask import shared_prefix_inputs
        from artel.models.logits_loss import target_log_probs

        tensors = {name[len(prefix) :]: tensor for name, tensor in batch.tensors.items() if name.startswith(prefix)}
        inputs = {"input_ids": tensors["input_ids"], "use_cache": False}
        if "branches" in tensors:
            shared = (tensors[name] for name in ("documents", "branches", "positions"))
            inputs |= shared_prefix_inputs(model, *shared)
        log_probs, entropies = target_log_probs(model, inputs, tensors["targets"], tensors["target_positions"])
        return AnswerSums.from_log_probs(log_probs, entropies, tensors["answer_targets"])

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        return self._sums(self._answer_sums(model, batch), batch)

    def _sums(self, answers: AnswerSums, batch: Batch) -> torch.Tensor:
        import torch

        logps, counts, entropies = (values[:, :_OTHER] for values in answers)
        present = batch.tensors["present"][:, :_OTHER]
        reference = batch.tensors.get("reference")
        log_ratios = logps if reference is None or not self.needs_reference else logps - reference[:, :_OTHER]
        rewards = self._beta * (logps if self._preference.loss in ("orpo", "simpo") else log_ratios)
        if self._preference.loss in ("ipo", "orpo", "simpo"):
            rewards = rewards / counts.clamp(min=1)
        losses = self._losses(log_ratios, logps, counts, self._kl)
        has_both = present.all(dim=1)
        in_loss = present if losses.ndim == 2 else has_both
        correct = (rewards[:, _CHOSEN] > rewards[:, _REJECTED]) & has_both
        detached = rewards.detach()
        sums = [
            losses[in_loss].sum(),
            in_loss.sum(),
            has_both.sum(),
            correct.sum(),
            present[:, _CHOSEN].sum(),
            detached[:, _CHOSEN][present[:, _CHOSEN]].sum(),
            present[:, _REJECTED].sum(),
            detached[:, _REJECTED][present[:, _REJECTED]].sum(),
            counts[present].sum(),
            entropies[present].sum(),
        ]
        return torch.stack([term.float() for term in sums])

    def _losses(self, log_ratios: torch.Tensor, logps: torch.Tensor, counts: torch.Tensor, kl: float) -> torch.Tensor:
        """Return the loss of each pair, (rows,), or with KTO of each answer, (rows, 2). `kl`: its reference point."""
        import torch
        import torch.nn.functional as F

        beta, config = self._beta, self._preference
        means = logps / counts.clamp(min=1)
        gap = log_ratios[:, _CHOSEN] - log_ratios[:, _REJECTED]
        if config.loss == "dpo":
            return dpo_losses(gap, beta, config.smoothing)
        if config.loss == "ipo":
            # Means over an answer's tokens, as the paper's authors confirmed; sums would penalize long answers.
            per_token = log_ratios / counts.clamp(min=1)
            return (per_token[:, _CHOSEN] - per_token[:, _REJECTED] - 1 / (2 * beta)) ** 2
        if config.loss == "simpo":
            return -F.logsigmoid(beta * (means[:, _CHOSEN] - means[:, _REJECTED]) - config.margin)
        if config.loss == "orpo":
            # log odds of an answer: log p - log(1 - p), p the geometric mean of its tokens' probabilities.
            odds = means - torch.log1p(-torch.exp(means.clamp(max=-1e-6)))
            return -means[:, _CHOSEN] - beta * F.logsigmoid(odds[:, _CHOSEN] - odds[:, _REJECTED])
        chosen_loss = config.desirable * (1 - torch.sigmoid(beta * (log_ratios[:, _CHOSEN] - kl)))
        rejected_loss = config.undesirable * (1 - torch.sigmoid(beta * (kl - log_ratios[:, _REJECTED])))
        return torch.stack([chosen_loss, rejected_loss], dim=1)

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        import torch.nn.functional as F

        answers = self._answer_sums(model, batch)
        outputs = F.pad(answers.log_probs, (0, len(self.outputs) - answers.log_probs.shape[1]))
        return self._sums(answers, batch), outputs

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return the loss, rewards and three metrics.

        `accuracy`: fraction of pairs whose chosen answer has the higher reward. `margin`: mean reward, chosen minus
        rejected. `entropy`: of the predictions of the answers' tokens, in nats per token.
        """
        import torch

        metrics = {"loss": totals["loss"] / max(1.0, totals["targets"])}
        if self.needs_global_statistics:
            metrics["loss"] = self._kto_loss(torch.from_numpy(outputs), split)
        if totals["pairs"]:
            metrics["accuracy"] = totals["correct"] / totals["pairs"]
        for role in ("chosen", "rejected"):
            if totals[role]:
                metrics[f"{role}_reward"] = totals[f"{role}_reward"] / totals[role]
        if "chosen_reward" in metrics and "rejected_reward" in metrics:
            metrics["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
        if totals["tokens"]:
            metrics["entropy"] = totals["entropy"] / totals["tokens"]
        return metrics

    def _kto_loss(self, logps: torch.Tensor, split: StoreSplit) -> float:
        """Return KTO's mean loss with the reference point of this split, not of the last training batch."""
        import torch

        present = torch.from_numpy(split.numbers()[: len(logps), :_OTHER] > 0)
        reference = self._reference.get(True)
        log_ratios = logps if reference is None else logps - reference[: len(logps)]
        kl = max(0.0, float(log_ratios[:, _OTHER].mean()))
        answers = log_ratios[:, :_OTHER]
        return float(self._losses(answers, answers, torch.ones_like(answers), kl)[present].mean())


def dpo_losses(gaps: torch.Tensor, beta: float, smoothing: float = 0.0) -> torch.Tensor:
    """Return DPO's loss of each pair.

    `gaps`: log-ratio of policy and reference of the chosen answer, minus that of the rejected one. `smoothing`: the
    probability that a pair is the wrong way round.
    """
    import torch.nn.functional as F

    correct, swapped = F.logsigmoid(beta * gaps), F.logsigmoid(-beta * gaps)
    return -(1 - smoothing) * correct - smoothing * swapped


def _pair_messages(pair: Preference) -> list[Message]:
    return [*pair.prompt, *(answer for answer in (pair.chosen, pair.rejected) if answer is not None)]


_MAX_DISTANCE = 64
"""Number of following samples that are searched for an answer to another prompt."""


class _KTOSamples(UnpackedSamples):
    """Samples with an answer to another prompt appended, which measures how far the model has moved (KTO).

    That answer is not learned. It is truncated to the block.
    """

    def __init__(self, split: StoreSplit, block: int) -> None:
        super().__init__(split)
        self._block = block

    def read(self, index: int) -> Sample:
        sample = super().read(index)
        prompt = _first_answer(sample)[0]
        for distance in range(1, _MAX_DISTANCE + 1):  # answers to one prompt are often neighbours
            neighbour = super().read((index + distance) % len(self))
            if not np.array_equal(_first_answer(neighbour)[0], prompt):
                break
        max_tokens = max(1, self._block - len(prompt))
        _, answer, answer_flags = (values[:max_tokens] for values in _first_answer(neighbour))
        assert sample.flags is not None
        flags = np.concatenate([sample.flags, np.zeros(len(prompt), np.uint8), answer_flags])
        numbers = (*sample.numbers, len(prompt) + len(answer))
        return Sample(np.concatenate([sample.ids, prompt, answer]), flags, numbers)


def _split_answers(rows: Rows, row: int) -> list[Answer]:
    """Return the answers of a row, each after its prompt."""
    assert rows.flags is not None
    ends = np.cumsum(rows.numbers[row])
    spans = [slice(end - length, end) for end, length in zip(ends, rows.numbers[row], strict=True)]
    return [Answer(rows.ids[row, span], rows.flags[row, span]) for span in spans]


def _first_answer(sample: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (prompt ids, answer ids, answer flags) of the chosen answer, or of the rejected one if there is none."""
    assert sample.flags is not None
    length = sample.numbers[_CHOSEN] or sample.numbers[_REJECTED]
    answer_start = int(np.flatnonzero(sample.flags[:length])[0])
    return sample.ids[:answer_start], sample.ids[answer_start:length], sample.flags[answer_start:length]
