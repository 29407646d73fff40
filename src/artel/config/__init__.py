"""A run described: strict typed sections, read from YAML with overrides; the shipped recipes live in `recipes/`."""

from artel.config.load import dump_run, load_run, result_differences, run_from
from artel.config.sections import (
    CheckpointConfig,
    CleanConfig,
    DataConfig,
    DedupConfig,
    LogConfig,
    MaskedConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SourceConfig,
    SpanQAConfig,
    TokenizerConfig,
    TokenizerTraining,
    TrainConfig,
    ValidateConfig,
)
from artel.config.shipped import recipe_names, recipe_text

__all__ = [
    "CheckpointConfig",
    "CleanConfig",
    "DataConfig",
    "DedupConfig",
    "LogConfig",
    "MaskedConfig",
    "ModelConfig",
    "ParallelConfig",
    "RunConfig",
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
