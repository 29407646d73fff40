"""Measuring artel on this machine, each figure with its definition."""

from artel.diagnostics.bench.figures import DEFINITIONS, Figure, table
from artel.diagnostics.bench.prepare import MEASURES, Measured, Settings, measure_prepare

__all__ = ["DEFINITIONS", "MEASURES", "Figure", "Measured", "Settings", "measure_prepare", "table"]
