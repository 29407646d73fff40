"""Exports an encoder as an ONNX graph, which runs without PyTorch, and compares its outputs with the model's."""

from __future__ import annotations

import logging
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.export import Dim
from transformers import PreTrainedModel

from artel.errors import InputError, WorkError, missing_extra
from artel.models.loading.model_folder import read_config
from artel.models.text_vectors import module_folders
from artel.tokens import Tokenizer, load_tokenizer

_TEXTS = ("A crew who pool their labour.", "Артель", "One, two, three, four, five, six, seven, eight.")
"""Texts for tracing and comparing the graph: several rows, some of them padded."""
_TOLERANCE = 1e-3
"""Maximum difference of an output, in its standard deviations. Reordered float32 operations give about 1e-5."""


class OnnxExporter:
    """Writes model.onnx with the configuration and the tokenizer, as optimum's ORTModel classes expect them.

    Batch size and length of the inputs are dynamic. Models that generate token by token are refused: they need a cache
    of keys and values between calls of the graph.
    """

    def __init__(self, settings: object) -> None:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            if find_spec(package) is None:
                raise missing_extra(package, "onnx", "--to onnx")

    def write(self, model: Path, folder: Path) -> None:
        """Write the graph of the Hugging Face folder `model`. Raise InputError, or WorkError if its outputs differ."""
        encoder = _open_encoder(model)
        tokenizer = load_tokenizer(str(model), where=str(model))
        inputs = _make_inputs(tokenizer)
        with torch.no_grad():
            expected = _named_tensors(encoder(**inputs))
        _write_graph(encoder, inputs, list(expected), folder / "model.onnx")
        _check_outputs(folder / "model.onnx", inputs, expected)
        encoder.config.save_pretrained(str(folder))
        tokenizer.save(folder)
        _copy_other_files(model, folder)


def _copy_other_files(model: Path, folder: Path) -> None:
    """Copy a model's other files except weights, e.g. thresholds of labels and sentence-transformers' modules."""
    for file in model.iterdir():
        is_text = file.is_file() and file.suffix in (".json", ".txt") and ".index." not in file.name
        if is_text and not (folder / file.name).exists():
            shutil.copy2(file, folder)
    for name in module_folders(model):
        shutil.copytree(model / name, folder / name)


def _open_encoder(folder: Path) -> PreTrainedModel:
    config, _ = read_config(str(folder))
    architecture = (config.architectures or [""])[0]
    model_class: Any = getattr(transformers, architecture, None)
    is_model = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
    if not is_model:
        message = f"transformers has no class {architecture or 'for it'}"
        raise InputError.at("--to onnx", message, "use a model that transformers saved")
    if model_class.can_generate():
        message = f"{architecture} generates token by token, which one graph cannot do"
        raise InputError.at("--to onnx", message, "use --gguf q8_0 for llama.cpp, or serve it: artel serve")
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def _make_inputs(tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    rows = tokenizer.hf(list(_TEXTS))
    longest = max(map(len, rows["input_ids"]))
    padding = {"input_ids": tokenizer.pad_id, "attention_mask": 0, "token_type_ids": 0}
    return {
        name: torch.tensor([row + [padding[name]] * (longest - len(row)) for row in rows[name]])
        for name in rows
        if name in padding
    }


def _named_tensors(output: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


def _write_graph(model: PreTrainedModel, inputs: dict[str, torch.Tensor], outputs: list[str], file: Path) -> None:
    dynamic_shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in inputs}
    # Hide a warning about torchvision, which text models do not use.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about its own names
            torch.onnx.export(
                model,
                (),
                str(file),
                kwargs=inputs,
                input_names=list(inputs),
                output_names=outputs,
                dynamic_shapes=dynamic_shapes,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as error:  # torch.export and each operator's translation raise their own types
        message = f"torch.onnx cannot write {model.config.model_type}: {' '.join(str(error).split())[:300]}"
        raise WorkError.at("--to onnx", message, "serve it with artel serve, or use the Hugging Face folder") from None


def _check_outputs(file: Path, inputs: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise WorkError if the outputs of the graph differ from the model's."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    computed = session.run(list(expected), {name: tensor.numpy() for name, tensor in inputs.items()})
    for (name, tensor), array in zip(expected.items(), computed, strict=True):
        difference = float(np.abs(tensor.numpy() - array).max() / max(float(tensor.std()), 1e-6))
        if not difference < _TOLERANCE:
            message = f"the graph's {name} differs from the model's by {difference:.2g} standard deviations"
            raise WorkError.at("--to onnx", message, "use the Hugging Face folder, and please report this")
