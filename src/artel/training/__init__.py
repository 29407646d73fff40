"""The loop, optimizer, schedule, checkpoint, resume, metrics, trackers."""
