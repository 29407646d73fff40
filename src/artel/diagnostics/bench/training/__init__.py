"""`artel bench train`: the same model on the same tokens, trained by artel and by its peers in turns."""

from artel.diagnostics.bench.training.contestant import AfterStep, Work
from artel.diagnostics.bench.training.measure import CONTESTANTS, Settings, measure_train
from artel.diagnostics.bench.training.result import Measured

__all__ = ["CONTESTANTS", "AfterStep", "Measured", "Settings", "Work", "measure_train"]
