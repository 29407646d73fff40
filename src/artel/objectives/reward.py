"""Reward models: score an answer, better answers higher.

For pairs of answers, the difference of their scores is the logit of preferring the chosen one (Bradley and Terry 1952;
Ouyang et al. 2022, "Training language models to follow instructions with human feedback", section 3.5). If the data
have a margin, the difference must exceed it (Touvron et al. 2023, "Llama 2", section 3.2.2). An answer with a label is
good with probability sigmoid(score) (outcome rewards: Cobbe et al. 2021, "Training Verifiers to Solve Math Word
Problems").

A sample is the chosen and the rejected answer, each after the prompt. Its numbers are their lengths, 0 for a missing
answer, and the bits of the margin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models import IGNORED
from artel.objectives.base import Objective, directions
from artel.objectives.chat import Chat, template_problems, template_version
from artel.objectives.conversation.frame import ConversationError
from artel.objectives.conversation.writer import ConversationWriter
from artel.objectives.decoding import Decoding, python_literal
from artel.objectives.length_groups import as_tensors, group_rows, predict_logits, row_logits
from artel.objectives.pretrained_heads import has_chat_template, has_score_head, score_config
from artel.objectives.statistics import bits_to_floats, calibration_bins, calibration_error, float_to_bits
from artel.objectives.types import Batch, DocumentSamples, Presentation, Reply, TokenView
from artel.text import Document, DroppedRecord, Message, Preference, Rejected
from artel.tokens import Rows, Sample, Samples, StoreSplit, Tokenizer
from artel.tokens.tokenizer.chat_template import inserts_date, resolve_template

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.generation.generate import Sampling

_CHOSEN, _REJECTED, _MARGIN = range(3)
_PROMPT, _ANSWER = "Where is Anna?", "She is in the forest."  # an example


class Reward(Objective, Decoding):
    auto_class = "AutoModelForSequenceClassification"
    learns_from = ("preferences",)
    presentation = Presentation(
        "scores answers, better ones higher", "score", "text-classification", finetuning_rate=1e-5
    )
    section = "reward"
    needs_context = True
    continues = False
    adds_special_tokens = True
    sums = ("loss", "targets")
    outputs = ("chosen_score", "rejected_score")
    tasks = ("score",)
    prompts_problem = (
        "a reward model scores answers and does not generate text",
        "remove them, and use artel generate after training: artel generate --prompt … --context ANSWER",
    )
    metric_directions = directions(
        lower=["loss", "calibration_error"], higher=["accuracy", "margin", "outcome_accuracy"]
    )

    @classmethod
    def claims(cls, architecture: str, folder: str) -> bool:
        return has_score_head(architecture, folder) and has_chat_template(folder)

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._reader = ConversationReader(config, tokenizer)
        self.inserts_date = inserts_date(tokenizer, self._reader.template)

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        return [*super().problems(config), *template_problems(config)]

    @classmethod
    def special_tokens(cls, config: RunConfig) -> list[str]:
        return Chat.special_tokens(config)

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        return [config.data.block, config.chat.template, template_version(config)]

    @property
    def loss_description(self) -> str:
        return "Bradley-Terry (of an answer with a label: binary cross-entropy)"

    @property
    def head_config(self) -> dict[str, Any]:
        """One output. `regression` tells pipelines and servers that it is not a probability."""
        return score_config("reward", "regression", self.tokenizer)

    def demo_command(self, folder: str, samples: Samples | None) -> str:
        return f'artel generate {folder} --prompt "{_PROMPT}" --context "{_ANSWER}"'

    def model_card_code(self) -> str:
        lines = [
            f'messages = [{{"role": "user", "content": {python_literal(_PROMPT)}}},',
            f'            {{"role": "assistant", "content": {python_literal(_ANSWER)}}}]',
        ]
        if self._reader.adds_special_tokens:
            lines += [
                "text = tokenizer.apply_chat_template(messages, tokenize=False)",
                'inputs = tokenizer(text, return_tensors="pt")',
            ]
        else:
            lines.append('inputs = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")')
        return "\n".join([*lines, "with torch.no_grad():", "    print(model(**inputs).logits[0, 0].item())"])

    # record -> samples

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        rendered_by_document = [self._render_answers(document) for document in documents]
        texts = [text for rendered in rendered_by_document if isinstance(rendered, list) for text in rendered if text]
        encoded = iter(self._reader.encode(texts))
        for document, rendered in zip(documents, rendered_by_document, strict=True):
            if not isinstance(rendered, list):
                yield rendered
                continue
            ids = [next(encoded) if text else np.empty(0, dtype=np.int64) for text in rendered]
            lengths = list(map(len, ids))
            if max(lengths) > self.config.data.block:
                yield DroppedRecord("longer_than_block")
                continue
            assert isinstance(document.record.fields, Preference)
            numbers = (*lengths, float_to_bits(document.record.fields.margin))
            yield DocumentSamples([Sample(np.concatenate(ids), None, numbers)])

    def _render_answers(self, document: Document) -> list[str] | Rejected | DroppedRecord:
        """Return the texts of the chosen and the rejected answer, each after the prompt; "" for a missing answer."""
        record, pair = document.record, document.record.fields
        assert isinstance(pair, Preference)
        conversations = [[*pair.prompt, answer] if answer else [] for answer in (pair.chosen, pair.rejected)]
        messages: list[Message] = [message for conversation in conversations for message in conversation]
        writer = self._reader.writer
        writer.check_tools(messages, pair.tools, record.origin)
        if writer.has_control_token(messages, pair.tools):
            return DroppedRecord("control_token")
        try:
            return [
                writer.write(conversation, pair.tools).text if conversation else "" for conversation in conversations
            ]
        except ConversationError as error:
            return Rejected(record.origin, "template", f"{error}; fix it", record.set_name)

    # samples -> batch -> loss

    def batch(self, rows: Rows) -> Batch:
        """Return `group_rows` of chosen and rejected answers in turn, `present` (samples, 2), `margins` (samples,).

        `present` is True for answers that exist. Missing answers and padding rows have one token.
        """
        present = (rows.numbers[:, :_MARGIN] > 0) & rows.valid[:, None]
        answers = [answer for row in range(len(rows.ids)) for answer in _answer_ids(rows, row)]
        answers = [
            answer if is_present else rows.ids[index // 2, :1]
            for index, (answer, is_present) in enumerate(zip(answers, present.flat, strict=True))
        ]
        grouped = group_rows(answers, self.group_count(len(answers)), self.tokenizer.pad_id)
        margins = bits_to_floats(rows.numbers[:, _MARGIN]).astype(np.float32)
        tensors = grouped.tensors | as_tensors({"present": present, "margins": margins})
        targets, tokens = int(present.any(axis=1).sum()), int(rows.lengths[rows.valid].sum())
        return Batch(tensors, targets, tokens, grouped.groups)

    def token_views(self, rows: Rows) -> list[TokenView]:
        """Return both answers. No token is predicted."""
        chosen, rejected = _answer_ids(rows, 0)
        goals = ("a good answer, its score over 0", "a bad answer, its score under 0")
        if len(chosen) and len(rejected):
            margin = float(bits_to_floats(rows.numbers[:1, _MARGIN])[0])
            by_margin = f" by over {margin:g}" if margin else ""
            goals = (f"the higher score{by_margin}", f"the lower score{by_margin}")
        answers = zip(("chosen", "rejected"), (chosen, rejected), goals, strict=True)
        return [TokenView(ids, np.full(len(ids), IGNORED), name, goal=goal) for name, ids, goal in answers if len(ids)]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the sums. A target is a pair of answers, or an answer with a label."""
        return self.evaluate_batch(model, batch)[0]

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums, and the scores (samples, 2)."""
        import torch
        import torch.nn.functional as F

        scores = row_logits(model, batch.tensors, batch.groups)[:, 0].view(-1, 2)
        present, margins = batch.tensors["present"], batch.tensors["margins"]
        chosen, rejected = scores.unbind(dim=1)
        pair_losses = -F.logsigmoid(chosen - rejected - margins)
        if self.config.reward.center:
            pair_losses = pair_losses + self.config.reward.center * (chosen + rejected).square()
        # The score of a labeled answer is the logit that it is good.
        single_losses = -torch.where(present[:, _CHOSEN], F.logsigmoid(chosen), F.logsigmoid(-rejected))
        losses = torch.where(present.all(dim=1), pair_losses, single_losses)
        in_loss = present.any(dim=1)
        return torch.stack([torch.where(in_loss, losses, 0.0).sum(), in_loss.sum().float()]), scores

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return the loss and metrics of pairs and of answers with a label.

        `accuracy`: fraction of pairs whose chosen answer has the higher score. `margin`: mean difference of their
        scores. `outcome_accuracy`: of answers with a label. `calibration_error`: of pairs and answers with a label.
        """
        margins, scores, labels = _split_scores(outputs, split)
        metrics = {"loss": totals["loss"] / max(1.0, totals["targets"])}
        if len(margins):
            metrics |= {"accuracy": float((margins > 0).mean()), "margin": float(margins.mean())}
        if len(scores):
            metrics["outcome_accuracy"] = float(((scores > 0) == labels).mean())
        if len(margins) or len(scores):
            metrics["calibration_error"] = calibration_error(*_logits_and_truth(margins, scores, labels))
        return metrics

    def details(self, outputs: np.ndarray, split: StoreSplit) -> dict[str, Any]:
        margins, scores, labels = _split_scores(outputs, split)
        bins = calibration_bins(*_logits_and_truth(margins, scores, labels)) if len(margins) or len(scores) else []
        return {"tables": {"Calibration": bins}} if bins else {}

    def run_task(self, model: PreTrainedModel, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return {"score": number} for each (prompt, answer). A prompt is a user message, or a list of messages.

        Raise InputError if one is too long for the model.
        """
        from artel.models.loading.structure import position_limit

        rows = [self._reader.ids(prompt, answer) for prompt, answer in inputs]
        limit = position_limit(model)
        for index, row in enumerate(rows):
            if limit is not None and len(row) > limit:
                what = f"answer {index} has {len(row):,} tokens with its prompt, but the model accepts {limit:,}"
                raise InputError.at("--context", what, "shorten it")
        return [{"score": float(score)} for score in predict_logits(model, rows, self.tokenizer.pad_id)[:, 0]]

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        """Return the score of the answer `context` to the prompt."""
        (answer,) = self.run_task(model, "score", [(prompt, context)])
        return Reply([f"{answer['score']:.4f}"], to_json={"prompt": prompt, "answer": context, **answer})


def _answer_ids(rows: Rows, row: int) -> list[np.ndarray]:
    """Return the ids of a row's chosen and rejected answers, each after its prompt."""
    chosen, rejected = rows.numbers[row, :_MARGIN]
    return [rows.ids[row, :chosen], rows.ids[row, chosen : chosen + rejected]]


def _split_scores(outputs: np.ndarray, split: StoreSplit) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (margins of pairs, scores of answers with a label, their labels) of the first samples of a split."""
    present = np.asarray(split.numbers()[: len(outputs), :_MARGIN] > 0)
    pairs = present.all(axis=1)
    is_chosen = present[~pairs, _CHOSEN]
    labeled_scores = np.where(is_chosen, outputs[~pairs, _CHOSEN], outputs[~pairs, _REJECTED])
    return outputs[pairs, _CHOSEN] - outputs[pairs, _REJECTED], labeled_scores, is_chosen


def _logits_and_truth(margins: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (logits, truth) of two questions: is the chosen answer better, and is a labeled answer good?"""
    return np.concatenate([margins, scores]), np.concatenate([np.ones(len(margins), dtype=bool), labels])


Prompt = str | Sequence[Mapping[str, Any] | Message]
"""A user message, or messages that end with one: {"role": "user", "content": "…"}."""
_ROLES = ("system", "user", "assistant", "tool")


class ConversationReader:
    """Turns conversations into ids: renders them with the chat template and encodes the full text.

    An encoder's tokenizer adds its special tokens (`[CLS] … [SEP]`), unless the template writes them.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        """Raise InputError for a template that is missing or not Jinja."""
        self.template = resolve_template(tokenizer, config.chat.template)
        tokenizer.hf.chat_template = self.template  # saved with the model
        self._tokenizer = tokenizer
        self.writer = ConversationWriter(tokenizer, self.template)

    @property
    def adds_special_tokens(self) -> bool:
        """True if the tokenizer is an encoder's, which adds special tokens around a text."""
        frame = self._tokenizer.frame(required=False)
        return bool(frame.before and frame.after)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of rendered conversations, int64 (tokens,) each."""
        encodings = self._tokenizer.encode_with_offsets(texts, control=True)
        return [self._tokenizer.add_frame(encoded.ids) for encoded in encodings]

    def ids(self, prompt: Prompt, answer: str) -> np.ndarray:
        """Return the ids of a prompt and its answer.

        Raise InputError if a text has a special token, or the template rejects the conversation.
        """
        messages = [*_read_messages(prompt), Message("assistant", answer)]
        if self.writer.has_control_token(messages):
            what = "a text has a special token of the tokenizer, which would be read as a part of the chat template"
            raise InputError.at("--prompt", what, "remove it")
        try:
            return self.encode([self.writer.write(messages).text])[0]
        except ConversationError as error:
            raise InputError.at("--prompt", str(error), "fix it") from None


def _read_messages(prompt: Prompt) -> list[Message]:
    if isinstance(prompt, str):
        return [Message("user", prompt)]
    messages = []
    for index, message in enumerate(prompt):
        if isinstance(message, Message):
            messages.append(message)
            continue
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES or not isinstance(content, str):
            fix = f"write role ({', '.join(_ROLES)}) and content"
            raise InputError.at(f"messages[{index}]", "has no role and content", fix)
        messages.append(Message(role, content))
    return messages
