"""C++ kernels for CPUs, and the Python that builds (`build.py`) and calls them."""
