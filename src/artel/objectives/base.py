"""The base class of objectives: record to samples, batch to loss, totals to metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from artel.config import ModelConfig, RunConfig
from artel.errors import Problem
from artel.objectives.decoding import Decoding
from artel.objectives.hooks import (
    AnswerHooks,
    EvaluationHooks,
    GlobalBatchHooks,
    ModelHooks,
    RecordHooks,
    RoundHooks,
    TeacherHooks,
)
from artel.objectives.types import Batch, DocumentSamples, Presentation, TokenView
from artel.registry import OBJECTIVES
from artel.text import Document, DroppedRecord, Rejected, frame_notes
from artel.tokens import BalancedOrder, Order, Rows, Sample, Samples, StoreSplit, Tokenizer, TokenStore, UnpackedSamples

if TYPE_CHECKING:  # objectives prepare text too, and these take seconds to import
    import torch
    from transformers import PreTrainedModel

    from artel.models.loading.request import ModelRequest

Direction = Literal["higher", "lower"]


def directions(*, lower: Sequence[str], higher: Sequence[str]) -> dict[str, Direction]:
    """Return the direction in which each metric improves."""
    return {**dict.fromkeys(lower, "lower"), **dict.fromkeys(higher, "higher")}


class Objective(RecordHooks, ModelHooks, EvaluationHooks, TeacherHooks, GlobalBatchHooks, AnswerHooks, RoundHooks, ABC):
    """The task that a model learns: samples, batches, loss and metrics. Other packages never compare its name.

    The base classes have hooks that few objectives need. `Decoding` is a second base class, of objectives whose models
    answer.
    """

    auto_class: ClassVar[str]
    """The transformers class with the right head: AutoModelForCausalLM."""
    learns_from: ClassVar[tuple[str, ...]]
    """Kinds of records, as formats declare them: text, pairs, questions, conversations, preferences, prompts."""
    presentation: ClassVar[Presentation] = Presentation("")
    """Description in `artel new` and on model cards."""
    section: ClassVar[str] = ""
    """Name of its section in the run file; empty if it has none."""
    generates: ClassVar[bool] = False
    """True if its models generate text token by token, as `artel chat` and lm-eval need."""
    inserts_date: bool = False
    """True if samples contain the date of their preparation (a chat template with `strftime_now`)."""
    is_per_token: ClassVar[bool] = False
    """True if the loss is a sum over tokens, so that ranks can share a sequence (parallel.context)."""
    adds_special_tokens: ClassVar[bool] = False
    """True if special tokens frame the texts; a trained tokenizer then has them."""
    isolated_documents: bool = False
    """True if blocks hold several documents and tokens attend to their own document only."""
    packs_text: ClassVar[bool] = False
    """True if several texts share a block; False if each sample is separate."""
    packs_samples: ClassVar[bool] = False
    """True if separate samples can share a block (`data.packing`); otherwise each has its own row."""
    sums: ClassVar[tuple[str, ...]]
    """Names of the sums that `loss` returns, in order. The first two are `loss` and `targets`."""
    outputs: tuple[str, ...] = ()
    """Names of the numbers that `evaluate_batch` returns per sample."""
    prompts_problem: ClassVar[tuple[str, str] | None] = None
    """(problem, fix) if a run cannot have `validate.prompts`; None if it can."""
    metric_directions: dict[str, Direction]
    """Names of its metrics, and the direction in which each improves."""
    main_metric: ClassVar[str] = "loss"
    """The metric that `checkpoint.best: loss`, the default, stands for."""

    @classmethod
    def for_run(cls, config: RunConfig) -> type[Objective]:
        """Return the class for a run with this objective."""
        return cls

    @classmethod
    def settings(cls, config: RunConfig) -> dict[str, Any] | None:
        """Return the objective's section of the run file as plain values."""
        return getattr(config, cls.section).model_dump(mode="json") if cls.section else None

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        """Return the settings that shape the samples beside sources, tokenizer and seed: part of the store's key.

        By default all of its section, and the block length unless texts are cut into blocks when they are read.
        """
        return [None if cls.packs_text else config.data.block, cls.settings(config)]

    @classmethod
    def fills_blocks(cls, config: RunConfig) -> bool:
        """True if a row is a block of `data.block` tokens; False if it is one sample of its own length."""
        return cls.packs_text or (cls.packs_samples and config.data.packing == "best_fit")

    @classmethod
    def uses_document_mask(cls, config: RunConfig) -> bool:
        """True if blocks of this run hold several documents or samples, and a mask keeps attention within each."""
        return not cls.packs_text and cls.fills_blocks(config)

    @classmethod
    def small_run(cls, block: int) -> dict[str, Any]:
        """Return the run-file keys of a trial run for `artel doctor`, on made-up records in blocks of `block` tokens.

        The records are plain text if none of its kind can be made up.
        """
        return {"data": {"sources": [{"format": "dummy", "documents": 300}]}}

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        """Raise InputError if run and tokenizer do not fit each other."""
        self.config = config
        self.tokenizer = tokenizer
        self.metric_directions = self.directions_of(config)

    @classmethod
    def directions_of(cls, config: RunConfig) -> dict[str, Direction]:
        """Return `metric_directions` of a run, with the metric of `validate.rewards`."""
        return cls.metric_directions | (directions(lower=[], higher=["reward"]) if config.validate_.rewards else {})

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        """Return the problems of the run file under this objective. Called before any text is read."""
        problems, known = [], cls.directions_of(config)
        best = cls.main_metric if config.checkpoint.best == "loss" else config.checkpoint.best
        if best is not None and best not in known and not ("/" in best and config.validate_.tasks):
            fix = f"write one of: {', '.join(known)}; TASK/METRIC of a task in validate.tasks; or null"
            problems.append(Problem("checkpoint.best", f"{best!r} is not a metric of this objective", fix))
        if config.validate_.prompts and cls.prompts_problem:
            problems.append(Problem("validate.prompts", *cls.prompts_problem))
        if config.validate_.rewards and not cls.has_answers:
            what = f"objective {config.objective} writes no answers that rewards could score"
            answering = [name for name in OBJECTIVES.names if OBJECTIVES[name].has_answers]
            problems.append(Problem("validate.rewards", what, f"remove it; it works with {', '.join(answering)}"))
        if best is None and config.validate_.patience is not None:
            problems.append(
                Problem(
                    "validate.patience",
                    "needs checkpoint.best, the metric that must improve",
                    "set checkpoint: {best: loss}",
                )
            )
        return problems if cls.packs_text else [*problems, *cls._packing_problems(config)]

    @classmethod
    def _packing_problems(cls, config: RunConfig) -> list[Problem]:
        """Return problems with packing options that need packed samples."""
        problems = []
        data = config.data
        reason = "does not apply: each sample has its own row"
        if data.packing == "best_fit" and not cls.packs_samples:
            problems.append(Problem("data.packing", f"best_fit {reason}", "remove it"))
        if data.document_mask and not cls.packs_samples:
            problems.append(Problem("data.document_mask", f"true {reason}", "remove it"))
        if data.document_mask is False and cls.fills_blocks(config):
            what = "false is not possible: packed samples never attend to each other"
            problems.append(Problem("data.document_mask", what, "remove it"))
        return problems

    @classmethod
    def special_tokens(cls, config: RunConfig) -> list[str]:
        """Return special tokens that a tokenizer trained for this objective needs beside the default ones."""
        return []

    @property
    def loss_description(self) -> str:
        """A description of the loss. Empty for the cross-entropy of tokens, which the model describes."""
        return ""

    def model_request(self, model: ModelConfig, block: int = 1, seed: int = 0) -> ModelRequest:
        """Return the request for a model for this objective. `model`: that section of the run file."""
        from artel.models.loading.request import ModelRequest

        request = ModelRequest(model, self.auto_class, self.heads, block, seed, self.head_config)
        if not (self.generates or "generate" in self.decoding.tasks):
            return request
        turn = self.decoding.turn_end()
        return replace(request, end_ids=turn.ids if turn is not None else frozenset({self.tokenizer.end_id}))

    @abstractmethod
    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        """Yield the samples of each document, or the reason it was rejected or dropped."""

    def output_ids(self, sample: Sample) -> np.ndarray | None:
        """Return the ids (tokens,) of a stored sample that the model learns to write; None if it learns all."""
        return None

    def dataset(self, split: StoreSplit) -> Samples:
        """Return a split of the store as this objective reads it: separate samples, or blocks of text."""
        return UnpackedSamples(split)

    def check_store(self, store: TokenStore) -> None:  # most objectives train on every sample
        """Raise InputError if the store has no targets for this objective, or the wrong ones. Called before use."""

    def notes(self, documents: Iterable[Document]) -> list[str]:
        """Return notes for the user if the first documents would be learned in an unexpected way."""
        return frame_notes(document.record for document in documents)

    def order(self, split: StoreSplit, samples: int) -> Order | BalancedOrder:
        """Return the order of the training samples."""
        return Order(samples, self.config.seed)

    def check(self, model: PreTrainedModel) -> None:  # most objectives fit every model of their class
        """Raise InputError if a model cannot compute this loss. Called before it is compiled or parallelized."""

    def fit_statistics(self, split: StoreSplit) -> None:  # most objectives need none
        """Compute what the loss needs from the training split (class frequencies). Called before the first batch."""

    @abstractmethod
    def batch(self, rows: Rows) -> Batch:
        """Return the tensors of a micro-batch, on the CPU."""

    @abstractmethod
    def token_views(self, rows: Rows) -> list[TokenView]:
        """Return the inputs and targets of the first row, without padding, for `artel data show`."""

    @abstractmethod
    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return sums over the batch's targets, float32 (len(sums),). The first is the loss in nats, with gradient."""

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of `loss`, and the outputs (rows, len(outputs))."""
        sums = self.loss(model, batch)
        return sums, sums.new_zeros((batch.tensors["input_ids"].shape[0], 0))

    @abstractmethod
    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return metrics by name from a split's totals and outputs (samples, len(outputs)); `loss` is a mean."""

    @property
    def decoding(self) -> Decoding:
        """This objective if it can decode, else a `Decoding` that refuses every prompt."""
        return self if isinstance(self, Decoding) else Decoding(self.config, self.tokenizer)
