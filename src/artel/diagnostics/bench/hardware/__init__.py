"""How fast this machine runs the operations of a training step, for `artel plan`."""

from artel.diagnostics.bench.hardware.measure import measure_hardware

__all__ = ["measure_hardware"]
