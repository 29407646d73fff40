"""`artel bench train`: the same model on the same tokens, trained by artel and by its peers in turns."""

from artel.using.bench.training.contestant import AfterStep, Work
from artel.using.bench.training.measure import CONTESTANTS, Settings, measure_train
from artel.using.bench.training.result import Measured

__all__ = ["CONTESTANTS", "AfterStep", "Measured", "Settings", "Work", "measure_train"]
