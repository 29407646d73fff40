"""Memory that no trace of tensors sees: each term with the measurement that it comes from.

Measured with torch 2.13 for CPUs and transformers 5.23 on Python 3.11, Linux, glibc 2.36, by benchmarks/plan.py.
"""

from __future__ import annotations

MIB = 2**20

FRAMEWORK = 326 * MIB
"""Of each process, before it has a model: Python, PyTorch, transformers and artel, their objects on the heap."""
LIBRARIES = 142 * MIB
"""Pages of libraries' files, which all processes of a host share."""
CPU_KERNELS = 30 * MIB
"""oneDNN's code and scratch memory, threads' stacks: what a tiny model's steps add on a CPU."""
GLOO = 12 * MIB
"""Buffers of gloo, of each process in a group of several."""
SHARDING = 35 * MIB
"""Of each process that shares a model: PyTorch's code for DTensor and fully_shard, which is imported then."""
ADAPTERS = 50 * MIB
"""Of each process that trains adapters: peft and what it imports, bitsandbytes among it."""
CUDA_CONTEXT = 500 * MIB
"""Of each process on its GPU: CUDA's context and cuBLAS's workspace. From NVIDIA's and PyTorch's documentation, not
measured here."""
CUDA_RESERVED = 0.017
"""Of what is allocated: what PyTorch's caching allocator holds beyond it. Reserved over allocated was 1.009 to 1.017 in
the logs of nanotron's sweep of 2024 on 8 x H100 (Llama 1B, three layouts); not measured here."""
CUDA_HOST = 2048 * MIB
"""Host memory of a process with a GPU: CUDA's libraries. Not measured here."""
