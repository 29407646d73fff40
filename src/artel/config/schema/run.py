"""The sections of a run file, each key with its type, its default and one line of help.

`artel config explain` prints this file's descriptions, `artel config schema` its JSON schema. A key marked
`shapes_result=False` can change between two starts of the same run without changing what comes out (within float
tolerance); all others are compared when a run resumes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from artel.config.schema.base import Name, OneOrMore, OnOrOff, Section, free
from artel.config.schema.data import DataConfig
from artel.config.schema.distill import DistillConfig
from artel.config.schema.encoders import ClassificationConfig, EmbeddingConfig, RerankConfig, RewardConfig, TokensConfig
from artel.config.schema.model import ModelConfig
from artel.config.schema.objectives import ChatConfig, MaskedConfig, PreferenceConfig, Seq2SeqConfig, SpanQAConfig
from artel.config.schema.prepare import PrepareConfig
from artel.config.schema.quantities import (
    Count,
    Interval,
    Length,
    Number,
    ProcessCount,
    Rate,
    Samples,
    Seconds,
    Seed,
    Threads,
    Warmup,
)
from artel.config.schema.registered import (
    CallbackName,
    NamingSection,
    ObjectiveName,
    OptimizerName,
    ScheduleName,
    StrategyName,
    TrackerName,
)
from artel.config.schema.tokenizer import TokenizerConfig
from artel.messages import logger
from artel.plugins import load_plugin
from artel.registry import CALLBACKS, OBJECTIVES, OPTIMIZERS, SCHEDULES, STRATEGIES, TRACKERS
from artel.secrets import hide_secrets


class ClipConfig(Section):
    by: Literal["norm", "value"] = Field(
        default="norm",
        description="norm: scale all gradients down together; value: clip each element on its own.",
    )
    limit: Number = Field(default=1.0, gt=0, description="Maximum norm, or maximum absolute value of an element.")

    @model_serializer(mode="wrap")
    def _as_number(self, handler: SerializerFunctionWrapHandler) -> Any:
        return self.limit if self.by == "norm" else handler(self)


Clip = Annotated[
    ClipConfig | None,
    BeforeValidator(
        lambda value: {"limit": value} if isinstance(value, int | float | str) else value,
        json_schema_input_type=Annotated[Number, Field(gt=0)] | ClipConfig | None,
    ),
]


class TrainConfig(NamingSection):
    registries: ClassVar = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}
    epochs: Number | None = Field(
        default=None, gt=0, description="Length of the run in epochs (1 if none of the four is set)."
    )
    steps: Count | None = Field(default=None, ge=1, description="Length of the run in steps.")
    tokens: Count | None = Field(default=None, ge=1, description="Length of the run in tokens.")
    budget: Seconds | None = Field(
        default=None,
        description="Length of the run as a time, 30min or 2h: from loading the model to its last save. The schedule "
        "goes by the time that has passed.",
    )
    batch: Samples = Field(default=64, ge=1, description="Blocks in a global batch: what one optimizer step sees.")
    micro_batch: Literal["auto"] | Samples = free(
        "auto", "Blocks that one process runs at a time; gradients are accumulated over the rest of its share."
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = free(
        "auto",
        "Activations recomputed in the backward pass instead of stored: none; selective (all but matrix products and "
        "attention); full (all within a layer); auto: as much as memory asks for.",
    )
    optimizer: OptimizerName = Field(default="adamw", description="What turns gradients into steps of the weights.")
    learning_rate: Rate = Field(default=5e-5, gt=0, description="Peak learning rate.")
    muon_learning_rate: Rate = Field(
        default=0.02, gt=0, description="muon: peak learning rate of the layers' matrices."
    )
    betas: list[Annotated[Number, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.95], min_length=2, max_length=2, description="adamw: decay of its two averages."
    )
    epsilon: Number = Field(default=1e-8, gt=0, description="adamw: added to the denominator.")
    momentum: Number = Field(default=0.0, ge=0, lt=1, description="sgd: momentum.")
    weight_decay: Number = Field(default=0.1, ge=0, description="Decoupled weight decay; never on biases and norms.")
    layer_decay: Number = Field(
        default=1.0, gt=0, le=1, description="Each layer's learning rate is the next one's times this; 1: all alike."
    )
    schedule: ScheduleName = Field(
        default="cosine",
        description="Learning rate after warmup; wsd, which a budget chooses, is warmup, stable, then a linear decay.",
    )
    warmup: Warmup = Field(default=Warmup(fraction=0.01), description="Steps, or a fraction of the run when below 1.")
    decay: Number = Field(default=0.2, gt=0, le=1, description="wsd: fraction of the run that decays at its end.")
    minimum_learning_rate: Number = Field(
        default=0.0, ge=0, le=1, description="Floor of the schedule as a fraction of the peak."
    )
    clip: Clip = Field(default=ClipConfig(), description="A number: the maximum gradient norm; null: no clipping.")
    ema: Number | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Keep an exponential moving average of the weights, with this decay: 0.999. It is what is "
        "validated, and what RUN/model and exports hold.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        default="auto",
        description="What layers compute in: auto is bf16 where the device multiplies it natively, else fp32; fp16 "
        "scales the loss; fp8 (extra `fp8`) where the device has it.",
    )
    weights: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="What weights are held in; bf16 takes half, and their steps are rounded stochastically.",
    )
    compile: Annotated[Literal["auto", "on", "off"], OnOrOff] = Field(
        default="auto", description="torch.compile of each layer."
    )
    threads: Threads | None = free(None, "CPU threads of each process; auto when null.", ge=1)
    on_bad_step: Literal["stop", "skip", "rewind"] = free(
        "stop",
        "When a step's loss or gradient is NaN, infinite or a spike: stop; skip (the step changes nothing); rewind "
        "(back to the last checkpoint's weights; what was seen since is not seen again).",
    )
    spike: Number | None = free(
        None, "A loss above so many times the mean of the 100 steps before is a spike; null: none is.", gt=1
    )
    hang_timeout: Seconds | None = free(
        1800.0, "A process without progress for this long writes its stacks to a file and ends; null: never."
    )

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        lengths = [name for name in ("epochs", "steps", "tokens", "budget") if getattr(self, name) is not None]
        if len(lengths) > 1:
            raise ValueError(f"{' and '.join(lengths)} are given together; keep one")
        return self

    @model_validator(mode="before")
    @classmethod
    def _schedule_of_a_budget(cls, section: object) -> object:
        """A run on a budget stays at its peak rate until the decay at its end, unless a schedule is named."""
        if isinstance(section, dict) and section.get("budget") is not None and "schedule" not in section:
            return section | {"schedule": "wsd"}
        return section


class ValidateConfig(Section):
    every: Interval = free(Interval(epochs=1), "How often: 500 (steps), 1 epoch, 30min, never. The end always counts.")
    blocks: Count | None = free(None, "At most this many validation blocks; all when null.", ge=1)
    prompts: list[str] = free(
        [],
        "Texts that the model continues (masked: whose masks it fills) before the first step and at each validation; "
        "kept in samples.jsonl.",
    )
    new_tokens: Length = free(60, "Tokens written for each prompt.", ge=1)
    tasks: list[Name] = free(
        [],
        "Tasks of lm-evaluation-harness (piqa), or YAML files of your own (counting.yaml), whose metrics join the "
        "curves. Needs artel-lm[tasks].",
    )
    tasks_every: Interval = free(
        Interval(epochs=1), "How often the tasks are asked, as `every`. The end always counts."
    )
    tasks_limit: Count | None = free(None, "Examples of each task at most; all when null.", ge=1)
    patience: Count | None = Field(
        default=None,
        ge=1,
        description="Stop after so many validations, or rounds of tasks, without a better checkpoint.best; "
        "RUN/model is the best.",
    )


def _without_threads(value: object) -> object:
    """torch.nn.DataParallel, one process with many threads, becomes ddp, a process for each device."""
    if isinstance(value, str) and value.lower().replace("_", "") in ("dp", "dataparallel"):
        logger.warning("parallel.data: %s is run as ddp, a process for each device", value)
        return "ddp"
    return value


class ParallelConfig(NamingSection):
    registries: ClassVar = {"data": STRATEGIES}
    data: Annotated[StrategyName | ProcessCount, BeforeValidator(_without_threads)] = free(
        "auto",
        "How processes share each global batch: ddp (each holds the whole model); zero1, zero2, fsdp (they share the "
        "optimizer's state, also the gradients, also the weights); hsdp (fsdp within a host, copies across). A number: "
        "so many processes. auto: ddp where the model fits.",
    )
    shard: Literal["auto"] | ProcessCount = free(
        "auto", "hsdp: processes that share one copy; auto: those of one host."
    )
    tensor: ProcessCount = free(1, "Processes that share each layer's matrices.", ge=1)
    sequence: bool = free(False, "tensor: share what is between the matrices too, by parts of the sequence.")
    pipeline: ProcessCount = free(1, "Processes that share the layers, one stage after another.", ge=1)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "sequential"] = free(
        "1f1b", "pipeline: in which order stages run micro-batches; sequential: one stage at a time."
    )
    context: ProcessCount = free(1, "Processes that share each sequence.", ge=1)
    exchange: Literal["auto", "gather", "ulysses", "ring"] = free(
        "auto", "context: keys and values of all are gathered; heads are exchanged for parts; or parts go round."
    )
    expert: ProcessCount = free(
        1, "Processes that share the experts of each layer; of those that share the batch.", ge=1
    )
    offload: Literal["none", "cpu", "pinned"] = free(
        "none", "zero1, zero2, fsdp, hsdp: weights and optimizer state in host memory; pinned: copied faster."
    )
    deepspeed: Name | None = free(None, "A DeepSpeed configuration (JSON); it then splits and steps.")

    @property
    def processes(self) -> int:
        """The number of processes that these sizes need, at least; exactly where `data` is a number."""
        data_parallel = self.data if isinstance(self.data, int) else self.expert
        return data_parallel * self.tensor * self.pipeline * self.context


class CheckpointConfig(Section):
    every: Interval = free(
        Interval(seconds=1800), "How often: 1500 (steps), 1 epoch, 30min, never. The end always counts."
    )
    keep: Count = free(3, "How many of the newest are kept, beside the best.", ge=1)
    copy_to: Name | None = free(
        None, "s3://BUCKET/PREFIX: checkpoints are copied there, and fetched where the run's folder has none as new."
    )
    asynchronous: bool = free(True, "Written during training, from a copy in host memory where there is room.")
    best: str | None = free(
        "loss", "The metric that chooses `best`: any of the objective's, or TASK/METRIC of validate.tasks; null: none."
    )

    @field_validator("copy_to")
    @classmethod
    def _on_s3(cls, address: str | None) -> str | None:
        if address is not None and re.fullmatch(r"s3://[^/]+/.*[^/]", address) is None:
            raise ValueError(f"{address!r} is not a place for copies; write s3://BUCKET/PREFIX")
        return address


class LogConfig(Section):
    every: Count = free(10, "Steps between two lines of metrics.jsonl.", ge=1)


class Places(dict[tuple[str | int, ...], str]):
    """The `file:line` of each key of a run file. It does not count when two runs are compared."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places)


