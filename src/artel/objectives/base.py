"""The base class of objectives: record to samples, batch to loss, totals to metrics."""

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
from artel.objectives.types import Batch, DocumentSamples, GenerationEval, GenerationPrompt, Reply, TokenView
from artel.objectives.usage import in_python
from artel.text import Document, Dropped, Record, Rejected, frame_notes
from artel.tokens import BalancedOrder, Order, Rows, Sample, Samples, StoreSplit, Tokenizer, TokenStore, WholeSamples

if TYPE_CHECKING:  # objectives prepare text too, and these take seconds to import
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.models.generate import Sampling
    from artel.models.loading.request import ModelRequest
    from artel.tokens.tokenizer.chat_template import TurnEnd

Better = Literal["higher", "lower"]

_PROMPT_WORDS, _PROMPT_TOKENS = 4, 100
"""Length of a prompt taken from the training text, and tokens decoded for it."""


class Objective(TeacherHooks, GlobalBatchHooks, ABC):
    """The task that a model learns. Other packages read the attributes declared here; they never compare its name."""

    auto_class: ClassVar[str]
    """The transformers class with the right head: AutoModelForCausalLM."""
    learns_from: ClassVar[tuple[str, ...]]
    """Kinds of records it takes, as formats declare them: text, pairs, questions, conversations, preferences."""
    verb: ClassVar[str] = ""
    """One word for what its models do, offered by `artel new`: write. Defaults to the objective's name."""
    does: ClassVar[str] = ""
    """The same as a clause."""
    is_offered: ClassVar[bool] = True
    """False if `artel new` does not offer it, because it needs more than texts."""
    finetuning_rate: ClassVar[float] = 5e-5
    """Peak learning rate for finetuning all weights; adapters use four times as much."""
    pipeline_tag: ClassVar[str] = ""
    """The hub's task for its models: text-generation. Empty if the hub has none."""
    section: ClassVar[str] = ""
    """Its section of the run file; empty if it has none."""
    decided_by_records: ClassVar[tuple[str, ...]] = ()
    """Keys of its section whose `auto` is decided from the records before anything is tokenized: labels."""
    generates: ClassVar[bool] = False
    """True if its models generate text token by token, as `artel chat` and lm-eval need."""
    writes_day: bool = False
    """True if samples contain the date of their preparation (a chat template with `strftime_now`)."""
    is_per_token: ClassVar[bool] = False
    """True if the loss is a sum over tokens, so that ranks can share a sequence (parallel.context)."""
    needs_context: ClassVar[bool] = False
    """True if a prompt is a question about a text (`artel generate --context`)."""
    takes_context: ClassVar[bool] = False
    """True if a prompt may come with a second text (`artel generate --context`)."""
    continues: ClassVar[bool] = True
    """True if the output continues the prompt; False if it answers it."""
    encoder: ClassVar[bool] = False
    """True if special tokens frame the texts; a trained tokenizer then has them."""
    isolated_documents: bool = False
    """True if a block holds several documents and tokens attend to their own document only."""
    packs_text: ClassVar[bool] = False
    """True if several texts share a block; False if each sample is separate."""
    packs_samples: ClassVar[bool] = False
    """True if separate samples can share a block (`data.packing`); otherwise each has its own row."""
    sums: ClassVar[tuple[str, ...]]
    """Names of the sums that `loss` returns, in order. The first two are `loss` and `targets`."""
    document_number: ClassVar[int | None] = None
    """The column of a sample's numbers for the number of its document in the split, filled in by the store."""
    outputs: tuple[str, ...] = ()
    """Names of the numbers that `evaluate_batch` returns per sample."""
    samples_with_outputs: int | None = None
    """Number of samples that have outputs, from the first; None for all."""
    has_many_outputs: ClassVar[bool] = False
    """True if `metrics` gets the outputs in float32, because there are many; otherwise in float64."""
    tasks: ClassVar[tuple[str, ...]] = ()
    """Tasks of `answers`: classify, embed, entities, generate, rerank, score. `answer` is done by `reply`."""
    better: ClassVar[dict[str, Better]]
    """Its metrics, and the direction in which each improves."""

    @classmethod
    def for_run(cls, config: RunConfig) -> type[Objective]:
        """Return the class for a run with this objective."""
        return cls

    @classmethod
    def undecided(cls, config: RunConfig) -> list[str]:
        """Return the keys of `decided_by_records` that the run leaves at auto."""
        return [key for key in cls.decided_by_records if getattr(getattr(config, cls.section), key) == "auto"]

    @classmethod
    def decide(cls, config: RunConfig, records: Iterable[Record]) -> dict[str, Any]:
        """Return values for the `undecided` keys. `records`: all kept records, except those of a validation file.

        Raises InputError if they decide nothing.
        """
        raise NotImplementedError

    @classmethod
    def has_classes(cls, config: RunConfig) -> bool:
        """True if its records have labels, so that validation holds out a fraction per label."""
        return False

    @classmethod
    def claims(cls, architecture: str, folder: str) -> bool:
        """True if this objective fits a model from elsewhere, judged by the class that saved it.

        `folder` is a folder or a hub id. The first objective in the registry that claims a model gets it.
        """
        return architecture.endswith(cls.auto_class.removeprefix("AutoModel")) and not pools_texts(folder)

    @classmethod
    def run_values(cls, model_config: PreTrainedConfig, folder: str) -> dict[str, Any]:
        """Return keys of the run file that fit a model from elsewhere: {"classification": {…}}."""
        return {}

    @classmethod
    def settings(cls, config: RunConfig) -> dict[str, Any] | None:
        """Return its section of the run file as plain values."""
        return getattr(config, cls.section).model_dump(mode="json") if cls.section else None

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        """Return the settings that shape its samples beside sources, tokenizer and seed: part of the store's key.

        By default all of its section, and the block length unless texts are cut into blocks when they are read.
        """
        return [None if cls.packs_text else config.data.block, cls.settings(config)]

    @classmethod
    def default_tokenizer(cls, config: RunConfig) -> tuple[str, str] | None:
        """Return (run-file key, folder or hub id) of the tokenizer if neither `tokenizer` nor `model` gives one.

        None: a tokenizer is trained.
        """
        return None

    @classmethod
    def fills_blocks(cls, config: RunConfig) -> bool:
        """True if a row is a block of `data.block` tokens; False if it is one sample of its own length."""
        return cls.packs_text or (cls.packs_samples and config.data.packing == "best_fit")

    @classmethod
    def isolates_documents(cls, config: RunConfig) -> bool:
        """True if a block holds several documents or samples, and tokens attend to their own only."""
        return not cls.packs_text and cls.fills_blocks(config)

    @classmethod
    def small_run(cls, block: int) -> dict[str, Any]:
        """Return keys of a run on made-up records in blocks of `block` tokens, which `artel doctor` tries.

        Plain text if no records of its kind can be made up.
        """
        return {"data": {"sources": [{"format": "dummy", "documents": 300}]}}

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        """Raises InputError if run and tokenizer do not fit each other."""
        self.config = config
        self.tokenizer = tokenizer

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        """Return what in the run file does not fit this objective. Called before any text is read."""
        best, problems = config.checkpoint.best, []
        if best is not None and best not in cls.better and not ("/" in best and config.validate_.tasks):
            fix = f"write one of: {', '.join(cls.better)}; TASK/METRIC of a task in validate.tasks; or null"
            problems.append(Problem("checkpoint.best", f"{best!r} is not a metric of this objective", fix))
        if best is None and config.validate_.patience is not None:
            problems.append(
                Problem("validate.patience", "needs a metric to judge by", "write checkpoint: {best: loss}")
            )
        return problems if cls.packs_text else [*problems, *cls._packing_problems(config)]

    @classmethod
    def _packing_problems(cls, config: RunConfig) -> list[Problem]:
        """Return what does not fit separate samples."""
        data, problems = config.data, []
        alone = "does not apply: each sample has its own row"
        if data.packing == "best_fit" and not cls.packs_samples:
            problems.append(Problem("data.packing", f"best_fit {alone}", "leave it out"))
        if data.document_mask and not cls.packs_samples:
            problems.append(Problem("data.document_mask", f"true {alone}", "leave it out"))
        if data.document_mask is False and cls.fills_blocks(config):
            what = "false would let samples that share a block see one another, and they never do"
            problems.append(Problem("data.document_mask", what, "leave it out"))
        return problems

    @classmethod
    def special_tokens(cls, config: RunConfig) -> list[str]:
        """Return special tokens that a tokenizer trained for this objective needs beside the default ones."""
        return []

    @property
    def loss_description(self) -> str:
        """The loss in words. Empty for the cross-entropy of tokens, which is described by how the model computes it."""
        return ""

    @property
    def heads(self) -> dict[str, int]:
        """Extra linear heads on the first token: name → number of outputs."""
        return {}

    @property
    def head_config(self) -> dict[str, Any]:
        """Values of the transformers configuration that the head needs: {"num_labels": 3}."""
        return {}

    def model_request(self, model: ModelConfig, block: int = 1, seed: int = 0) -> ModelRequest:
        """Return the request for a model for this objective. `model`: that section of the run file."""
        from artel.models.loading.request import ModelRequest

        request = ModelRequest(model, self.auto_class, self.heads, block, seed, self.head_config)
        if not (self.generates or "generate" in self.tasks):
            return request
        turn = self.turn_end()
        return replace(request, end_ids=turn.ids if turn is not None else frozenset({self.tokenizer.end_id}))

    def model_files(self, model: PreTrainedModel) -> dict[str, bytes]:
        """Return files for the model's folder that other libraries read, by their paths in it."""
        return {}

    def read_model_files(self, folder: Path) -> None:  # if there are such files
        """Read what `model_files` wrote from the folder of an opened model. Raises InputError."""

    def calibration(self) -> dict[str, Any]:
        """Return what the latest `metrics` chose for using the model (thresholds), as plain values; empty for most.

        Saved in checkpoints, so that a model keeps the values chosen for its own weights.
        """
        return {}

    def calibrate(self, values: dict[str, Any]) -> str:
        """Use the values chosen for this model from now on, and choose none again.

        Return a sentence for people about values that are missing; empty for most.
        """
        return ""

    def command(self, folder: str, samples: Samples | None) -> str:
        """Return a command that shows what the model of a finished run does.

        `folder`: the run's folder, quoted for a shell. `samples`: its training samples; None if they must not be shown.
        """
        return f"artel generate {folder} --prompt {shlex.quote(self.prompt(samples))}"

    def usage(self) -> str:
        """Return Python for the model card that runs `model` with transformers, `tokenizer` and `torch` only."""
        return f'inputs = tokenizer({in_python(self.prompt(None))}, return_tensors="pt")\nprint(model(**inputs).logits)'

    def prompt(self, samples: Samples | None) -> str:
        """Return a text to continue: the first of `validate.prompts`, or the first words of the training text."""
        if samples is None:
            return next(filter(None, self.config.validate_.prompts), "Once upon a time")
        if self.config.validate_.prompts:
            return self.config.validate_.prompts[0]
        ids = samples.read(0).ids[:_PROMPT_TOKENS]
        is_special = np.isin(ids, self.tokenizer.special_ids)
        parts = np.split(np.arange(len(ids)), np.flatnonzero(is_special))  # of several documents in a block
        words = " ".join(self.tokenizer.decode(ids[part[~is_special[part]]]) for part in parts).split()
        return " ".join(words[: min(_PROMPT_WORDS, max(1, len(words) - 1))])  # the last may be cut

    @abstractmethod
    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | Dropped]:
        """Yield the samples of each document, or why it has none."""

    def outputs_of(self, sample: Sample) -> np.ndarray | None:
        """Return the ids (tokens,) of a stored sample that the model learns to write; None if it learns all."""
        return None

    def dataset(self, split: StoreSplit) -> Samples:
        """Return a split of the store as this objective reads it: separate samples, or blocks of text."""
        return WholeSamples(split)

    def turn_end(self) -> TurnEnd | None:
        """Return what ends an assistant's turn; None for other texts than conversations."""
        return None

    def check_store(self, store: TokenStore) -> None:  # most objectives learn of every sample
        """Raise InputError if a run would learn nothing from its store, or not what it must. Called before use."""

    def min_evaluated(self, split: StoreSplit) -> int:
        """Return the minimum number of samples of a validation; fewer have no metrics."""
        return 1

    def notes(self, documents: Iterable[Document]) -> list[str]:
        """Return sentences for the user about the first documents, if what is learned of them may surprise."""
        return frame_notes(document.record for document in documents)

    def review(self, observed: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
        """Return sentences for the user about (origin, `DocumentSamples.observed`) of all kept documents.

        Raises InputError if nothing right can be learned from them.
        """
        return []

    def mismatch(self, records: Iterable[Record]) -> str:
        """Return why a model cannot be evaluated on records (different labels), or an empty string."""
        return ""

    def order(self, split: StoreSplit, samples: int) -> Order | BalancedOrder:
        """Return the order of the training samples."""
        return Order(samples, self.config.seed)

    def check(self, model: PreTrainedModel) -> None:  # most objectives fit every model of their class
        """Raise InputError if a model cannot compute this loss. Called before it is compiled or parallelized."""

    _planned_device: str | None = None
    """Type of the device a plan is made for; None outside of plans."""

    def plan_for(self, build: Callable[[], PreTrainedModel], device: str) -> None:
        """Lay out batches for a model on a device of this type. Plans call it in place of `check`.

        `build` returns the model on the meta device, with its attention for training. Checks that need weights are
        assumed to succeed.
        """
        self._planned_device = device

    def group_count(self, rows: int) -> int:
        """Return the number of groups of similar length for so many rows (`length_groups`)."""
        return group_count(rows, self.config, self._planned_device)

    def fit_statistics(self, split: StoreSplit) -> None:  # most objectives need none
        """Compute what the loss needs from the training split (class frequencies). Called before the first batch."""

    @abstractmethod
    def batch(self, rows: Rows) -> Batch:
        """Return the tensors of a micro-batch, on the CPU."""

    @abstractmethod
    def token_views(self, rows: Rows) -> list[TokenView]:
        """Return what the model reads and learns in the first row, without padding, for `artel data show`."""

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

    def predictions_file(self, outputs: np.ndarray, split: StoreSplit) -> Any:
        """Return the data set's official file of predictions as plain values; None if it has none."""
        return None

    def details(self, outputs: np.ndarray, split: StoreSplit) -> dict[str, Any]:
        """Return tables and matrices for the report that metrics leave out; empty for most objectives.

        `tables`: {title: [{column: text or number, …}, …]}; `matrices`: {title: {"labels": […], "counts": [[…], …]}},
        true labels down, predicted ones across.
        """
        return {}

    def generation_eval(self, model: PreTrainedModel, split: StoreSplit) -> GenerationEval | None:
        """Return what to generate for a split in an evaluation, and how to score it; None for most objectives."""
        return None

    def answers(self, model: PreTrainedModel, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return the model's answer to each input as plain values. `task` is one of `tasks`. Raises InputError."""
        raise NotImplementedError

    def default_sampling(self) -> Sampling:
        """Return the default sampling of its models."""
        from artel.models.generate import Sampling

        return Sampling()

    def sampling(self, **settings: Any) -> Sampling:
        """Return the default sampling with those `settings` that are not None."""
        return replace(self.default_sampling(), **{name: each for name, each in settings.items() if each is not None})

    def generation_prompt(self, model: PreTrainedModel, prompt: str) -> GenerationPrompt | None:
        """Return the ids that a model which `generates` continues; None if only `reply` can answer a prompt."""
        return None

    @abstractmethod
    def show(self, model: PreTrainedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
        """Yield the model's output for a prompt as it is generated."""

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        """Return what `artel generate` prints. `context` is empty unless the objective takes one."""
        return Reply(self.show(model, prompt, sampling))
