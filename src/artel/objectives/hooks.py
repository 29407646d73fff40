"""Optional hooks of an objective: few objectives override any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from artel.config import RunConfig
from artel.models.text_vectors import has_pooling_layer
from artel.objectives.length_groups import group_count

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.config import RewardTerm
    from artel.config.schema.engine import EngineConfig
    from artel.generation import GenerationPrompt
    from artel.generation.answers import SampledAnswer
    from artel.generation.generate import Sampling
    from artel.models.loading.heads import Head
    from artel.objectives.conversation.dialogue import Dialogue
    from artel.objectives.rollouts import Round, Segment
    from artel.objectives.types import AnswerPrompt, Batch
    from artel.text import Record
    from artel.tokens import Sample, StoreSplit, Tokenizer


class RecordHooks:
    """Hooks for objectives whose labels come from the records."""

    section: ClassVar[str]
    decided_by_records: ClassVar[tuple[str, ...]] = ()
    """Keys of the section whose `auto` is decided from the records before tokenization: labels."""

    @classmethod
    def undecided(cls, config: RunConfig) -> list[str]:
        """Return the keys of `decided_by_records` that the run leaves at auto."""
        return [key for key in cls.decided_by_records if getattr(getattr(config, cls.section), key) == "auto"]

    @classmethod
    def decide(cls, config: RunConfig, records: Iterable[Record]) -> dict[str, Any]:
        """Return values for the `undecided` keys. `records`: all kept records, except those of a validation file.

        Raise InputError if the records do not determine a value.
        """
        raise NotImplementedError

    @classmethod
    def has_classes(cls, config: RunConfig) -> bool:
        """True if the records have labels. Validation then holds out a fraction per label."""
        return False

    def review(self, observed: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
        """Return notes for the user about (origin, `DocumentSamples.observed`) of all kept documents.

        Raise InputError if training on them would be wrong.
        """
        return []

    def mismatch(self, records: Iterable[Record]) -> str:
        """Return the reason why a model cannot be evaluated on records (different labels), or an empty string."""
        return ""


class ModelHooks:
    """Hooks for heads, files and settings of a model beside its weights, and for pretrained models."""

    auto_class: ClassVar[str]
    config: RunConfig

    @classmethod
    def claims(cls, architecture: str, folder: str) -> bool:
        """True if this objective fits a pretrained model, judged by the class that saved it.

        `folder` is a folder or a hub id. The first objective in the registry that claims a model gets it.
        """
        return architecture.endswith(cls.auto_class.removeprefix("AutoModel")) and not has_pooling_layer(folder)

    @classmethod
    def run_values(cls, model_config: PreTrainedConfig, folder: str) -> dict[str, Any]:
        """Return keys of the run file that fit a pretrained model: {"classification": {…}}."""
        return {}

    @classmethod
    def default_tokenizer(cls, config: RunConfig) -> tuple[str, str] | None:
        """Return (run-file key, folder or hub id) of the tokenizer if neither `tokenizer` nor `model` gives one.

        None: a tokenizer is trained.
        """
        return None

    @property
    def heads(self) -> Mapping[str, Head]:
        """Modules trained beside the model's own: name → outputs of a linear layer, or a function that builds it.

        Each is an attribute of the model, and is sharded, saved and loaded with it. The function takes the transformers
        configuration.
        """
        return {}

    @property
    def head_config(self) -> dict[str, Any]:
        """Values of the transformers configuration that the head needs: {"num_labels": 3}."""
        return {}

    def model_files(self, model: PreTrainedModel) -> dict[str, bytes]:
        """Return files for the model's folder that other libraries read, by their paths in it."""
        return {}

    def read_model_files(self, folder: Path) -> None:  # if it has such files
        """Read the files of `model_files` from the folder of an opened model.

        Raise InputError if a file is damaged or does not fit this objective.
        """

    def calibration(self) -> dict[str, Any]:
        """Return the values that the latest `metrics` chose for inference (thresholds); empty for most objectives.

        They are saved in checkpoints: a model keeps the values chosen for its own weights.
        """
        return {}

    def calibrate(self, values: dict[str, Any]) -> str:
        """Use the values chosen for this model, and never choose others.

        Return a note for the user about missing values; empty for most objectives.
        """
        return ""

    _planned_device: str | None = None
    """Type of the device a plan is made for; None outside of plans."""

    def plan_for(self, build: Callable[[], PreTrainedModel], device: str) -> None:
        """Prepare batches for a model on a device of this type. Plans call it in place of `check`.

        `build` returns the model on the meta device, with its attention for training. Checks that need weights are
        assumed to succeed.
        """
        self._planned_device = device

    def group_count(self, rows: int) -> int:
        """Return the number of groups of similar length for a number of rows (`length_groups`)."""
        return group_count(rows, self.config, self._planned_device)


