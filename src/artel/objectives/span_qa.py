"""Extractive question answering: where in a document the answer stands, or that it is not there.

A document is cut into windows `[CLS] question [SEP] window [SEP]` with a stride (Devlin et al. 2019 for SQuAD; Alberti
et al. 2019, "A BERT Baseline for the Natural Questions"). Answers are located through the tokenizer's offsets. A window
that does not hold the answer whole is `unknown`, and its start and end are the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xxhash

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models.targets import IGNORED
from artel.objectives.answers import (
    CLASSES,
    Prediction,
    nq_predictions,
    predict,
    score,
    squad_predictions,
    trimmed,
)
from artel.objectives.base import Batch, Better, DocumentSamples, Objective, Reading, Reply
from artel.registry import FORMATS
from artel.text import Document, Dropped, Question, Record, Rejected
from artel.tokens import BalancedOrder, Encoded, Order, Rows, Sample, StoreSplit, Tokenizer, WholeSamples, one_row

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from artel.models.generate import Sampling

# The numbers of a sample, by column: document within its part, first token of the window in it, where the window
# begins in the sample, start and end of the answer in the sample, class.
_DOCUMENT, _WINDOW, _BEGINS, _START, _END, _CLASS = range(6)
_UNKNOWN = CLASSES.index("unknown")
_SHORTEST_WINDOW = 8


class SpanQA(Objective):
    auto_class = "AutoModelForQuestionAnswering"
    learns_from = ("questions",)
    section = "span_qa"
    needs_context = True
    continues = False
    encoder = True
    sums = ("loss", "targets")
    document_number = _DOCUMENT
    outputs = ("start", "end", "score", "null", *(f"class_{name}" for name in CLASSES))
    better: ClassVar[dict[str, Better]] = {
        "loss": "lower",
        "exact_match": "higher",
        "f1": "higher",
        "start_accuracy": "higher",
        "end_accuracy": "higher",
        "class_accuracy": "higher",
        "mean_average_precision": "higher",
    }

    def __init__(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(run, tokenizer)
        self._config = run.span_qa
        self._five = run.span_qa.heads == "five"
        tokenizer.isolate_punctuation()
        self._frame = tokenizer.frame(pair=True)
        self._class_weights: torch.Tensor | None = None

    @classmethod
    def problems(cls, run: RunConfig) -> list[Problem]:
        problems = super().problems(run)
        config, block = run.span_qa, run.data.block
        room = block - config.question - 4  # [CLS] and up to three [SEP]
        if room < _SHORTEST_WINDOW:
            what = f"{block} tokens leave no room beside a question of {config.question} (span_qa.question)"
            problems.append(Problem("data.block", what, f"write {config.question + 4 + _SHORTEST_WINDOW} or more"))
        elif config.stride > room:
            what = (
                f"{config.stride} is more than the {room} tokens of a window beside the longest question: text between "
                "windows would never be seen"
            )
            problems.append(Problem("span_qa.stride", what, f"write {room // 2}"))
        if run.checkpoint.best in ("class_accuracy", "mean_average_precision") and config.heads == "span":
            what = f"{run.checkpoint.best} needs the class head"
            problems.append(Problem("checkpoint.best", what, "write span_qa: {heads: five}, or best: f1"))
        if run.validate_.prompts:
            what = "a question needs its document; prompts show nothing here"
            fix = "leave them out, and ask the model afterwards: artel generate --context"
            problems.append(Problem("validate.prompts", what, fix))
        return problems

    @property
    def heads(self) -> dict[str, int]:
        return {"answer_class": len(CLASSES), "answer_position": 2} if self._five else {}

    @classmethod
    def store_settings(cls, run: RunConfig) -> Any:
        config = run.span_qa
        return [run.data.block, config.question, config.stride, config.unknown_windows]

    @classmethod
    def small_run(cls, block: int) -> dict[str, Any]:
        source = {"format": "dummy", "documents": 300, "kind": "questions"}
        section = {"question": block // 4, "stride": block // 4}
        return {"objective": "span_qa", "span_qa": section, "data": {"sources": [source]}}

    def command(self, run: str) -> str:
        return f'artel generate {run} --prompt "Where is Anna?" --context "Anna is in the forest."'

    # record -> samples

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | Dropped]:
        all_fields = [document.record.fields for document in documents]
        questions = self.tokenizer.encode([record.question for record in all_fields if isinstance(record, Question)])
        contexts = self.tokenizer.encode_with_offsets(
            [record.context for record in all_fields if isinstance(record, Question)]
        )
        for document, question, context in zip(documents, questions, contexts, strict=True):
            yield self._windows(document, question, context)

    def _windows(
        self, document: Document, question: np.ndarray, context: Encoded
    ) -> DocumentSamples | Rejected | Dropped:
        record, fields = document.record, document.record.fields
        assert isinstance(fields, Question)
        if len(question) > self._config.question:
            detail = (
                f"its question has {len(question)} tokens, more than span_qa.question ({self._config.question}): "
                "raise it, or shorten the question"
            )
            return Rejected(record.origin, "question_too_long", detail, record.set_name)
        if len(context.ids) == 0:
            return Rejected(record.origin, "empty", "its document has no token", record.set_name)
        if fields.answer_class != "unknown" and not fields.answers:
            detail = (
                f"it is answered by {fields.answer_class!r} without a place in the document; give one, or leave it out"
            )
            return Rejected(record.origin, "no_span", detail, record.set_name)
        answer = context.tokens_of(*trimmed(fields.context, *fields.answers[0])) if fields.answers else None
        room = self.run.data.block - self._frame.size - len(question)
        if answer is not None and answer[1] - answer[0] >= room and document.split == "train":
            return Dropped("answer_longer_than_window")
        is_validation = document.split == "validation"
        samples = []
        for first in window_starts(len(context.ids), room, self._config.stride):
            sample = self._window(document, question, context, first, room, answer)
            if is_validation or sample.numbers[_CLASS] != _UNKNOWN or self._keeps_unknown(fields, first):
                samples.append(sample)
        if not is_validation:
            return DocumentSamples(samples)
        source = {
            "id": fields.id,
            "question": fields.question,
            "context": fields.context,
            "answers": fields.answers,
            "class": fields.answer_class,
            "candidates": fields.candidates,
        }
        return DocumentSamples(samples, source)

    def _window(
        self,
        document: Document,
        question: np.ndarray,
        context: Encoded,
        first: int,
        room: int,
        answer: tuple[int, int] | None,
    ) -> Sample:
        """The window of `context` from token `first`; positions are counted in the sample."""
        fields, frame = document.record.fields, self._frame
        assert isinstance(fields, Question)
        last = min(first + room, len(context.ids))
        begins = len(frame.before) + len(question) + len(frame.between)
        ids = np.concatenate([frame.before, question, frame.between, context.ids[first:last], frame.after])
        start, end, answer_class = 0, 0, _UNKNOWN
        if answer is not None and first <= answer[0] and answer[1] < last:
            start, end = answer[0] - first + begins, answer[1] - first + begins
            answer_class = CLASSES.index(fields.answer_class)
        numbers = (0, first, begins, start, end, answer_class)  # the store counts the documents
        if document.split == "train":
            return Sample(ids.astype(np.int64), None, numbers)
        # Where each token stands in the document, so that a predicted span becomes text again: start << 32 | end.
        places = np.zeros(len(ids), dtype=np.uint64)
        starts, ends = (array[first:last].astype(np.uint64) for array in (context.starts, context.ends))
        places[begins : begins + last - first] = starts << np.uint64(32) | ends
        return Sample(ids.astype(np.int64), places, numbers)

    def _keeps_unknown(self, question: Question, first: int) -> bool:
        digest = xxhash.xxh3_64_intdigest(f"{question.id}:{question.question}:{first}".encode())
        return digest < self._config.unknown_windows * 2**64

    # samples -> batch -> loss

    def dataset(self, part: StoreSplit) -> WholeSamples:
        return WholeSamples(part)

    def order(self, part: StoreSplit, samples: int) -> Order | BalancedOrder:
        if not self._config.balanced_sampling:
            return super().order(part, samples)
        return BalancedOrder(np.asarray(part.numbers()[:, _CLASS]), self.run.seed)

    def fit_statistics(self, part: StoreSplit) -> None:
        import torch

        if self._config.class_weights == "balanced":
            counts = np.bincount(part.numbers()[:, _CLASS], minlength=len(CLASSES))
            present = counts > 0
            # As scikit-learn's "balanced": samples / (classes x count), so that the mean weight of a sample is 1.
            weights = np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0)
            self._class_weights = torch.tensor(weights, dtype=torch.float32)

    def batch(self, rows: Rows) -> Batch:
        import torch

        places = np.arange(rows.ids.shape[1])[None, :]
        attended = places < rows.lengths[:, None]
        begins = rows.numbers[:, _BEGINS, None]
        tensors = {
            "input_ids": np.where(attended, rows.ids, self.tokenizer.pad_id),
            "attention_mask": attended.astype(np.int64),
            "start": rows.numbers[:, _START],
            "end": rows.numbers[:, _END],
            "class": rows.numbers[:, _CLASS],
            "valid": rows.valid,
            # Tokens that may be an answer: those of the document, and not the special ones after it.
            "document": (places >= begins) & (places < rows.lengths[:, None] - len(self._frame.after)),
        }
        if self._frame.second_type:
            tensors["token_type_ids"] = ((places >= begins) & attended) * self._frame.second_type
        return Batch(
            {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()},
            targets=int(rows.valid.sum()),
            tokens=int(rows.lengths[rows.valid].sum()),
        )

    def readings(self, rows: Rows) -> list[Reading]:
        """The answer's tokens are what is learned; where the window has none, the first token is."""
        ids, targets = rows.ids[0, : rows.lengths[0]], np.full(rows.lengths[0], IGNORED)
        answer = slice(rows.numbers[0, _START], rows.numbers[0, _END] + 1)
        targets[answer] = ids[answer]
        return [Reading(ids, targets, CLASSES[rows.numbers[0, _CLASS]])]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """A target is a window: the heads' weighted losses are added for each, and summed over windows."""
        return self._loss(self._run(model, batch), batch)

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        outputs = self._run(model, batch)
        start, end = outputs["start"], outputs["end"]
        longest = min(self._config.longest_answer, start.shape[1])
        span, first, last = best_spans(start, end, batch.tensors["document"], longest)
        columns = [first.float(), last.float(), span, start[:, 0] + end[:, 0]]
        classes = outputs["class"].softmax(dim=-1) if self._five else start.new_zeros(len(start), len(CLASSES))
        return self._loss(outputs, batch), torch.cat([torch.stack(columns, dim=1), classes], dim=1)

    def _run(self, model: PreTrainedModel, batch: Batch) -> dict[str, torch.Tensor]:
        """Logits of start and end (rows, length), filler at minus infinity; of classes; positions from 0 to 1."""

        import torch

        inputs = {
            name: batch.tensors[name]
            for name in ("input_ids", "attention_mask", "token_type_ids")
            if name in batch.tensors
        }
        output = model(**inputs, output_hidden_states=self._five)
        filler = batch.tensors["attention_mask"] == 0
        outputs = {
            "start": output.start_logits.float().masked_fill(filler, -torch.inf),
            "end": output.end_logits.float().masked_fill(filler, -torch.inf),
        }
        if self._five:
            first = output.hidden_states[-1][:, 0]
            outputs["class"] = _head(model, "answer_class")(first).float()
            outputs["position"] = _head(model, "answer_position")(first).float().sigmoid()
        return outputs

    def _loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        weights, tensors = self._config.weights, batch.tensors
        start, end, valid = tensors["start"], tensors["end"], tensors["valid"]
        loss = weights.start * F.cross_entropy(outputs["start"], start, reduction="none")
        loss = loss + weights.end * F.cross_entropy(outputs["end"], end, reduction="none")
        if self._five:
            # Squared error of places as shares of the window, where there is an answer.
            answered = (tensors["class"] != _UNKNOWN).float()
            length = tensors["attention_mask"].sum(dim=1).float()
            position = outputs["position"]
            loss = loss + weights.start_position * answered * (position[:, 0] - start / length).square()
            loss = loss + weights.end_position * answered * (position[:, 1] - end / length).square()
            loss = loss + weights.answer_class * self._class_loss(outputs["class"], tensors["class"])
        windows = torch.tensor(float(batch.targets), device=loss.device)
        return torch.stack([torch.where(valid, loss, 0.0).sum(), windows])

    def _class_loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        config = self._config
        smoothing = config.smoothing if config.class_loss == "smooth" else 0.0
        loss = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
        if config.class_loss == "focal":  # Lin et al. 2017, "Focal Loss for Dense Object Detection", equation 5
            loss = config.focal_alpha * (1 - torch.exp(-loss)) ** config.focal_gamma * loss
        weights = self._class_weights
        return loss if weights is None else loss * weights.to(loss.device)[target]

    # figures

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, part: StoreSplit) -> dict[str, float]:
        loss = {"loss": totals["loss"] / totals["targets"]}
        return loss | score(self.predictions(outputs, part), classes=self._five)

    def predictions_file(self, outputs: np.ndarray, part: StoreSplit) -> Any:
        counts_words = any(FORMATS[source.format].counts_words for source in self.run.data.sources)
        return (nq_predictions if counts_words else squad_predictions)(self.predictions(outputs, part))

    def predictions(self, outputs: np.ndarray, part: StoreSplit) -> list[Prediction]:
        """The answer to each document of a part, from the windows that have outputs."""
        owners = np.asarray(part.numbers()[: len(outputs), _DOCUMENT])
        return self._predict(outputs, owners, part.sources(), lambda window: _places(part.sample(window)))

    def answer(self, model: PreTrainedModel, question: str, context: str) -> Prediction:
        """The answer to one question about one text. Raises InputError when the question is too long."""

        import torch

        fields = Question("", question, context, (), "unknown")
        document = Document(Record(context, "--context", "", fields), "validation")
        (made,) = self.samples([document])
        if not isinstance(made, DocumentSamples):
            raise InputError.at("--prompt", made.detail if isinstance(made, Rejected) else made.reason)
        outputs = []
        was_training = model.training
        model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for sample in made.samples:
                rows = one_row(sample)
                outputs.append(self.evaluate_batch(model, self.batch(rows).to(model.device))[1].double().cpu().numpy())
        model.train(was_training)
        owners = np.zeros(len(outputs), dtype=np.int64)
        source = made.source or {}
        (prediction,) = self._predict(
            np.concatenate(outputs), owners, [source], lambda window: _places(made.samples[window])
        )
        return prediction

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        prediction = self.answer(model, prompt, context)
        classes = dict(zip(CLASSES, prediction.classes.tolist(), strict=True)) if self.heads else None
        notes = (f"class: {prediction.answer_class}",) if self.heads else ()
        to_json = {
            "question": prompt,
            "answer": prediction.text,
            "start": prediction.start,
            "end": prediction.end,
            "score": prediction.score,
            "class": prediction.answer_class,
            "classes": classes,
        }
        return Reply([prediction.text or "(no answer)"], notes, to_json)

    def _predict(
        self,
        outputs: np.ndarray,
        owners: np.ndarray,
        sources: Iterable[dict[str, Any]],
        places: Callable[[int], np.ndarray],
    ) -> list[Prediction]:
        return predict(outputs, owners, sources, places, classes=self._five, no_answer=self._config.no_answer)

    def show(self, model: PreTrainedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
        raise InputError.at("--prompt", "a question needs a document to be answered from", "give --context")


def window_starts(tokens: int, room: int, stride: int) -> range:
    """First token of each window of a document: every `stride` tokens, until one reaches the end."""
    return range(0, max(0, tokens - room) + stride, stride) if tokens > room else range(1)


def best_spans(
    start: torch.Tensor, end: torch.Tensor, allowed: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(score, first, last) of each row's span with the largest start + end, of at most `longest` allowed tokens.

    start, end, allowed (rows, length).
    """

    import torch
    import torch.nn.functional as F

    start, end = (logits.masked_fill(~allowed, -torch.inf) for logits in (start, end))
    length = start.shape[1]
    # For each first token the best last one among the next `longest`: a window over the end logits.
    padded = F.pad(end, (0, longest - 1), value=-torch.inf)
    best, offset = padded.unfold(1, longest, 1).max(dim=2)
    score, first = (start + best).max(dim=1)
    last = first + offset.gather(1, first[:, None])[:, 0]
    return score, first, last.clamp(max=length - 1)


def _places(sample: Sample) -> np.ndarray:
    assert sample.flags is not None
    return sample.flags


def _head(model: PreTrainedModel, name: str) -> nn.Module:
    from torch import nn

    head = getattr(model, name)
    assert isinstance(head, nn.Module)
    return head
