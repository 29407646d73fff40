"""Kernels in C++ for CPUs, and the Python that builds and calls them."""
