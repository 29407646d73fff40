"""The order of samples, and batches: pure functions of the step number."""