class EvaluationHooks:
    """Hooks for metrics that need more than sums: numbers of every sample."""

    document_number: ClassVar[int | None] = None
    """The column of a sample's numbers for the number of its document in the split, filled in by the store."""
    samples_with_outputs: int | None = None
    """Number of samples that have outputs, from the first; None for all."""
    has_many_outputs: ClassVar[bool] = False
    """True if there are many outputs: `metrics` then gets them in float32 instead of float64."""

    def training_metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Return metrics of a logged line in addition to the loss, from totals of the sums since the last line."""
        return {}

    def min_evaluated(self, split: StoreSplit) -> int:
        """Return the minimum number of samples in a validation. Fewer samples yield no metrics."""
        return 1

    def predictions_file(self, outputs: np.ndarray, split: StoreSplit) -> Any:
        """Return the dataset's official file of predictions as values for JSON; None if it has none."""
        return None

    def details(self, outputs: np.ndarray, split: StoreSplit) -> dict[str, Any]:
        """Return tables and matrices for the report in addition to metrics; empty for most objectives.

        `tables`: {title: [{column: text or number, …}, …]}; `matrices`: {title: {"labels": […], "counts": [[…], …]}},
        true labels down, predicted ones across.
        """
        return {}


class GlobalBatchHooks:
    """Hooks for losses that are not sums over samples. Most objectives need none of them."""

    needs_global_statistics: bool = False
    """True if the loss depends on sums over the whole global batch."""

    def batch_statistics(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return sums over a micro-batch, float32 (any,), without gradient. Only if `needs_global_statistics`."""
        raise NotImplementedError

    def set_global_statistics(self, totals: list[float]) -> None:  # if `needs_global_statistics`
        """Take the sums of `batch_statistics` over the global batch. Called before its first `loss`."""

    needs_global_outputs: bool = False
    """True if the loss depends on the model's outputs for all samples of the global batch, such as text vectors.

    A strategy then computes `batch_outputs` of every micro-batch on all ranks and their `global_loss`. It
    backpropagates from the gradients of the outputs to the weights. `loss` is then the loss of a single micro-batch.
    """

    def batch_outputs(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the inputs of `global_loss`, float32 (rows, size), with gradient."""
        raise NotImplementedError

    def output_keys(self, batch: Batch) -> torch.Tensor:
        """Return the data of the samples that `global_loss` needs beside the outputs, int64 (any, columns)."""
        raise NotImplementedError

    def global_loss(self, outputs: torch.Tensor, keys: torch.Tensor, micro_batch: slice) -> torch.Tensor:
        """Return the sums of `loss` over the targets in the rows `micro_batch`.

        `outputs` and `keys` are those of all micro-batches of the global batch, concatenated.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model that the loss learns from beside the data."""

    model: str
    """Folder or hub id of the model."""
    settings: dict[str, Any] | None
    """Settings that its outputs depend on, beside store and weights. Outputs are computed before training and cached.
    None: the teacher stays in memory during training."""
    bytes_per_target: int = 0
    """Bytes of the cached outputs for each target."""
    reads_text: bool = False
    """True if it reads the text of the samples with its own tokenizer. Its outputs then depend on that tokenizer."""
    is_initial_model: bool = False
    """True if it is the run's own model before training, as the section `model` builds it."""


class CachedOutputs(Protocol):
    """A teacher's cached outputs for the samples of a split, as `outputs_to_cache` returned them."""

    @property
    def folder(self) -> Path: ...

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """Return the arrays of a sample of the objective's dataset, (targets of the sample, …) each."""
        ...


TeacherCall = Callable[[Callable[["PreTrainedModel"], "torch.Tensor"]], "torch.Tensor"]
"""Call a function with the teacher, whose weights are present while it runs. Collective: all ranks must call it."""


class TeacherHooks:
    """Hooks for losses that use a teacher or a reference model. Most objectives need none of them."""

    needs_reference: bool = False
    """True if the loss compares with the model before training. `evaluate_batch` then runs once over both splits
    before the first step, and `set_reference` gets its outputs."""

    def set_reference(self, outputs: np.ndarray, *, validation: bool) -> None:  # if `needs_reference`
        """Take the outputs (samples, len(outputs)) of the model before training for one split."""

    @property
    def teacher(self) -> Teacher | None:
        """The model that the loss learns from; None if there is none."""
        return None

    def check_teacher(self, tokenizer: Tokenizer) -> None:  # if there is a `teacher`
        """Raise InputError if a teacher with this tokenizer cannot teach."""

    def alignment_note(self, aligned: float) -> str:
        """Return a note for the user about a teacher with its own tokenizer; empty for other teachers.

        `aligned`: fraction of targets that the teacher has, too. Raise InputError if it is too small.
        """
        return ""

    def set_teacher(self, call: TeacherCall, model_config: PreTrainedConfig) -> None:  # if it stays in memory
        """Take the function that calls the teacher, and the teacher's configuration."""

    def outputs_to_cache(
        self, model: PreTrainedModel, batch: Batch
    ) -> tuple[torch.Tensor, np.ndarray, dict[str, np.ndarray]]:
        """Return a teacher's outputs for a batch, to be cached.

        Returns: (sums of its cross-entropy, of targets and of correct guesses, float64 (3,); targets per row, int64
        (rows,); arrays (targets, …) of all rows, concatenated).
        """
        raise NotImplementedError

    def set_cached_outputs(self, outputs: CachedOutputs, *, validation: bool) -> None:  # if the `teacher` has settings
        """Take the cached outputs of the training or validation split."""


class AnswerHooks:
    """Hooks for objectives whose validation can be scored by rewards (`validate.rewards`)."""

    has_answers: ClassVar[bool] = False
    """True if the models answer prompts of the validation split."""

    def answer_prompts(self, split: StoreSplit, limit: int) -> tuple[list[AnswerPrompt], int]:  # if it `has_answers`
        """Return the prompts of the first records of a split, at most `limit`, and the number of skipped records."""
        raise NotImplementedError

    def generated_answers(self, model: PreTrainedModel, outputs: np.ndarray) -> list[SampledAnswer] | None:
        """Return the answers to the first prompts if `evaluate_batch` generates them: its outputs contain their ids.

        None if it does not. The answers are then generated from the ids of the prompts.
        """
        return None


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """Settings for writing and scoring answers, for an objective that learns from them."""

    steps: int
    """Optimizer steps that learn from a round."""
    answers: int
    """Answers per prompt."""
    sampling: Sampling
    rewards: list[RewardTerm]
    """Empty if answers are not scored."""
    resample: int = 0
    """Maximum number of times that a prompt's answers are replaced if they have no signal."""
    reward_seconds: float = 0.0
    """Time limit of a reward function."""
    reward_bytes: int = 0
    """Memory limit of a process that computes rewards."""
    turns: int = 1
    """Maximum number of replies in an answer."""
    tools: str | None = None
    """File with functions that the model may call."""
    environment: str | None = None
    """Class that answers replies: FILE.py:CLASS or MODULE:CLASS."""
    engine: EngineConfig | None = None
    """Server that writes the answers; None: the processes of the run do."""
    penalty: Callable[[int], float] | None = None
    """Returns the penalty of an answer for its number of tokens. It is added to the rewards that are learned from."""
    fraction: float = 1.0
    """Fraction of the samples that are answered. The others are learned as they are stored."""

    @property
    def is_scored(self) -> bool:
        """True if answers get a reward."""
        return bool(self.rewards) or self.environment is not None


class RoundHooks:
    """Hooks for objectives that learn from answers of the model itself, in rounds (`training/rounds.py`)."""

    scores_answers: ClassVar[bool] = False
    """True if its metrics are rewards of answers, which can evaluate any model with the same head."""

    @property
    def rounds(self) -> RoundSettings | None:
        """The settings of its rounds; None if it learns from stored samples."""
        return None

    def round_prompt_ids(self, sample: Sample) -> list[int]:
        """Return the ids of a stored sample that the model answers; [] if it cannot be answered."""
        ids: list[int] = sample.ids.tolist()
        return ids

    def assume_answer_length(self, tokens: int | None) -> None:  # if its `rounds` are scored
        """Give prompts without a round answers of this length in batches; None: of the maximum length. For plans."""
        raise NotImplementedError

    def round_prompt(self, model: PreTrainedModel, ids: list[int]) -> GenerationPrompt:  # if it has `rounds`
        """Return the prompt that the model answers, from its ids."""
        raise NotImplementedError

    def dialogue(self, reference: Mapping[str, Any]) -> Dialogue | None:
        """Return the conversation of an answer, from the reference of its prompt. None: an answer is one reply."""
        return None

    def answer_log_probs(  # if its `rounds` have an `engine`
        self, model: PreTrainedModel, answers: Sequence[Sequence[Segment]], device: torch.device
    ) -> list[list[float]]:
        """Return the log-probabilities of the ids that the model wrote in each segment of the answers to a prompt."""
        raise NotImplementedError

    def set_round(self, round_: Round, *, is_fresh: bool, seconds: Mapping[str, float]) -> None:  # if it has `rounds`
        """Learn from this round from now on.

        `is_fresh`: True in the round's first step, before the model has moved away from the one that wrote. `seconds`:
        time spent on writing and scoring it, if this start of the run did.
        """
        raise NotImplementedError
