"""Memory that no trace of tensors sees: each term with the measurement that it comes from.

Measured with torch 2.13 for CPUs and transformers 5.23 on Python 3.11, Linux, glibc 2.36, by benchmarks/plan.py.
"""

from __future__ import annotations

MIB = 2**20

FRAMEWORK = 317 * MIB
"""Baseline memory per process before its first step: Python, PyTorch, transformers and artel. Measured: 316 to 320 MiB
for a GPT-2 with two layers of width 32 (weights: 1 MiB), in one process and in two."""
LIBRARIES = 136 * MIB
"""Pages of libraries' files, which all processes of a host share: 135 in training the same GPT-2."""
ADAPTERS = 50 * MIB
"""Of each process that trains adapters: peft and what it imports, bitsandbytes among it."""
CUDA_CONTEXT = 765 * MIB
"""Of each process on its GPU, beyond PyTorch's allocator: CUDA's context with the kernels of products and attention.
Measured on an H200 with CUDA 13 and PyTorch 2.11: 621 MiB after one tensor, 765 after products and attention."""
CUBLAS_WORKSPACE = 32 * MIB
"""Which PyTorch takes from its allocator on a Hopper GPU, for each process."""
CUDA_CACHED = 200 * MIB
CUDA_CACHED_SHARE = 0.01
"""What PyTorch's caching allocator holds beyond what is allocated, and of that: 0.1 to 0.65 GiB, in the middle 0.25, in
21 runs of 2 to 18 GiB (benchmarks/plan_gpu.md); 0.9 to 1.7 % in the logs of nanotron's sweep of 2024 on 8 x H100 (Llama
1B, three layouts)."""
CUDA_HOST = 2048 * MIB
"""Host memory of a process with a GPU: CUDA's libraries. Not measured here."""
