"""DeepSpeed as the engine of a run."""
