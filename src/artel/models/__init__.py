"""Building, loading and saving Hugging Face models: any architecture, unchanged in and out."""

from artel.models.build import Built, build_model
from artel.models.compiling import compile_layers
from artel.models.device import bf16_is_native, pick_precision
from artel.models.loss import token_losses
from artel.models.save import save_model

__all__ = [
    "Built",
    "bf16_is_native",
    "build_model",
    "compile_layers",
    "pick_precision",
    "save_model",
    "token_losses",
]
