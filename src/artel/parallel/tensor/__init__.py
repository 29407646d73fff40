"""Tensor parallelism: several processes share the matrices of each layer."""
