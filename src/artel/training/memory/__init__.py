"""Memory while training: the size of micro-batches, the allocator of CPUs."""