class RunConfig(NamingSection):
    """A run file as an object. Its sections, in `artel.config`, have the keys of `artel config explain`."""

    registries: ClassVar = {"objective": OBJECTIVES, "callbacks": CALLBACKS, "track": TRACKERS}
    _places: Places = PrivateAttr(default_factory=Places)
    plugins: Annotated[list[Annotated[str, AfterValidator(load_plugin)]], OneOrMore] = free(
        [],
        "Modules of your own (package.module), which register formats, objectives, optimizers, schedules, trackers, "
        "exporters or callbacks: they are imported, and may do all that you can.",
    )
    run: Name = free("", "Folder of this run: everything it writes goes here. By default runs/NAME-OF-RUN-FILE.")
    seed: Seed = Field(default=42, ge=0, description="Fixes order, initial weights and dropout.")
    data: DataConfig = Field(default=DataConfig(), description="The text: sources, cleaning, split, blocks.")
    prepare: PrepareConfig = free(PrepareConfig(), "Where and by how many processes the text is prepared.")
    tokenizer: TokenizerConfig = Field(
        default=TokenizerConfig(),
        description="Trained or loaded; by default that of model.from, or one is trained.",
    )
    model: ModelConfig = Field(default=ModelConfig(), description="From scratch or pretrained; by default a GPT-2.")
    objective: ObjectiveName = Field(
        default="causal",
        description="What is learned: the next token; masked tokens (or pairs); answers within documents; the "
        "assistant's turns of conversations; the better of two answers; labels of texts, or a number; a score for an "
        "answer, or for a query and a document; vectors of texts; names in texts, or tags of words; "
        "a text written for another; what a teacher says.",
    )
    masked: MaskedConfig = Field(default=MaskedConfig(), description="objective masked: what is hidden.")
    span_qa: SpanQAConfig = Field(
        default=SpanQAConfig(), description="objective span_qa: windows, heads, losses, prediction."
    )
    chat: ChatConfig = Field(
        default=ChatConfig(), description="objectives chat, preference and reward: how conversations are written."
    )
    preference: PreferenceConfig = Field(default=PreferenceConfig(), description="objective preference: the loss.")
    classification: ClassificationConfig = Field(
        default=ClassificationConfig(), description="objective classification: labels, loss, long texts."
    )
    reward: RewardConfig = Field(default=RewardConfig(), description="objective reward: the loss.")
    rerank: RerankConfig = Field(
        default=RerankConfig(), description="objective rerank: the loss, and documents beside those that match."
    )
    embedding: EmbeddingConfig = Field(
        default=EmbeddingConfig(), description="objective embedding: the loss, what a text's vector is, prompts."
    )
    tokens: TokensConfig = Field(
        default=TokensConfig(), description="objective tokens: labels of names or words, their tags, windows."
    )
    distill: DistillConfig = Field(
        default=DistillConfig(), description="objective distill: the teacher, and what is learned of it."
    )
    seq2seq: Seq2SeqConfig = Field(
        default=Seq2SeqConfig(), description="objective seq2seq: what is put before inputs, long texts, writing."
    )
    train: TrainConfig = Field(default=TrainConfig(), description="Length, batch, optimizer, schedule, precision.")
    validate_: ValidateConfig = Field(
        default=ValidateConfig(), alias="validate", description="When and how the model is evaluated."
    )
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="How the run is spread over processes.")
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="When the run is saved and what is kept."
    )
    log: LogConfig = Field(default=LogConfig(), description="How often metrics are logged.")
    callbacks: list[CallbackName] = free([], "Callbacks of your plugins, by name: called after every step.")
    profile: bool = free(False, "Write where the time of a few steps goes: RUN/profile, a table and a Chrome trace.")
    track: list[TrackerName] = free(["console", "jsonl"], "Where metrics go; all but the first two are extras.")

    @field_validator("run")
    @classmethod
    def _on_a_disk(cls, folder: str) -> str:
        if "://" in folder:
            raise ValueError(
                f"{folder!r} is no folder; write one of a disk, and checkpoint.copy_to: s3://BUCKET/PREFIX"
            )
        return folder

    def to_yaml(self) -> str:
        """The keys that were set, as a run file has them; secrets in addresses are ***: write ${NAME} for them."""
        tree = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return yaml.safe_dump(hide_secrets(tree), sort_keys=False, allow_unicode=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_yaml` to a file, for the command `artel`. A file that is there is replaced."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")
