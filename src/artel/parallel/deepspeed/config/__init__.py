"""A DeepSpeed file, checked against the run file and completed from it."""
