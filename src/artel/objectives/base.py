"""What an objective is: record to samples, batch to loss, totals to metrics, and what it declares."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from artel.config import ModelConfig, RunConfig
from artel.errors import Problem
from artel.models.text_vectors import pools_texts
from artel.objectives.hooks import GlobalBatchHooks, TeacherHooks
from artel.objectives.length_groups import group_count
from artel.objectives.types import Batch, Beginning, DocumentSamples, Reading, Reply, Writing
from artel.objectives.usage import in_python
from artel.text import Document, Dropped, Record, Rejected, frame_notes
from artel.tokens import BalancedOrder, Order, Rows, Sample, Samples, StoreSplit, Tokenizer, TokenStore

if TYPE_CHECKING:  # objectives prepare text too, and these take seconds to import
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.models.generate import Sampling
    from artel.models.loading.request import ModelRequest
    from artel.tokens.tokenizer.chat_template import TurnEnd

Better = Literal["higher", "lower"]

_PROMPT_WORDS, _PROMPT_TOKENS = 4, 100
"""Of a prompt that is taken from the training text."""


class Objective(TeacherHooks, GlobalBatchHooks, ABC):
    """What is learned. Other rooms ask for what it declares here; they never compare its name."""

    auto_class: ClassVar[str]
    """The transformers class whose head fits (`AutoModelForCausalLM`)."""
    learns_from: ClassVar[tuple[str, ...]]
    """Kinds of records that it takes, as formats declare them: text, pairs, questions, conversations, preferences."""
    verb: ClassVar[str] = ""
    """What its models learn to do, in a word: write. `artel new` asks by it; its name where this is empty."""
    does: ClassVar[str] = ""
    """The same as a clause."""
    is_offered: ClassVar[bool] = True
    """False if `artel new` does not ask about it: it needs more than texts."""
    finetuning_rate: ClassVar[float] = 5e-5
    """Peak learning rate for all weights of a pretrained model; adapters take four times as much."""
    pipeline_tag: ClassVar[str] = ""
    """The task under which the hub lists its models: text-generation; empty if the hub has no such task."""
    section: ClassVar[str] = ""
    """Its own section of the run file; empty if it has none."""
    decided_by_records: ClassVar[tuple[str, ...]] = ()
    """Keys of its section in place of whose `auto` its records tell the value, before anything is tokenized: labels."""
    generates: ClassVar[bool] = False
    """True if its models write text token by token; `artel chat` and the harness need that."""
    writes_day: bool = False
    """True if its samples have the day on which they were prepared in them (a chat template with `strftime_now`)."""
    is_per_token: ClassVar[bool] = False
    """True if the loss is a sum over single tokens, so that ranks can share a sequence (parallel.context)."""
    needs_context: ClassVar[bool] = False
    """True if a prompt is a question about a text (`artel generate --context`)."""
    takes_context: ClassVar[bool] = False
    """True if a prompt may have a second text beside it (`artel generate --context`)."""
    continues: ClassVar[bool] = True
    """True if what a model writes continues the prompt; False if it is an answer."""
    encoder: ClassVar[bool] = False
    """True if special tokens frame the texts; a tokenizer is then trained with them."""
    apart: bool = False
    """True if a block holds several documents and tokens see only their own."""
    packs_text: ClassVar[bool] = False
    """True if several texts share a block; False if samples stand alone."""
    packs_samples: ClassVar[bool] = False
    """True if samples that stand alone can share a block, too (`data.packing`); else each has a row of its own."""
    sums: ClassVar[tuple[str, ...]]
    """Names of what `loss` returns, in order. The first two are `loss` and `targets`."""
    document_number: ClassVar[int | None] = None
    """The column of a sample's numbers that holds the number of its document in its split; the store fills it in."""
    outputs: tuple[str, ...] = ()
    """Names of the numbers that `evaluate_batch` returns for each sample."""
    samples_with_outputs: int | None = None
    """How many samples have them, the first ones; None: all."""
    has_many_outputs: ClassVar[bool] = False
    """True if they are so many that `metrics` is given them in float32, as the model has them; else in float64."""
    tasks: ClassVar[tuple[str, ...]] = ()
    """What `answers` can be asked: classify, embed, entities, generate, rerank, score; or answer: `reply` does that."""
    better: ClassVar[dict[str, Better]]
    """The metrics, and which way each improves."""

    @classmethod
    def for_run(cls, run: RunConfig) -> type[Objective]:
        """The class that a run with this objective uses."""
        return cls

    @classmethod
    def undecided(cls, run: RunConfig) -> list[str]:
        """The keys among `decided_by_records` that the run leaves to its records."""
        return [key for key in cls.decided_by_records if getattr(getattr(run, cls.section), key) == "auto"]

    @classmethod
    def decide(cls, run: RunConfig, records: Iterable[Record]) -> dict[str, Any]:
        """Values for the `undecided` keys, by the run's records: all that are kept, but for a validation file's.

        Raises InputError where they decide nothing.
        """
        raise NotImplementedError

    @classmethod
    def has_classes(cls, run: RunConfig) -> bool:
        """True if its records have labels, of each of which a share is held out for validation."""
        return False

    @classmethod
    def claims(cls, architecture: str, folder: str) -> bool:
        """True if a model that no run of artel trained is one of this objective: by the class that saved it.

        `folder` is a folder or a hub id. Of several that claim a model the first in the registry has it.
        """
        return architecture.endswith(cls.auto_class.removeprefix("AutoModel")) and not pools_texts(folder)

    @classmethod
    def run_values(cls, config: PreTrainedConfig, folder: str) -> dict[str, Any]:
        """Keys of a run file that a model stands for which no run of artel trained: {"classification": {…}}."""
        return {}

    @classmethod
    def settings(cls, run: RunConfig) -> dict[str, Any] | None:
        """Its section of the run file as plain values."""
        return getattr(run, cls.section).model_dump(mode="json") if cls.section else None

    @classmethod
    def store_settings(cls, run: RunConfig) -> Any:
        """What of the run file shapes its samples, beside sources, tokenizer and seed: a part of the store's key.

        All of its settings and the length of a block, unless an objective knows which of them do not matter. A block
        of text is cut when it is read.
        """
        return [None if cls.packs_text else run.data.block, cls.settings(run)]

    @classmethod
    def default_tokenizer(cls, run: RunConfig) -> tuple[str, str] | None:
        """The key that says where its tokenizer comes from, if neither `tokenizer` nor `model` does, and the folder or
        hub id; None: one is trained.
        """
        return None

    @classmethod
    def fills_blocks(cls, run: RunConfig) -> bool:
        """True if a row is a block of `data.block` tokens; False if it is one sample, as long as that."""
        return cls.packs_text or (cls.packs_samples and run.data.packing == "best_fit")

    @classmethod
    def keeps_apart(cls, run: RunConfig) -> bool:
        """True if a block holds several documents or samples, and tokens see only their own."""
        return not cls.packs_text and cls.fills_blocks(run)

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
        """What in the run file does not fit this objective; reported before any text is read."""
        best, problems = run.checkpoint.best, []
        if best is not None and best not in cls.better and not ("/" in best and run.validate_.tasks):
            fix = f"write one of: {', '.join(cls.better)}; TASK/METRIC of a task in validate.tasks; or null"
            problems.append(Problem("checkpoint.best", f"{best!r} is no figure of this objective", fix))
        if best is None and run.validate_.patience is not None:
            problems.append(Problem("validate.patience", "needs a figure to go by", "write checkpoint: {best: loss}"))
        return problems if cls.packs_text else [*problems, *cls._packing_problems(run)]

    @classmethod
    def _packing_problems(cls, run: RunConfig) -> list[Problem]:
        """What does not go with samples that stand alone."""
        data, problems = run.data, []
        alone = "has no meaning here: each sample stands alone, in a row of its own"
        if data.packing == "best_fit" and not cls.packs_samples:
            problems.append(Problem("data.packing", f"best_fit {alone}", "leave it out"))
        if data.document_mask and not cls.packs_samples:
            problems.append(Problem("data.document_mask", f"true {alone}", "leave it out"))
        if data.document_mask is False and cls.fills_blocks(run):
            what = "false would let samples that share a block see one another, and they never do"
            problems.append(Problem("data.document_mask", what, "leave it out"))
        return problems

    @classmethod
    def special_tokens(cls, run: RunConfig) -> list[str]:
        """What a tokenizer that is trained for this objective needs beyond the usual special tokens."""
        return []

    @property
    def loss_in_words(self) -> str:
        """What is minimized. Empty for the cross-entropy of tokens: of that it is said how the model computes it."""
        return ""

    @property
    def heads(self) -> dict[str, int]:
        """Linear heads on the first token, beside those of the model's class: name → outputs."""
        return {}

    @property
    def head_config(self) -> dict[str, Any]:
        """Values of the transformers configuration that the model's head needs: {"num_labels": 3}."""
        return {}

    def model_request(self, config: ModelConfig, block: int = 1, seed: int = 0) -> ModelRequest:
        """What a builder of models is to build for this objective; `config` is the section `model` of a run file."""
        from artel.models.loading.request import ModelRequest

        request = ModelRequest(config, self.auto_class, self.heads, block, seed, self.head_config)
        if not (self.generates or "generate" in self.tasks):
            return request
        turn = self.turn_end()
        return replace(request, end_ids=turn.ids if turn is not None else frozenset({self.tokenizer.end_id}))

    def model_files(self, model: PreTrainedModel) -> dict[str, bytes]:
        """Files that belong beside the model in its folder, by their paths there: other libraries read them."""
        return {}

    def read_model_files(self, folder: Path) -> None:  # if there are such files
        """Take what `model_files` wrote from the folder of a model that is opened. Raises InputError."""

    def calibration(self) -> dict[str, Any]:
        """What the newest `metrics` chose for the use of the model (thresholds), as plain values; empty for most.

        Checkpoints keep it, so that a model is saved with what was chosen for its own weights.
        """
        return {}

    def calibrate(self, values: dict[str, Any]) -> str:
        """Take what was chosen for the model that is used now: nothing is chosen again.

        Returns a sentence for people on what stands in place of what was not chosen; empty for most.
        """
        return ""

    def command(self, run: str, samples: Samples | None) -> str:
        """A command that shows what the model of a finished run does.

        `run` is its folder, quoted for a shell; `samples` are its training samples, None where nobody may see them.
        """
        return f"artel generate {run} --prompt {shlex.quote(self.prompt(samples))}"

    def usage(self) -> str:
        """Lines of Python for the model card: they ask `model` by transformers alone, with `tokenizer` and `torch`."""
        return f'inputs = tokenizer({in_python(self.prompt(None))}, return_tensors="pt")\nprint(model(**inputs).logits)'

    def prompt(self, samples: Samples | None) -> str:
        """A text to continue: the first of `validate.prompts`, else the first words of the training text."""
        if samples is None:
            return next(filter(None, self.run.validate_.prompts), "Once upon a time")
        if self.run.validate_.prompts:
            return self.run.validate_.prompts[0]
        ids = samples.read(0).ids[:_PROMPT_TOKENS]
        words = self.tokenizer.decode(ids[~np.isin(ids, self.tokenizer.special_ids)]).split()
        return " ".join(words[: min(_PROMPT_WORDS, max(1, len(words) - 1))])  # the last may be cut

    @abstractmethod
    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | Dropped]:
        """Yield for each document its samples, or why there are none."""

    def outputs_of(self, sample: Sample) -> np.ndarray | None:
        """The ids of a stored sample that the model learns to write, (tokens,); None for texts, where it is all."""
        return None

    @abstractmethod
    def dataset(self, part: StoreSplit) -> Samples:
        """A split of the store as this objective reads it: blocks of text, or whole samples."""

    def turn_end(self) -> TurnEnd | None:
        """What ends a turn of the assistant, in conversations; None for other texts."""
        return None

    def check_store(self, store: TokenStore) -> None:  # most objectives learn of every sample
        """Raise InputError if a run learns nothing from its store, or not what it must; called before it is used."""

    def least_evaluated(self, part: StoreSplit) -> int:
        """How many samples a validation has at least: fewer have no figures."""
        return 1

    def notes(self, documents: Iterable[Document]) -> list[str]:
        """Sentences for the user: what is learned of a run's first documents, where it is not what one expects."""
        return frame_notes(document.record for document in documents)

    def review(self, observed: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
        """Sentences for the user about the (origin, `DocumentSamples.observed`) of all documents that are kept.

        Raises InputError where nothing right can be learned of them.
        """
        return []

    def mismatch(self, records: Iterable[Record]) -> str:
        """Why a model cannot be evaluated on records (they have other labels), in a sentence; empty if it can."""
        return ""

    def order(self, part: StoreSplit, samples: int) -> Order | BalancedOrder:
        """The order of the training samples."""
        return Order(samples, self.run.seed)

    def check(self, model: PreTrainedModel) -> None:  # most objectives fit every model of their class
        """Raise InputError if a model cannot compute this loss; called before it is compiled or parallelized."""

    _planned_device: str | None = None
    """The type of the device that a plan is made for; None outside of plans."""

    def plan_for(self, build: Callable[[], PreTrainedModel], device: str) -> None:
        """In a plan, in place of `check`: lay batches out as for a model on a device of this type.

        `build` gives it on the meta device, with the attention that it trains with. What `check` tries with its
        weights is taken to succeed.
        """
        self._planned_device = device

    def group_count(self, rows: int) -> int:
        """How many groups of similar length so many rows are computed in (`length_groups`), here or as planned."""
        return group_count(rows, self.run, self._planned_device)

    def fit_statistics(self, part: StoreSplit) -> None:  # most objectives need none
        """Take from the training split what the loss needs (shares of classes), before the first batch."""

    @abstractmethod
    def batch(self, rows: Rows) -> Batch:
        """Tensors of a micro-batch, on the CPU."""

    @abstractmethod
    def readings(self, rows: Rows) -> list[Reading]:
        """What the model reads in the first row, without padding, and what it learns: for `artel data show`."""

    @abstractmethod
    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """float32 (len(sums),): sums over the batch's targets. The first is the loss in nats, with gradient."""

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What `loss` returns, and the outputs (rows, len(outputs))."""
        sums = self.loss(model, batch)
        return sums, sums.new_zeros((batch.tensors["input_ids"].shape[0], 0))

    @abstractmethod
    def metrics(self, totals: dict[str, float], outputs: np.ndarray, part: StoreSplit) -> dict[str, float]:
        """Metrics by name, of the totals and outputs (samples, len(outputs)) of a split; `loss` is a mean."""

    def predictions_file(self, outputs: np.ndarray, part: StoreSplit) -> Any:
        """The data set's official file of predictions, as plain values; None if it has none."""
        return None

    def details(self, outputs: np.ndarray, part: StoreSplit) -> dict[str, Any]:
        """What the figures leave out, for the report; empty for most objectives.

        `tables`: {title: [{column: text or number, …}, …]}; `matrices`: {title: {"labels": […], "counts": [[…], …]}},
        true labels down, predicted ones across.
        """
        return {}

    def writing(self, model: PreTrainedModel, part: StoreSplit) -> Writing | None:
        """What a model is to write for a split when it is evaluated, for figures that its losses do not give; None for
        most objectives.
        """
        return None

    def answers(self, model: PreTrainedModel, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        """What the model says of each input, as plain values. `task` is one of `tasks`. Raises InputError."""
        raise NotImplementedError

    def default_sampling(self) -> Sampling:
        """How its models write where nobody says otherwise."""
        from artel.models.generate import Sampling

        return Sampling()

    def sampling(self, **given: Any) -> Sampling:
        """How its models write: the settings of `Sampling` that are given, and not None, and the rest by default."""
        return replace(self.default_sampling(), **{name: value for name, value in given.items() if value is not None})

    def beginning(self, model: PreTrainedModel, prompt: str) -> Beginning | None:
        """What a model that `generates` continues; None if `reply` alone can tell, one prompt after another."""
        return None

    @abstractmethod
    def show(self, model: PreTrainedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
        """Yield what the model makes of a prompt, as it is written."""

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        """What `artel generate` prints; `context` is empty unless the objective takes one."""
        return Reply(self.show(model, prompt, sampling))
