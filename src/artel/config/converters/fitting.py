"""Keys that a run file may not have together, although the other tool takes both: the run is kept, and it is told."""

from __future__ import annotations

from artel.config.converters.keys import OldKeys

# Optimizers that look at whole matrices, and those that look at numbers one by one, as DeepSpeed hands them out.
WHOLE_MATRICES = {"adamw8bit", "adafactor"}
FLAT = {"adamw", "sgd"}
_SHARDS = ("zero1", "zero2", "fsdp", "hsdp")


def fit_together(old: OldKeys) -> None:
    """Change what `artel config check` would refuse in a converted run, and report it."""
    is_sharded = _splits_the_model(old) or old.value("parallel.data") in _SHARDS
    has_deepspeed = old.value("parallel.deepspeed") is not None
    optimizer = old.value("train.optimizer")
    if optimizer in WHOLE_MATRICES and is_sharded:
        old.change("train.optimizer", "adamw", f"{optimizer} does not step shards of matrices here: adamw is taken")
    elif optimizer is not None and optimizer not in FLAT and has_deepspeed:
        old.change("train.optimizer", "adamw", f"{optimizer} does not step what DeepSpeed shares out: adamw is taken")
    if old.value("model.quantize") in ("int8", "nf4") and (old.value("parallel.tensor") or 1) > 1:
        old.change("parallel.tensor", 1, "quantized matrices are not split: parallel.tensor is 1")
    if old.value("model.quantize") == "int8" and old.value("model.lora.dora"):
        _fit_int8_dora(old)
    if old.value("train.weights") == "bf16" and old.value("train.optimizer") not in (None, "adamw"):
        reason = "only steps of adamw are rounded to bf16 weights: train.weights is fp32"
        old.change("train.weights", "fp32", reason)


def _splits_the_model(old: OldKeys) -> bool:
    return any((old.value(f"parallel.{axis}") or 1) > 1 for axis in ("tensor", "context", "expert", "pipeline"))


def _fit_int8_dora(old: OldKeys) -> None:
    """DoRA over int8 goes with whole matrices alone."""
    if _splits_the_model(old):
        old.change("model.quantize", "nf4", "DoRA does not read shards of int8: nf4 is taken")
    elif old.value("parallel.data") in _SHARDS:
        reason = "DoRA does not read shards of int8: parallel.data is auto; write model.quantize: nf4 to share them"
        old.change("parallel.data", "auto", reason)
