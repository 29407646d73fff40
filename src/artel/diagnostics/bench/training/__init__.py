"""`artel bench train`: the same model on the same tokens, trained by artel and by each `--peer` in turns."""

from artel.diagnostics.bench.training.contestant import AfterStep, Work
from artel.diagnostics.bench.training.measure import Settings, measure_train
from artel.diagnostics.bench.training.result import Measured

__all__ = ["AfterStep", "Measured", "Settings", "Work", "measure_train"]
