"""The three answers of an objective: record to samples, batch to loss, and which figures judge the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from artel.config import RunConfig
from artel.errors import Problem
from artel.text import Document, Dropped, Rejected
from artel.tokens import BalancedOrder, Order, Rows, Sample, Samples, StorePart, Tokenizer

if TYPE_CHECKING:  # text is prepared by objectives too, and should not wait the seconds that these take to import
    import torch
    from transformers import PreTrainedModel

    from artel.models import Sampling

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch as a model takes it: named tensors; targets that a loss is taken on, and input tokens.

    Filler is in neither count.
    """

    tensors: dict[str, torch.Tensor]
    targets: int
    tokens: int

    def to(self, device: torch.device) -> Batch:
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}
        return Batch(tensors, self.targets, self.tokens)


@dataclass(frozen=True, slots=True)
class Made:
    """What became of a document: its samples, and what its answers are judged by, kept in the store beside them."""

    samples: list[Sample]
    source: dict[str, Any] | None = None
    counted: dict[str, int] = field(default_factory=dict)
    """What was done to the document that its user should know, for the ledger: {"truncated": 1}."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model reads in training, token for token, and what it learns from it."""

    ids: np.ndarray
    """int64 (tokens,)."""
    targets: np.ndarray
    """int64 (tokens,): the id that is to be found at each place, itself or, where it is hidden, another; IGNORED where
    nothing is learned."""
    name: str = ""
    """Which of several that a sample has: chosen, rejected."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model makes of a prompt."""

    pieces: Iterable[str]
    """The text, as it is written."""
    notes: tuple[str, ...] = ()
    """Lines for people, after the text."""
    to_json: dict[str, Any] | None = None
    """What --json prints; the prompt and the text where this is None."""


