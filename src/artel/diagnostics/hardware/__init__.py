"""Measure the speed of a training step's operations on this machine, for `artel plan`."""
