"""The sections of a run file, each key with its type, its default and one line of help.

`artel config explain` prints this file's descriptions, `artel config schema` its JSON schema. A key marked
`shapes_result=False` can change between two starts of the same run without changing the result (within float
tolerance); all other keys are compared when a run resumes.
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

from artel.config.schema.base import Name, OneOrMore, OnOrOff, Section, runtime_only
from artel.config.schema.data import DataConfig
from artel.config.schema.distill import DistillConfig
from artel.config.schema.encoders import ClassificationConfig, EmbeddingConfig, RerankConfig, RewardConfig, TokensConfig
from artel.config.schema.launch import LaunchConfig
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
from artel.config.schema.rewards import RewardTerm
from artel.config.schema.tokenizer import TokenizerConfig
from artel.messages import logger
from artel.plugins import load_plugin
from artel.registry import CALLBACKS, OBJECTIVES, OPTIMIZERS, SCHEDULES, STRATEGIES, TRACKERS
from artel.secrets import hide_secrets


class ClipConfig(Section):
    by: Literal["norm", "value"] = Field(
        default="norm", description="norm: scale all gradients down together; value: clip each element separately."
    )
    limit: Number = Field(default=1.0, gt=0, description="Maximum norm, or maximum absolute value of an element.")

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> Any:
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
        description="Length of the run as a time, e.g. 30min or 2h, from loading the model to its last save. The "
        "schedule follows the elapsed time.",
    )
    batch: Samples = Field(default=64, ge=1, description="Blocks per global batch, i.e. per optimizer step.")
    micro_batch: Literal["auto"] | Samples = runtime_only(
        "auto", "Blocks per process and forward pass; gradients are accumulated to the global batch."
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = runtime_only(
        "auto",
        "Activations to recompute in the backward pass instead of storing them: none; selective (all except matrix "
        "products and attention); full (all within a layer); auto: as much as memory requires.",
    )
    optimizer: OptimizerName = Field(default="adamw", description="Optimizer.")
    learning_rate: Rate = Field(default=5e-5, gt=0, description="Peak learning rate.")
    muon_learning_rate: Rate = Field(
        default=0.02, gt=0, description="muon: peak learning rate of the layers' matrices."
    )
    betas: list[Annotated[Number, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.95], min_length=2, max_length=2, description="adamw: decay rates of the two moment estimates."
    )
    epsilon: Number = Field(default=1e-8, gt=0, description="adamw: added to the denominator.")
    momentum: Number = Field(default=0.0, ge=0, lt=1, description="sgd: momentum.")
    weight_decay: Number = Field(
        default=0.1, ge=0, description="Decoupled weight decay; not applied to biases and norms."
    )
    layer_decay: Number = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Each layer's learning rate as a fraction of the next layer's; 1: equal rates.",
    )
    schedule: ScheduleName = Field(
        default="cosine",
        description="Learning rate after warmup; wsd (default with budget) is warmup, stable, then a linear decay.",
    )
    warmup: Warmup = Field(
        default=Warmup(fraction=0.01), description="Warmup in steps, or as a fraction of the run if below 1."
    )
    decay: Number = Field(default=0.2, gt=0, le=1, description="wsd: fraction of the run for the final decay.")
    minimum_learning_rate: Number = Field(
        default=0.0, ge=0, le=1, description="Floor of the schedule as a fraction of the peak."
    )
    clip: Clip = Field(
        default=ClipConfig(), description="Gradient clipping; a number is the maximum norm, null disables it."
    )
    ema: Number | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Decay of an exponential moving average of the weights, e.g. 0.999. Validation, RUN/model and "
        "exports use the average.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        default="auto",
        description="Dtype of computation. auto: bf16 if the device supports it natively, otherwise fp32; fp16 scales "
        "the loss; fp8 (extra `fp8`) needs a device that supports it.",
    )
    weights: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Dtype of the weights; bf16 halves their memory and rounds updates stochastically."
    )
    compile: Annotated[Literal["auto", "on", "off"], OnOrOff] = Field(
        default="auto", description="Use of torch.compile on each layer."
    )
    threads: Threads | None = runtime_only(None, "CPU threads per process (null: automatic).", ge=1)
    on_bad_step: Literal["stop", "skip", "rewind"] = runtime_only(
        "stop",
        "Action if the loss or gradient of a step is NaN, infinite or a spike: stop; skip the step; or rewind to the "
        "weights of the last checkpoint without repeating the data seen since.",
    )
    spike: Number | None = runtime_only(
        None, "Loss of a spike as a multiple of the mean of the previous 100 steps; null: no spikes.", gt=1
    )
    hang_timeout: Seconds | None = runtime_only(
        1800.0, "Time without progress after which a process writes its stacks to a file and exits; null: never."
    )

    @model_validator(mode="after")
    def _check_length(self) -> TrainConfig:
        lengths = [name for name in ("epochs", "steps", "tokens", "budget") if getattr(self, name) is not None]
        if len(lengths) > 1:
            raise ValueError(f"{' and '.join(lengths)} cannot be combined; keep one")
        return self

    @model_validator(mode="before")
    @classmethod
    def _default_to_wsd(cls, section: object) -> object:
        """Use wsd for a run with a budget, unless a schedule is set."""
        if isinstance(section, dict) and section.get("budget") is not None and "schedule" not in section:
            return section | {"schedule": "wsd"}
        return section


class ValidateConfig(Section):
    every: Interval = runtime_only(
        Interval(epochs=1), "Interval of validation: 500 (steps), 1 epoch, 30min or never. The end is always validated."
    )
    blocks: Count | None = runtime_only(None, "Maximum validation blocks (null: all).", ge=1)
    prompts: list[str] = runtime_only(
        [],
        "Texts that the model continues (masked: whose masks it fills) before the first step and at each validation; "
        "saved in samples.jsonl.",
    )
    new_tokens: Length = runtime_only(60, "Tokens to generate per prompt.", ge=1)
    rewards: list[RewardTerm] = runtime_only(
        [],
        "chat, seq2seq, policy: rewards of answers to validation prompts, as in policy.rewards. The mean is the "
        "metric reward.",
    )
    answers: Count = runtime_only(200, "rewards: maximum number of validation prompts that the model answers.", ge=1)
    tasks: list[Name] = runtime_only(
        [],
        "Tasks of lm-evaluation-harness (e.g. piqa) or custom YAML files (e.g. counting.yaml) whose metrics are logged "
        "with the others. Needs artel-lm[tasks].",
    )
    tasks_every: Interval = runtime_only(
        Interval(epochs=1), "Interval of the tasks, like `every`. They always run at the end."
    )
    tasks_limit: Count | None = runtime_only(None, "Maximum examples per task (null: all).", ge=1)
    patience: Count | None = Field(
        default=None,
        ge=1,
        description="Number of validations, or runs of the tasks, without improvement of checkpoint.best after which "
        "to stop; RUN/model is then the best checkpoint.",
    )


def _replace_data_parallel(value: object) -> object:
    """Replace torch.nn.DataParallel (one process with several threads) by ddp (one process per device)."""
    if isinstance(value, str) and value.lower().replace("_", "") in ("dp", "dataparallel"):
        logger.warning("parallel.data: %s is run as ddp, a process for each device", value)
        return "ddp"
    return value


class ParallelConfig(NamingSection):
    registries: ClassVar = {"data": STRATEGIES}
    data: Annotated[StrategyName | ProcessCount, BeforeValidator(_replace_data_parallel)] = runtime_only(
        "auto",
        "Data parallelism: ddp (each process has the full model); zero1, zero2, fsdp (shard the optimizer state; also "
        "gradients; also weights); hsdp (fsdp within a host, replicas across hosts). A number sets the number of "
        "processes. auto: ddp if the model fits.",
    )
    shard: Literal["auto"] | ProcessCount = runtime_only(
        "auto", "hsdp: processes per replica; auto: the processes of one host."
    )
    tensor: ProcessCount = runtime_only(
        1, "Tensor parallelism: number of processes that shard each layer's matrices.", ge=1
    )
    sequence: bool = runtime_only(False, "tensor: also shard the activations between the matrices along the sequence.")
    pipeline: ProcessCount = runtime_only(1, "Pipeline parallelism: number of stages.", ge=1)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "sequential"] = runtime_only(
        "1f1b", "pipeline: schedule of micro-batches; sequential runs one stage at a time."
    )
    context: ProcessCount = runtime_only(1, "Context parallelism: number of processes that shard each sequence.", ge=1)
    exchange: Literal["auto", "gather", "ulysses", "ring"] = runtime_only(
        "auto", "context: method: gather all keys and values, exchange heads for chunks (ulysses), or ring attention."
    )
    expert: ProcessCount = runtime_only(
        1, "Expert parallelism: number of data-parallel processes that shard the experts of each layer.", ge=1
    )
    offload: Literal["none", "cpu", "pinned"] = runtime_only(
        "none", "zero1, zero2, fsdp, hsdp: keep weights and optimizer state in host memory; pinned: faster copies."
    )
    deepspeed: Name | None = runtime_only(
        None, "DeepSpeed configuration (JSON); DeepSpeed then shards and steps the model."
    )

    @property
    def processes(self) -> int:
        """Number of processes that these sizes require: exact if `data` is a number, otherwise the minimum."""
        data_parallel = self.data if isinstance(self.data, int) else self.expert
        return data_parallel * self.tensor * self.pipeline * self.context


class CheckpointConfig(Section):
    every: Interval = runtime_only(
        Interval(seconds=1800),
        "Interval of checkpoints: 1500 (steps), 1 epoch, 30min or never. The end is always saved.",
    )
    keep: Count = runtime_only(3, "Number of newest checkpoints to keep, besides the best.", ge=1)
    copy_to: Name | None = runtime_only(
        None, "s3://BUCKET/PREFIX to copy checkpoints to, and to fetch newer ones from than the run folder has."
    )
    asynchronous: bool = runtime_only(
        True, "Write checkpoints during training, from a copy in host memory if it has space."
    )
    best: str | None = runtime_only(
        "loss",
        "Metric that selects the best checkpoint: one of the objective, or TASK/METRIC of validate.tasks; null: none.",
    )

    @field_validator("copy_to")
    @classmethod
    def _check_s3_address(cls, address: str | None) -> str | None:
        if address is not None and re.fullmatch(r"s3://[^/]+/.*[^/]", address) is None:
            raise ValueError(f"{address!r} is not an S3 address; write s3://BUCKET/PREFIX")
        return address


class LogConfig(Section):
    every: Count = runtime_only(10, "Steps between two lines of metrics.jsonl.", ge=1)


class KeyLocations(dict[tuple[str | int, ...], str]):
    """The `file:line` of each key of a run file. All instances are equal, so comparing runs ignores them."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyLocations)


