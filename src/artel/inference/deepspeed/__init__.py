"""DeepSpeed's checkpoints, read and written."""
