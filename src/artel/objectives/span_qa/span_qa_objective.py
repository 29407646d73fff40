"""Extractive question answering: windows are learned, whole documents are answered."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models import IGNORED, evaluation_mode
from artel.objectives.base import Objective, directions
from artel.objectives.decoding import Decoding, python_literal
from artel.objectives.length_groups import as_tensors
from artel.objectives.span_qa.answers import (
    CLASSES,
    Prediction,
    answer_metrics,
    nq_predictions,
    predict,
    squad_predictions,
)
from artel.objectives.span_qa.heads import WindowLoss, best_spans, run_heads
from artel.objectives.span_qa.question_windows import CLASS, DOCUMENT, END, START, WINDOW_START, QuestionWindows
from artel.objectives.types import Batch, DocumentSamples, Presentation, Reply, TokenView
from artel.registry import FORMATS
from artel.text import Document, DroppedRecord, Question, Record, Rejected
from artel.tokens import BalancedOrder, Order, Rows, Sample, Samples, StoreSplit, Tokenizer, single_row

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.generation.generate import Sampling

_MIN_WINDOW_TOKENS = 8
_QUESTION, _CONTEXT = "Where is Anna?", "Anna is in the forest."  # an example


class SpanQA(Objective, Decoding):
    auto_class = "AutoModelForQuestionAnswering"
    learns_from = ("questions",)
    presentation = Presentation("finds the answer to a question in a document", "answer", "question-answering", 3e-5)
    section = "span_qa"
    needs_context = True
    continues = False
    adds_special_tokens = True
    tasks = ("answer",)
    prompts_problem = (
        "a question needs a document, so prompts cannot be used",
        "remove them, and use artel generate after training: artel generate --context",
    )
    sums = ("loss", "targets")
    document_number = DOCUMENT
    outputs = ("start", "end", "score", "null", *(f"class_{name}" for name in CLASSES))
    metric_directions = directions(
        lower=["loss"],
        higher=["exact_match", "f1", "start_accuracy", "end_accuracy", "class_accuracy", "mean_average_precision"],
    )

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._span_qa = config.span_qa
        self._five_heads = config.span_qa.heads == "five"
        tokenizer.isolate_punctuation()
        self._windows = QuestionWindows(tokenizer, config.span_qa, config.data.block)
        self._window_loss = WindowLoss(config.span_qa)

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        problems = super().problems(config)
        span_qa, block = config.span_qa, config.data.block
        window_tokens = block - span_qa.question - 4  # [CLS] and up to three [SEP]
        if window_tokens < _MIN_WINDOW_TOKENS:
            what = (
                f"{block} tokens leave no room for a document with a question of {span_qa.question} (span_qa.question)"
            )
            problems.append(Problem("data.block", what, f"write {span_qa.question + 4 + _MIN_WINDOW_TOKENS} or more"))
        elif span_qa.stride > window_tokens:
            what = (
                f"{span_qa.stride} is more than the {window_tokens} tokens of a window beside the longest question: "
                "text between windows would never be seen"
            )
            problems.append(Problem("span_qa.stride", what, f"write {window_tokens // 2}"))
        if config.checkpoint.best in ("class_accuracy", "mean_average_precision") and span_qa.heads == "span":
            what = f"{config.checkpoint.best} needs the class head"
            problems.append(Problem("checkpoint.best", what, "write span_qa: {heads: five}, or best: f1"))
        return problems

    @property
    def loss_description(self) -> str:
        suffix = ", and of the class; squared error of both positions" if self._five_heads else ""
        return f"cross-entropy of start and end{suffix}"

    @property
    def heads(self) -> dict[str, int]:
        return {"answer_class": len(CLASSES), "answer_position": 2} if self._five_heads else {}

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        span_qa = config.span_qa
        return [config.data.block, span_qa.question, span_qa.stride, span_qa.unknown_windows]

    @classmethod
    def small_run(cls, block: int) -> dict[str, Any]:
        source = {"format": "dummy", "documents": 300, "kind": "questions"}
        section = {"question": block // 4, "stride": block // 4}
        return {"objective": "span_qa", "span_qa": section, "data": {"sources": [source]}}

    def demo_command(self, folder: str, samples: Samples | None) -> str:
        question, context = (_QUESTION, _CONTEXT) if samples is None else self._windows.example_texts(samples.read(0))
        return f"artel generate {folder} --prompt {shlex.quote(question)} --context {shlex.quote(context)}"

    def model_card_code(self) -> str:
        return cleandoc(f"""
            inputs = tokenizer({python_literal(_QUESTION)}, {python_literal(_CONTEXT)}, return_tensors="pt")
            with torch.no_grad():
                outputs = model(**inputs)
            document = torch.tensor([part == 1 for part in inputs.sequence_ids()])
            scores = outputs.start_logits[0, :, None] + outputs.end_logits[0]  # of each first and last token
            scores[~(document[:, None] & document).triu()] = -torch.inf
            first, last = divmod(scores.argmax().item(), len(scores))
            print(tokenizer.decode(inputs["input_ids"][0, first : last + 1]))
        """)

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        return self._windows.samples(documents)

    # samples -> batch -> loss

    def order(self, split: StoreSplit, samples: int) -> Order | BalancedOrder:
        if not self._span_qa.balanced_sampling:
            return super().order(split, samples)
        return BalancedOrder(np.asarray(split.numbers()[:, CLASS]), self.config.seed)

    def fit_statistics(self, split: StoreSplit) -> None:
        if self._span_qa.class_weights == "balanced":
            self._window_loss.balance_classes(np.bincount(split.numbers()[:, CLASS], minlength=len(CLASSES)))

    def batch(self, rows: Rows) -> Batch:
        positions = np.arange(rows.ids.shape[1])[None, :]
        attended = positions < rows.lengths[:, None]
        window_starts = rows.numbers[:, WINDOW_START, None]
        tensors = {
            "input_ids": np.where(attended, rows.ids, self.tokenizer.pad_id),
            "attention_mask": attended.astype(np.int64),
            "start": rows.numbers[:, START],
            "end": rows.numbers[:, END],
            "class": rows.numbers[:, CLASS],
            "valid": rows.valid,
            # Tokens that may be part of an answer: those of the document.
            "document": (positions >= window_starts)
            & (positions < rows.lengths[:, None] - len(self._windows.frame.after)),
        }
        if self._windows.frame.second_type:
            tensors["token_type_ids"] = ((positions >= window_starts) & attended) * self._windows.frame.second_type
        return Batch(as_tensors(tensors), int(rows.valid.sum()), int(rows.lengths[rows.valid].sum()))

    def token_views(self, rows: Rows) -> list[TokenView]:
        """Return the first window; its targets are the answer's tokens, or the first token if it has no answer."""
        ids, targets = rows.ids[0, : rows.lengths[0]], np.full(rows.lengths[0], IGNORED)
        answer = slice(rows.numbers[0, START], rows.numbers[0, END] + 1)
        targets[answer] = ids[answer]
        return [TokenView(ids, targets, CLASSES[rows.numbers[0, CLASS]])]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the weighted losses of the heads, summed over windows. A target is a window."""
        return self._window_loss.sums(run_heads(model, batch, five_heads=self._five_heads), batch)

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        outputs = run_heads(model, batch, five_heads=self._five_heads)
        start, end = outputs["start"], outputs["end"]
        max_tokens = min(self._span_qa.longest_answer, start.shape[1])
        span, first, last = best_spans(start, end, batch.tensors["document"], max_tokens)
        columns = [first.float(), last.float(), span, start[:, 0] + end[:, 0]]
        classes = outputs["class"].softmax(dim=-1) if self._five_heads else start.new_zeros(len(start), len(CLASSES))
        return self._window_loss.sums(outputs, batch), torch.cat([torch.stack(columns, dim=1), classes], dim=1)

    # metrics

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        loss = {"loss": totals["loss"] / totals["targets"]}
        return loss | answer_metrics(self.predictions(outputs, split), classes=self._five_heads)

    def predictions_file(self, outputs: np.ndarray, split: StoreSplit) -> Any:
        counts_words = any(FORMATS[source.format].counts_words for source in self.config.data.sources)
        return (nq_predictions if counts_words else squad_predictions)(self.predictions(outputs, split))

    def predictions(self, outputs: np.ndarray, split: StoreSplit) -> list[Prediction]:
        """Return the answer to each document of a split, from the windows that have outputs."""
        owners = np.asarray(split.numbers()[: len(outputs), DOCUMENT])
        return self._predict(outputs, owners, split.references(), split.sample)

    def answer(self, model: PreTrainedModel, question: str, context: str) -> Prediction:
        """Answer a question about a text. Raise InputError if the question is too long."""
        fields = Question("", question, context, (), "unknown")
        document = Document(Record(context, "--context", "", fields), "validation")
        (result,) = self.samples([document])
        if not isinstance(result, DocumentSamples):
            raise InputError.at("--prompt", result.detail if isinstance(result, Rejected) else result.reason)
        outputs = []
        with evaluation_mode(model):
            for sample in result.samples:
                rows = single_row(sample)
                outputs.append(self.evaluate_batch(model, self.batch(rows).to(model.device))[1].double().cpu().numpy())
        owners = np.zeros(len(outputs), dtype=np.int64)
        reference = result.reference or {}
        return self._predict(np.concatenate(outputs), owners, [reference], result.samples.__getitem__)[0]

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
        references: Iterable[dict[str, Any]],
        window: Callable[[int], Sample],
    ) -> list[Prediction]:
        def offsets(index: int) -> np.ndarray:
            flags = window(index).flags
            assert flags is not None
            return flags

        return predict(
            outputs, owners, references, offsets, classes=self._five_heads, no_answer=self._span_qa.no_answer
        )