class RunConfig(NamingSection):
    """A run file as an object. Its sections, in `artel.config`, have the keys of `artel config explain`."""

    registries: ClassVar = {"objective": OBJECTIVES, "callbacks": CALLBACKS, "track": TRACKERS}
    _locations: KeyLocations = PrivateAttr(default_factory=KeyLocations)
    plugins: Annotated[list[Annotated[str, AfterValidator(load_plugin)]], OneOrMore] = runtime_only(
        [],
        "Your modules (package.module) that register formats, objectives, optimizers, schedules, trackers, exporters "
        "or callbacks. They are imported and run with all of your permissions.",
    )
    run: Name = runtime_only("", "Folder for everything that this run writes (default: runs/NAME-OF-RUN-FILE).")
    seed: Seed = Field(default=42, ge=0, description="Random seed of the order, initial weights and dropout.")
    data: DataConfig = Field(default=DataConfig(), description="The text: sources, cleaning, split, blocks.")
    prepare: PrepareConfig = runtime_only(PrepareConfig(), "Where to prepare the text, and with how many processes.")
    tokenizer: TokenizerConfig = Field(
        default=TokenizerConfig(),
        description="Tokenizer: trained or loaded (default: that of model.from, otherwise a trained one).",
    )
    model: ModelConfig = Field(default=ModelConfig(), description="Model: new or pretrained (default: a new GPT-2).")
    objective: ObjectiveName = Field(
        default="causal",
        description="Training objective: next token (causal); masked tokens (masked); answers within documents "
        "(span_qa); assistant turns (chat); preferences between answers (preference); labels or a number "
        "(classification); scores of answers (reward) or of a query and a document (rerank); embeddings (embedding); "
        "entities or tags of words (tokens); text to text (seq2seq); outputs of a teacher (distill); rewards of the "
        "model's own answers (policy).",
    )
    masked: MaskedConfig = Field(default=MaskedConfig(), description="objective: masked. Which tokens to mask.")
    span_qa: SpanQAConfig = Field(
        default=SpanQAConfig(), description="objective: span_qa. Windows, heads, losses, prediction."
    )
    chat: ChatConfig = Field(
        default=ChatConfig(),
        description="objectives chat, preference, reward and policy. Template and training of conversations.",
    )
    preference: PreferenceConfig = Field(default=PreferenceConfig(), description="objective: preference. Loss.")
    classification: ClassificationConfig = Field(
        default=ClassificationConfig(), description="objective: classification. Labels, loss, long texts."
    )
    reward: RewardConfig = Field(default=RewardConfig(), description="objective: reward. Loss.")
    rerank: RerankConfig = Field(default=RerankConfig(), description="objective: rerank. Loss and negatives.")
    embedding: EmbeddingConfig = Field(
        default=EmbeddingConfig(), description="objective: embedding. Loss, pooling, prompts."
    )
    tokens: TokensConfig = Field(
        default=TokensConfig(), description="objective: tokens. Labels of entities or words, tagging scheme, windows."
    )
    distill: DistillConfig = Field(default=DistillConfig(), description="objective: distill. Teacher and divergence.")
    seq2seq: Seq2SeqConfig = Field(
        default=Seq2SeqConfig(), description="objective: seq2seq. Prefix, long texts, generation."
    )
    train: TrainConfig = Field(default=TrainConfig(), description="Length, batch, optimizer, schedule, precision.")
    validate_: ValidateConfig = Field(
        default=ValidateConfig(), alias="validate", description="When and how to evaluate the model."
    )
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="Distribution of the run over processes.")
    launch: LaunchConfig = runtime_only(
        LaunchConfig(), "What `artel launch` asks of a cluster or a cloud: nodes, time, image, storage."
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="When to save checkpoints and which to keep."
    )
    log: LogConfig = Field(default=LogConfig(), description="Interval of logged metrics.")
    callbacks: list[CallbackName] = runtime_only([], "Callbacks of your plugins, by name, to call after every step.")
    profile: bool = runtime_only(False, "Profile a few steps: RUN/profile has a table and a Chrome trace.")
    track: list[TrackerName] = runtime_only(
        ["console", "jsonl"], "Trackers for metrics; all except console and jsonl need an extra."
    )

    @field_validator("run")
    @classmethod
    def _check_run_folder(cls, folder: str) -> str:
        if "://" in folder:
            raise ValueError(
                f"{folder!r} is not a folder; write a local folder, and checkpoint.copy_to: s3://BUCKET/PREFIX"
            )
        return folder

    def to_yaml(self) -> str:
        """Return the keys that were set, as YAML. Secrets in URLs are replaced by ***; write ${NAME} for them."""
        tree = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return yaml.safe_dump(hide_secrets(tree), sort_keys=False, allow_unicode=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_yaml` to a file, for the command `artel`. An existing file is replaced."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")
