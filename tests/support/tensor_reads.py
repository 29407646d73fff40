"""What a process reads of the files of a model."""

from __future__ import annotations


def noted_reads() -> set[str]:
    """The names of the tensors that this process reads from now on: for a process that ends with its test."""
    from artel.models.loading.safetensors_files import TensorFiles

    reader, read = TensorFiles.read, set[str]()

    def noting(files, name, index=()):
        read.add(name)
        return reader(files, name, index)

    TensorFiles.read = noting
    return read
