"""The loop, optimizer, schedule, checkpoint, resume, metrics, trackers."""

from artel.training.run_folder import RunFolder

__all__ = ["RunFolder"]
