"""The loop, optimizer, schedule, checkpoint, resume, metrics, trackers."""

from artel.training.run_folder import RunFolder, check_same_run

__all__ = ["RunFolder", "check_same_run"]
