"""Silence what libraries print about themselves."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def quiet_libraries() -> None:
    """Turn off the progress bars, advice and telemetry of transformers, and the warnings that do not apply to artel."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Views of outputs are never written to, and local shards are read without a process group on purpose.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    # The slicing is done by PyTorch's own fully_shard.
    warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh will be deprecated")
    logging.getLogger("DeepSpeed").addFilter(_to_standard_error)
    # bitsandbytes and transformers download code with the package `kernels` and run it where it is installed: this
    # hides it. peft imports bitsandbytes also where nothing is quantized, which warns that the package is missing.
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _to_standard_error(record: logging.LogRecord) -> bool:
    """Pass every record, to standard error: DeepSpeed, which accelerate imports, would warn on standard output."""
    for handler in logging.getLogger(record.name).handlers:
        if type(handler) is logging.StreamHandler:  # handlers that write files or keep the records stay as they are
            handler.setStream(sys.stderr)
    return True
