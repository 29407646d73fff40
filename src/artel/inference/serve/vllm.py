"""`artel serve --engine vllm`: vLLM's own server for the model, where vLLM is installed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from artel.config import load_run
from artel.config.model_name import check_model_name
from artel.errors import InputError
from artel.inference.engine.room import USUAL
from artel.inference.serve.app import Limits
from artel.inference.serve.served import name_of
from artel.inference.serve.server import Precision, ServerOptions, check_key
from artel.models.lora.adapter_folder import read_adapter
from artel.training import RunFolder

_DTYPES = {Precision.SAVED: "auto", Precision.FP32: "float32", Precision.BF16: "bfloat16"}

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM knows."""


def hand_over(name: str, options: ServerOptions) -> None:
    """Become vLLM's server. Raises InputError where vLLM is not installed, and for a run without a model."""
    check_key(options)
    program = shutil.which("vllm")
    if program is None:
        fix = "pip install vllm, on a machine with a GPU; or leave --engine out"
        raise InputError.at("--engine", "vllm is not installed", fix)
    arguments = vllm_arguments(name, options)
    if ignored := _ignored(options.limits):
        what = f"{', '.join(ignored)}: vLLM's server has no such limit, so there is none"
        print(what, file=sys.stderr, flush=True)
    key = {} if options.key is None else {"VLLM_API_KEY": options.key}
    os.execve(program, [program, *arguments], {**os.environ, **key})


def _ignored(limits: Limits) -> list[str]:
    """Limits other than the usual ones, of which vLLM's server has none."""
    usual = Limits()
    written = {
        "--queue": limits.queue != usual.queue,
        "--timeout": limits.seconds != usual.seconds,
        "--max-body": limits.body != usual.body,
    }
    return [option for option, is_written in written.items() if is_written]


def vllm_arguments(name: str, options: ServerOptions) -> list[str]:
    """The command line of vLLM's server; an adapter is served over its base, by the adapter's name.

    Raises InputError for a run that has no model yet.
    """
    folder = _model_folder(name)
    own = read_adapter(folder)
    arguments = ["serve", folder, "--served-model-name", name_of(name)] if own is None else ["serve", own.base]
    adapters = {} if own is None else {name_of(name): own}
    for label, place in options.adapters.items():
        adapter = read_adapter(_model_folder(place))
        if adapter is None:
            raise InputError.at("--adapter", f"{place} holds no adapter", f"write {label}=FOLDER of one")
        adapters[label] = adapter
    for label, adapter in adapters.items():
        if adapter.base_config is not None:
            what = f"{label} was trained over a base whose configuration a run changed (model.rope, model.attention)"
            raise InputError.at("--engine", what, f"merge it, and serve that: artel export {label} FOLDER --merge")
    if adapters:
        largest = max(adapter.config.r for adapter in adapters.values())
        rank = min((rank for rank in _RANKS if rank >= largest), default=largest)
        arguments += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules"]
        arguments += [f"{label}={adapter.folder}" for label, adapter in adapters.items()]
    arguments += ["--host", options.host, "--port", str(options.port), "--dtype", _DTYPES[options.precision]]
    arguments += ["--max-num-seqs", str(options.limits.requests or USUAL)]
    arguments += ["--allowed-origins", json.dumps(options.origins)]  # by default vLLM answers pages of any origin
    if options.context is not None:
        arguments += ["--max-model-len", str(options.context)]
    return arguments


def _model_folder(name: str) -> str:
    """The folder or hub id of a model; of a run its final model."""
    check_model_name(name)
    folder = RunFolder(Path(name))
    if not folder.config.is_file():
        return name
    folder.check_config(load_run(name))
    model = folder.newest_model()
    if model is None:
        raise InputError.at(name, "has no final model yet", f"end it first: artel train {folder.config}")
    return str(model)
