"""Compares a run's parallel strategy with one process, on a small copy of the user's model (`artel doctor --parallel`).

Two steps are trained in one process and with the run file's strategy, in float32 on made-up records. The copy keeps
the properties that decide how a model can be split: its type, attention heads, key-value heads and experts. It has few
layers, small matrices and no dropout.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from artel.config import RunConfig
from artel.errors import InputError, Problem, WorkError
from artel.models.loading.model_folder import read_config
from artel.objectives import objective_type
from artel.parallel import read_parallel_dims
from artel.registry import OPTIMIZERS

_STEPS = 2
_BLOCK = 32
_HEAD_DIM = 8
_ROWS = 2  # of a micro-batch
_TIMEOUT_SECONDS = 900  # imports may take a minute on a busy host
TOLERANCE = 1e-5  # for sums in a different order, over two steps
# Keys about the tokenizer, files and lengths, which do not apply to the copy.
_OMITTED_KEYS = (
    "_token_id architectures transformers_version dtype _name_or_path auto_map vocab_size rope_scaling rope_parameters "
    "quantization_config sliding_window max_window_layers"
).split()


@dataclass(frozen=True, slots=True)
class Agreement:
    """The largest relative differences between the strategy and one process, over the steps."""

    processes: int
    device: str
    model: dict[str, Any]
    """The small copy's configuration."""
    loss_difference: float
    gradient_norm_difference: float
    tolerance: float = TOLERANCE

    @property
    def agrees(self) -> bool:
        return max(self.loss_difference, self.gradient_norm_difference) <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"agrees": self.agrees}

    def __str__(self) -> str:
        verdict = "the numbers are those of one process" if self.agrees else "THE NUMBERS ARE NOT THOSE OF ONE PROCESS"
        sizes = ", ".join(f"{key} {value}" for key, value in self.model.items() if isinstance(value, int | str))
        return (
            f"{verdict}: {_STEPS} steps in {self.processes} process(es) on {self.device} and in one\n"
            f"  loss differs by           {self.loss_difference:.1e}\n"
            f"  gradient norm differs by  {self.gradient_norm_difference:.1e}\n"
            f"  (relative; {self.tolerance:.0e} is allowed)\n"
            f"  tried with                {sizes}"
        )


def check_parallel(config: RunConfig, processes: int) -> Agreement:
    """Train a small copy of the run's model twice and compare. Raise InputError for an impossible strategy."""
    dims = read_parallel_dims(config.parallel, processes, processes)
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= processes
    run_file = small_copy(config, dims.dp_degree)
    with TemporaryDirectory() as folder:
        expected = _train(Path(folder) / "one", run_file | {"parallel": {}}, 1, on_gpus)
        parallel = config.parallel.model_dump(mode="json", exclude_defaults=True)
        if isinstance(parallel.get("data"), int):
            parallel["data"] = "auto"
        actual = _train(Path(folder) / "parallel", run_file | {"parallel": parallel}, processes, on_gpus)
    differences = [
        max(
            abs(value - reference) / abs(reference)
            for value, reference in zip(actual[name], expected[name], strict=True)
        )
        for name in ("loss", "gradient_norm")
    ]
    device = torch.cuda.get_device_name() if on_gpus else "cpu"
    return Agreement(processes, device, run_file["model"]["config"], *differences)


def small_copy(config: RunConfig, dp_degree: int) -> dict[str, Any]:
    """Return the tree of a run file that trains a small copy of the run's model on made-up records."""
    stages = config.parallel.pipeline * (2 if config.parallel.schedule in ("interleaved", "zero_bubble") else 1)
    num_layers = max(2, stages)  # also micro-batches: each stage has one to work on
    small = objective_type(config).small_run(_BLOCK)
    train_keys = {"optimizer", "clip", *OPTIMIZERS.names_with_settings}
    train = config.train.model_dump(mode="json", include=train_keys) | {"learning_rate": 1e-3, "warmup": 0}
    train |= {"steps": _STEPS, "batch": _ROWS * dp_degree * num_layers, "micro_batch": _ROWS}
    train |= {"precision": "fp32", "compile": "off", "threads": 1}
    return {
        **small,
        "data": {**small["data"], "validation": 0, "block": _BLOCK},
        "tokenizer": {"train": {"vocab": 403}},  # divisible by no number of processes, like real ones
        "model": {"config": _small_config(config, num_layers)},
        "train": train,
        "validate": {"every": "never"},
        "checkpoint": {"every": "never", "best": None},
        "log": {"every": 1},
        "track": ["jsonl"],
    }


def _small_config(config: RunConfig, num_layers: int) -> dict[str, Any]:
    if config.model.from_ is not None:
        pretrained = read_config(config.model.from_)[0]
        values = pretrained.to_diff_dict()
        values["model_type"] = pretrained.model_type
    else:
        values = dict(
            config.model.config or {"model_type": "roberta" if objective_type(config).adds_special_tokens else "gpt2"}
        )
    model_config = _build_config(values)
    names = model_config.attribute_map
    layers, heads = model_config.num_hidden_layers, model_config.num_attention_heads
    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": heads * _HEAD_DIM,
        "head_dim": _HEAD_DIM,
        "intermediate_size": heads * _HEAD_DIM * 2,
        "moe_intermediate_size": heads * _HEAD_DIM,
        "max_position_embeddings": 2 * _BLOCK,
    }
    small = {}
    for key, value in values.items():
        if any(omitted in key for omitted in _OMITTED_KEYS) or isinstance(value, dict):
            continue
        if isinstance(value, list) and len(value) == layers:
            value = value[:num_layers]  # one entry per layer
        small[key] = 0 if "drop" in key and isinstance(value, int | float) else value
    all_values = model_config.to_dict()
    for key, value in sizes.items():
        name = names.get(key, key)
        if name in all_values and all_values[name] is not None:
            small[name] = value
    small |= {key: 0 for key, value in all_values.items() if "drop" in key and isinstance(value, float)}
    return small


def _build_config(model_config: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = dict(model_config)
    model_type = values.pop("model_type")
    try:
        return CONFIG_MAPPING[model_type](**values)
    except Exception as error:  # configurations raise different errors
        message = " ".join(str(error).split())[:300]
        raise InputError.at("model.config", f"{model_type} does not accept it: {message}", "check its values") from None


def _train(folder: Path, run_file: dict[str, Any], processes: int, on_gpus: bool) -> dict[str, list[float]]:
    """Train, and return the loss and gradient norm of each step."""
    file = folder.with_suffix(".yaml")
    data = run_file["data"] | {"store": str(folder.parent / "stores")}
    file.write_text(yaml.safe_dump(run_file | {"run": str(folder), "data": data}, allow_unicode=True))
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "artel", "train", str(file), "--nproc", str(processes)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise WorkError.at("parallel", f"{processes} process(es) did not finish within {_TIMEOUT_SECONDS} s") from None
    if result.returncode:
        error_type = InputError if result.returncode == 2 else WorkError
        raise error_type([Problem("parallel", f"with a small copy of the model: {result.stderr.strip()[-1500:]}")])
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "loss" in line]
    metrics = {name: [float(line[name]) for line in steps] for name in ("loss", "gradient_norm")}
    if any(not math.isfinite(value) for values in metrics.values() for value in values):
        raise WorkError.at("parallel", f"the loss is not finite with {processes} process(es)")
    return metrics