class Objective(ABC):
    """What is learned, one file each. All others know an objective by what it declares here, never by its name."""

    auto_class: ClassVar[str]
    """The transformers class whose head fits (`AutoModelForCausalLM`)."""
    learns_from: ClassVar[tuple[str, ...]]
    """Kinds of records that it takes, as formats declare them: text, pairs, questions, conversations, preferences."""
    section: ClassVar[str] = ""
    """Its own section of the run file; empty where it has none."""
    generates: ClassVar[bool] = False
    """Whether its models write text token by token: `artel chat` and the harness take no others."""
    is_per_token: ClassVar[bool] = False
    """Whether the loss is a sum over single tokens, so that processes may share a sequence (parallel.context)."""
    needs_context: ClassVar[bool] = False
    """Whether a prompt is a question about a text (`artel generate --context`)."""
    continues: ClassVar[bool] = True
    """Whether what a model shows goes on where the prompt ends; else it is an answer."""
    encoder: ClassVar[bool] = False
    """Whether texts are framed by special tokens, and a tokenizer is trained with them."""
    packs_text: ClassVar[bool] = False
    """Whether texts stand together in blocks; else each sample stands alone."""
    sums: ClassVar[tuple[str, ...]]
    """Names of what `loss` returns, in order; the first two are always `loss` and `targets`."""
    document_number: ClassVar[int | None] = None
    """Which of a sample's numbers is the number of its document in its part of the store; the store counts them."""
    outputs: ClassVar[tuple[str, ...]] = ()
    """Names of the numbers that `judge` finds for each sample."""
    better: ClassVar[dict[str, Better]]
    """The figures, and which way each improves."""

    @classmethod
    def for_run(cls, run: RunConfig) -> type[Objective]:
        """The class that a run with this objective uses."""
        return cls

    @classmethod
    def settings(cls, run: RunConfig) -> dict[str, Any] | None:
        """Its own section of the run file as plain values."""
        return getattr(run, cls.section).model_dump(mode="json") if cls.section else None

    @classmethod
    def store_settings(cls, run: RunConfig) -> Any:
        """What of the run file shapes its samples, beside sources, tokenizer and seed: a part of the store's key.

        All of its settings and the length of a block, unless an objective knows which of them do not matter. A block
        of text is cut when it is read.
        """
        return [None if cls.packs_text else run.data.block, cls.settings(run)]

    @classmethod
    def small_run(cls, block: int) -> dict[str, Any]:
        """Keys of a run that learns this from made-up records in `block` tokens: `artel doctor` tries it on processes.

        Plain text stands in where records of its kind cannot be made up.
        """
        return {"data": {"sources": [{"format": "dummy", "documents": 300}]}}

    def __init__(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        """Raises InputError when run and tokenizer do not go together."""
        self.run = run
        self.tokenizer = tokenizer

    @classmethod
    def problems(cls, run: RunConfig) -> list[Problem]:
        """What in the run file does not go with this objective, told before any text is read."""
        best, found = run.checkpoint.best, []
        if best is not None and best not in cls.better:
            found.append(Problem("checkpoint.best", f"{best!r} is no figure of this objective",
                                 f"write one of: {', '.join(cls.better)}; or null"))  # fmt: skip
        if best is None and run.validate_.patience is not None:
            found.append(Problem("validate.patience", "needs a figure to go by", "write checkpoint: {best: loss}"))
        if not cls.packs_text:
            alone = "has no meaning here: each sample stands alone, in a row of its own"
            if run.data.packing != "concatenate":
                found.append(Problem("data.packing", f"{run.data.packing} {alone}", "leave it out"))
            if run.data.document_mask:
                found.append(Problem("data.document_mask", f"true {alone}", "leave it out"))
        return found

    @classmethod
    def special_tokens(cls, run: RunConfig) -> list[str]:
        """What a tokenizer that is trained for this objective needs beyond the usual special tokens."""
        return []

    @property
    def heads(self) -> dict[str, int]:
        """Linear heads on the first token that the model needs beyond its own: name -> outputs."""
        return {}

    def command(self, run: str) -> str:
        """What to type to see what the model of a finished run does; `run` is its folder, quoted for a shell."""
        return f'artel generate {run} --prompt "Once upon a time"'

    @abstractmethod
    def samples(self, documents: list[Document]) -> Iterator[Made | Rejected | Dropped]:
        """For each document its samples, or why there are none."""

    @abstractmethod
    def view(self, part: StorePart) -> Samples:
        """A part of the store as this objective reads it: joined blocks, or samples that stand alone."""

    def order(self, part: StorePart, samples: int) -> Order | BalancedOrder:
        """In which order the training part's samples come."""
        return Order(samples, self.run.seed)

    def check(self, model: PreTrainedModel) -> None:  # noqa: B027  # most objectives go with every model of their class
        """Raise InputError when a built model cannot compute this loss; before it is compiled, split or judged."""

    def fit_statistics(self, part: StorePart) -> None:  # noqa: B027  # most objectives need to know nothing of it
        """Learn what the loss must know of the training part (shares of classes), before the first batch."""

    needs_reference: bool = False
    """Whether the loss is against the model as it was before training: then what `judge` finds of each sample of both
    parts is computed once, before the first step, and given to `remember`."""

    def remember(self, outputs: np.ndarray, *, judged: bool) -> None:  # noqa: B027  # only where `needs_reference`
        """`judge`'s outputs (samples, len(outputs)) by the model before training, of the training or judged part."""

    needs_global_statistics: bool = False
    """Whether the loss must know something of the whole global batch first."""

    def batch_statistics(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """float32 (any,): sums over a micro-batch, without gradient; only where `needs_global_statistics`."""
        raise NotImplementedError

    def set_global_statistics(self, totals: list[float]) -> None:  # noqa: B027  # only where `needs_global_statistics`
        """What the surveys of all micro-batches of the global batch add up to, told before its first `loss`."""

    @abstractmethod
    def batch(self, rows: Rows) -> Batch:
        """Tensors of a micro-batch, on the CPU."""

    @abstractmethod
    def readings(self, rows: Rows) -> list[Reading]:
        """What the model reads of the first of the rows, without filler, and what is learned: for people to see."""

    @abstractmethod
    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """float32 (len(sums),): sums over the batch's targets. The first, the loss in nats, carries the gradient."""

    def judge(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What `loss` gives, and (rows, len(outputs)) for each row."""
        sums = self.loss(model, batch)
        return sums, sums.new_zeros((batch.tensors["input_ids"].shape[0], 0))

    @abstractmethod
    def figures(self, totals: dict[str, float], outputs: np.ndarray, part: StorePart) -> dict[str, float]:
        """What the totals and the outputs (samples, len(outputs)) of a part say, by name; `loss` is a mean."""

    def predictions_file(self, outputs: np.ndarray, part: StorePart) -> Any:
        """The official file of predictions of a data set, as plain values; None where there is none."""
        return None

    @abstractmethod
    def show(self, model: PreTrainedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
        """What the model makes of a prompt, in pieces as they are written."""

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        """What `artel generate` prints; `context` is empty unless the objective `needs_context`."""
        return Reply(self.show(model, prompt, sampling))
