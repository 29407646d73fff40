"""Building, loading and saving Hugging Face models: any architecture, unchanged in and out.

Names are imported when they are first asked for: what prepares text asks for a few that need no PyTorch, which takes
seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from artel.models.adapters import is_adapted, read_adapter
    from artel.models.attention import attention_choice, preferred_kernels
    from artel.models.attention_switch import use_for_training
    from artel.models.choice import Choice
    from artel.models.compile import compile_choice, compile_layers, try_compiled
    from artel.models.device import bf16_is_native, pick_precision
    from artel.models.generate import Sampling, write, write_ids, write_tokens
    from artel.models.loading.build import build_model, load_model
    from artel.models.loading.check import check_model, check_positions, check_pretrained
    from artel.models.loading.model_folder import read_config
    from artel.models.loading.request import BuiltModel, ModelRequest
    from artel.models.loading.save import save_model, write_model
    from artel.models.loading.structure import position_limit
    from artel.models.targets import IGNORED

_FILES = {
    "adapters": ("is_adapted", "read_adapter"),
    "attention": ("attention_choice", "preferred_kernels"),
    "attention_switch": ("use_for_training",),
    "choice": ("Choice",),
    "compile": ("compile_choice", "compile_layers", "try_compiled"),
    "device": ("bf16_is_native", "pick_precision"),
    "generate": ("Sampling", "write", "write_ids", "write_tokens"),
    "loading.build": ("build_model", "load_model"),
    "loading.check": ("check_model", "check_positions", "check_pretrained"),
    "loading.model_folder": ("read_config",),
    "loading.request": ("BuiltModel", "ModelRequest"),
    "loading.save": ("save_model", "write_model"),
    "loading.structure": ("position_limit",),
    "targets": ("IGNORED",),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)


__all__ = [
    "IGNORED",
    "BuiltModel",
    "Choice",
    "ModelRequest",
    "Sampling",
    "attention_choice",
    "bf16_is_native",
    "build_model",
    "check_model",
    "check_positions",
    "check_pretrained",
    "compile_choice",
    "compile_layers",
    "is_adapted",
    "load_model",
    "pick_precision",
    "position_limit",
    "preferred_kernels",
    "read_adapter",
    "read_config",
    "save_model",
    "try_compiled",
    "use_for_training",
    "write",
    "write_ids",
    "write_model",
    "write_tokens",
]
