"""Building, loading and saving Hugging Face models: any architecture, unchanged in and out."""

from artel.models.adapters import AdapterFolder, is_adapted, merge_adapter, read_adapter
from artel.models.attention import use_for_training
from artel.models.build import (
    Built,
    build_adapted,
    build_base,
    build_model,
    check_model,
    check_positions,
    position_limit,
)
from artel.models.compiling import compile_layers
from artel.models.device import bf16_is_native, pick_precision
from artel.models.folder import read_config
from artel.models.loss import IGNORED, token_losses
from artel.models.sampling import Sampling, write, write_ids, write_tokens
from artel.models.save import save_model, write_model

__all__ = [
    "IGNORED",
    "AdapterFolder",
    "Built",
    "Sampling",
    "bf16_is_native",
    "build_adapted",
    "build_base",
    "build_model",
    "check_model",
    "check_positions",
    "compile_layers",
    "is_adapted",
    "merge_adapter",
    "pick_precision",
    "position_limit",
    "read_adapter",
    "read_config",
    "save_model",
    "token_losses",
    "use_for_training",
    "write",
    "write_ids",
    "write_model",
    "write_tokens",
]
