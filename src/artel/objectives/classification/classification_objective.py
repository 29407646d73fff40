"""Classification: one label per text (Devlin et al. 2019, section 4.1), several labels, or a number.

Head and default loss (mean over texts) are those of transformers' `AutoModelForSequenceClassification`.
A sample is a text or a pair with its target.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.messages import Phrase
from artel.models import IGNORED
from artel.objectives.base import Objective
from artel.objectives.classification.framing import Framing
from artel.objectives.classification.kinds import (
    KINDS,
    THRESHOLDS,
    LabelError,
    MultiLabel,
    PlaceholderLabels,
    Regression,
    SingleLabel,
)
from artel.objectives.decoding import Decoding, first_words, python_literal
from artel.objectives.length_groups import as_tensors, group_rows, predict_logits, row_logits
from artel.objectives.pretrained_heads import base_labels, order_like
from artel.objectives.types import Batch, DocumentSamples, Presentation, Reply, TokenView
from artel.printable import shorten
from artel.text import Document, DroppedRecord, LabeledText, Record, Rejected
from artel.tokens import BalancedOrder, Order, Rows, Sample, Samples, StoreSplit, Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.generation.generate import Sampling

# Columns of a sample's numbers: start of its second text; its target, in all further columns.
_SECOND_START, _TARGET = 0, 1
_MAX_LISTED_LABELS = 10
_MIN_BLOCK_TOKENS = 8
_MANY_LABELS = 50
_MISSING_LABELS = {"-", "nan", "none", "null", "n/a", "<na>"}
_EXAMPLE = "A quiet film that stays with you."


class Classification(Objective, Decoding):
    auto_class = "AutoModelForSequenceClassification"
    learns_from = ("labels",)
    presentation = Presentation("gives texts labels, or a number", "label", "text-classification")
    section = "classification"
    decided_by_records = ("kind", "labels")
    takes_context = True
    continues = False
    adds_special_tokens = True
    sums = ("loss", "targets")
    tasks = ("classify",)
    metric_directions = SingleLabel.metric_directions | MultiLabel.metric_directions | Regression.metric_directions

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._classification = config.classification
        self._kind = (PlaceholderLabels if self.undecided(config) else KINDS[config.classification.kind])(
            config.classification
        )
        if not self._kind.has_classes and (
            config.classification.class_weights == "balanced" or config.classification.balanced_sampling
        ):
            what = "class weights and balanced sampling need labels, but these texts have numbers"
            raise InputError.at("classification", what, "remove class_weights and balanced_sampling")
        self._framing = Framing(tokenizer, config.data.block)
        self.outputs = self._kind.outputs
        best = config.checkpoint.best
        if best is not None and best not in self._kind.metric_directions and not self.undecided(config):
            fix = f"write one of: {', '.join(self._kind.metric_directions)}; or null"
            raise InputError.at("checkpoint.best", f"{best!r} is not a metric of this task", fix)

    @classmethod
    def undecided(cls, config: RunConfig) -> list[str]:
        keys = super().undecided(config)
        return [] if config.classification.kind == "number" else keys

    @classmethod
    def decide(cls, config: RunConfig, records: Iterable[Record]) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        num_texts, num_characters, all_single, all_numbers, has_fraction = 0, 0, True, True, False
        for record in records:
            fields = record.fields
            assert isinstance(fields, LabeledText)
            counts.update(fields.labels)
            num_texts += 1
            num_characters += len(fields.text)
            all_single &= len(fields.labels) == 1
            all_numbers &= fields.number is not None
            has_fraction |= fields.number is not None and not fields.number.is_integer()
        kind, labels = config.classification.kind, config.classification.labels
        if kind == "auto":
            is_multi = not all_single or any(
                source.separator or len(source.label) > 1 for source in config.data.sources
            )
            kind = "multi" if is_multi else "number" if all_numbers and has_fraction and labels == "auto" else "single"
        if labels == "auto":
            labels = [] if kind == "number" else _check_labels(counts, num_texts, num_characters, kind)
            labels = order_like(labels, base_labels(config, cls.auto_class))
        values = {"kind": kind, "labels": labels}
        return {key: values[key] for key in cls.undecided(config)}

    def notes(self, documents: Iterable[Document]) -> list[str]:
        labels = self.config.classification.labels
        return super().notes(documents) + ([] if labels == "auto" else _label_notes(labels))

    @classmethod
    def has_classes(cls, config: RunConfig) -> bool:
        kind = KINDS.get(config.classification.kind)
        return kind is not None and kind.has_classes

    @classmethod
    def run_values(cls, model_config: PreTrainedConfig, folder: str) -> dict[str, Any]:
        labels = [str(model_config.id2label[label_id]) for label_id in sorted(model_config.id2label)]
        by_type = {KINDS[name].problem_type: name for name in KINDS}
        kind = by_type.get(model_config.problem_type or "", "number" if len(labels) == 1 else "single")
        return {"classification": {"kind": kind, "labels": [] if kind == "number" else labels}}

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        classification = config.classification
        problems = super().problems(config)
        if config.data.block < _MIN_BLOCK_TOKENS:
            what = f"{config.data.block} leaves no room between the special tokens"
            problems.append(Problem("data.block", what, f"write {_MIN_BLOCK_TOKENS} or more"))
        if classification.kind == "multi" and not classification.labels:
            problems.append(Problem("classification.labels", "is empty", "write the labels, or auto"))
        if classification.kind == "number" and classification.labels not in ("auto", []):
            what = f"has {len(classification.labels)} labels, but kind: number does not use labels"
            fix = "remove them, or set kind: single or multi"
            problems.append(Problem("classification.labels", what, fix))
        is_short = classification.labels != "auto" and len(classification.labels) < 2
        if classification.kind in ("single", "auto") and is_short:
            problems.append(Problem("classification.labels", "has fewer than two labels", "write all of them, or auto"))
        return problems

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        classification = config.classification
        base = base_labels(config, cls.auto_class) if classification.labels == "auto" else []
        return [config.data.block, classification.kind, base or classification.labels, classification.too_long]

    # the model

    @property
    def head_config(self) -> dict[str, Any]:
        labels = self._kind.labels or ["LABEL_0"]  # as transformers names the output of a regression
        return {
            "id2label": dict(enumerate(labels)),
            "label2id": {label: label_id for label_id, label in enumerate(labels)},
            "problem_type": self._kind.problem_type,
        }

    @property
    def loss_description(self) -> str:
        return self._kind.loss_description

    def calibration(self) -> dict[str, Any]:
        return self._kind.chosen_thresholds()

    def calibrate(self, values: dict[str, Any]) -> str:
        return self._kind.set_thresholds(values)

    def model_files(self, model: PreTrainedModel) -> dict[str, bytes]:
        """Return the threshold of each label, if a text may have several."""
        thresholds = self.calibration()
        return {THRESHOLDS: orjson.dumps(thresholds, option=orjson.OPT_INDENT_2)} if thresholds else {}

    def read_model_files(self, folder: Path) -> None:
        file = folder / THRESHOLDS
        if file.is_file():
            self.calibrate(_read_thresholds(file))

    # record -> samples

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        fields = [document.record.fields for document in documents]
        framed = self._framing.frame([labeled.texts for labeled in fields if isinstance(labeled, LabeledText)])
        for document, row in zip(documents, framed, strict=True):
            record, labeled = document.record, document.record.fields
            assert isinstance(labeled, LabeledText)
            try:
                numbers = (row.second_start, *self._kind.encode_target(labeled))
            except LabelError as error:
                yield Rejected(record.origin, error.reason, error.detail, record.set_name)
                continue
            if row.num_truncated and self._classification.too_long == "drop":
                yield DroppedRecord("longer_than_block")
            else:
                counts = {"truncated": 1} if row.num_truncated else {}
                yield DocumentSamples([Sample(row.ids, None, numbers)], counts=counts)

    # samples -> batch -> loss

    def order(self, split: StoreSplit, samples: int) -> Order | BalancedOrder:
        if not self._classification.balanced_sampling:
            return super().order(split, samples)
        return BalancedOrder(self._kind.classes(np.asarray(split.numbers()[:, _TARGET:])), self.config.seed)

    def fit_statistics(self, split: StoreSplit) -> None:
        if self._classification.class_weights == "balanced":
            self._kind.balance(np.asarray(split.numbers()[:, _TARGET:]))

    def batch(self, rows: Rows) -> Batch:
        lengths = np.where(rows.valid, rows.lengths, 1)
        ids = [row[:length] for row, length in zip(rows.ids, lengths, strict=True)]
        types = self._token_types(lengths, rows.numbers[:, _SECOND_START])
        grouped = group_rows(ids, self.group_count(len(ids)), self.tokenizer.pad_id, types)
        tensors = as_tensors({"target": self._kind.decode_targets(rows.numbers[:, _TARGET:]), "valid": rows.valid})
        count, tokens = int(rows.valid.sum()), int(rows.lengths[rows.valid].sum())
        return Batch(grouped.tensors | tensors, count, tokens, grouped.groups)

    def _token_types(
        self, lengths: Sequence[int] | np.ndarray, second_starts: Sequence[int] | np.ndarray
    ) -> list[np.ndarray] | None:
        """Return token_type_ids; None if all are 0. `second_starts`: start of each second text, 0 for none."""
        if not np.any(second_starts) or not self._framing.pair.second_type:
            return None
        return [
            (np.arange(length) >= (second_start or length)) * self._framing.pair.second_type
            for length, second_start in zip(lengths, second_starts, strict=True)
        ]

    def token_views(self, rows: Rows) -> list[TokenView]:
        """Return the first row. No token is predicted."""
        ids = rows.ids[0, : rows.lengths[0]]
        goal = self._kind.describe_target(self._kind.decode_targets(rows.numbers[:1, _TARGET:])[0])
        return [TokenView(ids, np.full(len(ids), IGNORED), goal=goal)]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the sums. Each text is one target."""
        return self.evaluate_batch(model, batch)[0]

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        logits = row_logits(self._with_padding(model), batch.tensors, batch.groups)
        loss = self._kind.loss(logits, batch.tensors["target"])
        loss = torch.where(batch.tensors["valid"], loss, 0.0).sum()
        return torch.stack([loss, torch.full_like(loss, batch.targets)]), logits

    # metrics

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return loss and metrics. With several labels, choose their thresholds, unless the model came with some."""
        target = self._read_targets(outputs, split)
        self._kind.tune(outputs, target)
        return {"loss": totals["loss"] / totals["targets"], **self._kind.metrics(outputs, target)}

    def details(self, outputs: np.ndarray, split: StoreSplit) -> dict[str, Any]:
        return self._kind.details(outputs, self._read_targets(outputs, split))

    def _read_targets(self, outputs: np.ndarray, split: StoreSplit) -> np.ndarray:
        return self._kind.decode_targets(np.asarray(split.numbers()[: len(outputs), _TARGET:]))

    # use

    def run_task(self, model: PreTrainedModel, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return for each text or pair the label with its probability, the labels above their thresholds, or a number.

        `truncated` marks a text that was cut to the block. Raise InputError for an empty text.
        """
        texts = [_check_texts(entry) for entry in inputs]
        rows = list(self._framing.frame(texts))
        ids = [row.ids for row in rows]
        types = self._token_types([len(row.ids) for row in rows], [row.second_start for row in rows])
        logits = predict_logits(self._with_padding(model), ids, self.tokenizer.pad_id, types)
        return [
            {**self._kind.answer(row_logits[None]), **({"truncated": True} if row.num_truncated else {})}
            for row_logits, row in zip(logits, rows, strict=True)
        ]

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        (answer,) = self.run_task(model, "classify", [(prompt, context) if context else prompt])
        ordered = sorted(answer.get("probabilities", {}).items(), key=lambda item: -item[1])
        notes = [f"{label} {probability:.3f}" for label, probability in ordered[:_MAX_LISTED_LABELS]]
        if answer.get("truncated"):
            notes.append(f"the text was cut to {self.config.data.block} tokens")
        request = {"prompt": prompt, **({"context": context} if context else {})}
        return Reply([_format_answer(answer)], tuple(notes), {**request, **answer})

    def example_prompt(self, samples: Samples | None) -> str:
        """Return the first of `validate.prompts`, or the first words of the training text."""
        if samples is None or self.config.validate_.prompts:
            return next(filter(None, self.config.validate_.prompts), _EXAMPLE)
        sample, frame = samples.read(0), self._framing.single
        text_ids = sample.ids[len(frame.before) : len(sample.ids) - len(frame.after)]
        return first_words(self.tokenizer, text_ids)

    def model_card_code(self) -> str:
        all_labels = ", top_k=None" if self._kind.is_multi_label else ""
        example = python_literal(self.example_prompt(None))
        if any(source.second for source in self.config.data.sources):
            example = f'{{"text": {example}, "text_pair": {python_literal(_EXAMPLE)}}}'
        return cleandoc(f"""
            from transformers import pipeline

            classify = pipeline("text-classification", model=model, tokenizer=tokenizer{all_labels})
            print(classify({example}))
        """)

    def _with_padding(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model with a padding token: decoder classifiers read the last token that is not padding."""
        if getattr(model.config, "pad_token_id", None) is None:
            model.config.pad_token_id = self.tokenizer.pad_id
        return model


def _check_labels(counts: Counter[str], texts: int, characters: int, kind: str) -> list[str]:
    """Return all labels in order. `characters`: number of characters of all texts.

    Raise InputError if the labels cannot be learned.
    """
    key = "classification.labels"
    labels = sorted(counts)
    if all(re.fullmatch("[+-]?[0-9]+", label) for label in labels):
        labels.sort(key=int)
    if len(labels) < 2 and not (kind == "multi" and labels):
        what = f"all {texts:,} texts have the label {shorten(labels[0])!r}" if labels else "no text has a label"
        raise InputError.at(key, what, "check `label` of the source, or write the labels")
    if len(labels) > max(_MANY_LABELS, texts / 2):
        what = f"{texts:,} texts have {len(labels):,} different labels: {', '.join(map(shorten, labels[:3]))} …"
        fix = "check `label` of the source; for numbers write classification.kind: number"
        if sum(len(label) * count for label, count in counts.items()) > characters:
            fix = "labels are longer than texts: are `field` and `label` of the source swapped?"
        raise InputError.at(key, what, fix)
    return labels


def _label_notes(labels: list[str]) -> list[str]:
    """Return notes about labels that often mean "no label", and about labels that differ only by case."""
    notes: list[str] = []
    numbers = [int(label) for label in labels if re.fullmatch("[+-]?[0-9]+", label)]
    is_placeholder = len(numbers) == len(labels) > 2 and min(numbers) == -1 and max(numbers) > 1  # not of -1, 0, 1
    unlabeled = [label for label in labels if label.lower() in _MISSING_LABELS or (is_placeholder and label == "-1")]
    for label in unlabeled:
        what = "{label!r} is used as a label, but often marks missing labels: remove those rows if so"
        notes.append(Phrase(what, label=label))
    by_name: dict[str, list[str]] = {}
    for label in labels:
        by_name.setdefault(label.casefold(), []).append(label)
    similar = [Phrase("{labels: and }", labels=[*map(repr, names)]) for names in by_name.values() if len(names) > 1]
    if similar:
        notes.append(
            Phrase(
                "{labels} differ only in case and are used as different labels: unify the spelling", labels=similar[:3]
            )
        )
    return notes


def _read_thresholds(file: Path) -> dict[str, Any]:
    try:
        thresholds = orjson.loads(file.read_bytes())
        if not isinstance(thresholds, dict) or not all(type(value) in (int, float) for value in thresholds.values()):
            raise ValueError("expected an object of numbers")
    except ValueError as error:
        raise InputError.at(
            str(file), f"does not contain valid thresholds: {error}", 'write {"label": 0.5, …}, or remove it'
        ) from None
    return thresholds


def _check_texts(entry: Any) -> tuple[str, ...]:
    texts = (entry,) if isinstance(entry, str) else tuple(entry)
    if not 1 <= len(texts) <= 2 or not all(isinstance(text, str) and text.strip() for text in texts):
        raise InputError.at("input", "must be a non-empty text, or a pair of them", "give a text, or two")
    return texts


def _format_answer(answer: dict[str, Any]) -> str:
    if "number" in answer:
        return f"{answer['number']:.4g}"
    return answer.get("label") or ", ".join(answer.get("labels", [])) or "(no label)"
