"""The configuration of a run: typed sections, read from YAML with overrides. `recipes/` has the package's run files."""

from artel.config.differences import result_differences
from artel.config.load import (
    InvalidRunFile,
    RunFile,
    dump_run,
    is_override,
    is_suspect,
    load_run,
    parse_run,
    read_run_file,
    read_settings,
    with_location,
)
from artel.config.overrides import Overrides
from artel.config.recipes import recipe_names, recipe_text
from artel.config.schema.base import Section, ShortSection, name_error
from artel.config.schema.cleaning import ClassifierConfig, CleanConfig, DedupConfig, NearConfig, PiiConfig, PiiKind
from artel.config.schema.data import DataConfig, SourceConfig
from artel.config.schema.decontamination import BenchmarkConfig, DecontaminateConfig
from artel.config.schema.encoders import (
    ClassificationConfig,
    EmbeddingConfig,
    EmbeddingPrompts,
    RerankConfig,
    RewardConfig,
    TokensConfig,
)
from artel.config.schema.launch import LaunchConfig
from artel.config.schema.model import AttentionConfig, LoraConfig, ModelConfig, RopeConfig
from artel.config.schema.objectives import ChatConfig, MaskedConfig, PreferenceConfig, SpanQAConfig
from artel.config.schema.prepare import PrepareConfig, SlurmConfig
from artel.config.schema.quantities import Count, Number
from artel.config.schema.rewards import RewardTerm
from artel.config.schema.run import CheckpointConfig, LogConfig, ParallelConfig, RunConfig, TrainConfig, ValidateConfig
from artel.config.schema.tokenizer import TokenizerConfig, TokenizerTraining
from artel.config.suggest import find_similar_name, guess_key, suggest_key

__all__ = [
    "AttentionConfig",
    "BenchmarkConfig",
    "ChatConfig",
    "CheckpointConfig",
    "ClassificationConfig",
    "ClassifierConfig",
    "CleanConfig",
    "Count",
    "DataConfig",
    "DecontaminateConfig",
    "DedupConfig",
    "EmbeddingConfig",
    "EmbeddingPrompts",
    "InvalidRunFile",
    "LaunchConfig",
    "LogConfig",
    "LoraConfig",
    "MaskedConfig",
    "ModelConfig",
    "NearConfig",
    "Number",
    "Overrides",
    "ParallelConfig",
    "PiiConfig",
    "PiiKind",
    "PreferenceConfig",
    "PrepareConfig",
    "RerankConfig",
    "RewardConfig",
    "RewardTerm",
    "RopeConfig",
    "RunConfig",
    "RunFile",
    "Section",
    "ShortSection",
    "SlurmConfig",
    "SourceConfig",
    "SpanQAConfig",
    "TokenizerConfig",
    "TokenizerTraining",
    "TokensConfig",
    "TrainConfig",
    "ValidateConfig",
    "dump_run",
    "find_similar_name",
    "guess_key",
    "is_override",
    "is_suspect",
    "load_run",
    "name_error",
    "parse_run",
    "read_run_file",
    "read_settings",
    "recipe_names",
    "recipe_text",
    "result_differences",
    "suggest_key",
    "with_location",
]
