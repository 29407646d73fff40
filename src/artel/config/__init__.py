"""A run described: strict typed sections, read from YAML with overrides; the shipped recipes live in `recipes/`."""

from artel.config.data_sections import (
    CleanConfig,
    DataConfig,
    DedupConfig,
    NearConfig,
    SourceConfig,
    TokenizerConfig,
    TokenizerTraining,
)
from artel.config.load import dump_run, load_run, result_differences, run_from
from artel.config.objective_sections import ChatConfig, MaskedConfig, PreferenceConfig, SpanQAConfig
from artel.config.prepare_sections import PrepareConfig, SlurmConfig
from artel.config.sections import (
    CheckpointConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    ValidateConfig,
)
from artel.config.shipped import recipe_names, recipe_text

__all__ = [
    "ChatConfig",
    "CheckpointConfig",
    "CleanConfig",
    "DataConfig",
    "DedupConfig",
    "LogConfig",
    "LoraConfig",
    "MaskedConfig",
    "ModelConfig",
    "NearConfig",
    "ParallelConfig",
    "PreferenceConfig",
    "PrepareConfig",
    "RunConfig",
    "SlurmConfig",
    "SourceConfig",
    "SpanQAConfig",
    "TokenizerConfig",
    "TokenizerTraining",
    "TrainConfig",
    "ValidateConfig",
    "dump_run",
    "load_run",
    "recipe_names",
    "recipe_text",
    "result_differences",
    "run_from",
]
