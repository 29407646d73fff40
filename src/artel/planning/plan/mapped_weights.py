"""Weights that a process on a CPU never copies: pages of the model's file, which the processes of a host share.

transformers maps a safetensors file into memory, and where the dtype of a weight is that of the file, the weight is a
part of the mapping. A page of it is copied when training changes it, so frozen weights stay pages of the file. As long
as one weight is left the whole file stays mapped, and with it the pages that quantized weights were read from.
"""

from __future__ import annotations

import torch

from artel.models.loading.build import base_dtype, saved_dtype
from artel.models.loading.language_part import multimodal_of
from artel.models.quantization import num_weights
from artel.planning.plan.models import ModelOutline


def mapped_bytes(outline: ModelOutline, precision: str) -> tuple[int, int]:
    """(bytes of weights that are pages of the file, bytes of pages that quantized weights were read from).

    The model is on a CPU in one piece, and computes in `precision`. A language part is read by `materialize`, which
    copies; so is a base in half precision.
    """
    run = outline.run
    is_copied = multimodal_of(outline.whole) is not None or base_dtype(run, precision) is not None
    if is_copied or saved_dtype(run.model) is not torch.float32:
        return 0, 0
    frozen = [parameter for parameter in outline.build(precision).parameters() if not parameter.requires_grad]
    mapped = sum(parameter.nbytes for parameter in frozen if parameter.dtype == torch.float32)
    if run.model.quantize == "none" or not mapped:
        return mapped, 0
    quantized = sum(num_weights(parameter) for parameter in frozen if parameter.dtype != torch.float32)
    return mapped, quantized * torch.float32.itemsize
