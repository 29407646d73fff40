"""`artel serve`: opens and serves models, or starts vLLM's server. On SIGTERM, running answers are finished first."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import torch
import uvicorn
from transformers import PreTrainedModel

from artel.config import load_run
from artel.config.model_name import check_model_name
from artel.elapsed import hide_elapsed
from artel.errors import InputError
from artel.generation.base import DEFAULT_REQUESTS
from artel.inference.open import OpenedModel, move_to_device, open_model, open_objective
from artel.inference.serve.access import TimedProtocol, is_loopback
from artel.inference.serve.app import Limits, make_app
from artel.inference.serve.reload import Reloader
from artel.inference.serve.served import ServedModel, get_api_name
from artel.messages import logger
from artel.models.device import current_device
from artel.models.loading.language_part import renamed_for_language_part
from artel.models.lora.adapter_folder import load_adapter, read_adapter
from artel.models.lora.adapters import is_adapted
from artel.storage import report_bus_errors
from artel.tokens import load_tokenizer
from artel.training import RunFolder


class Precision(StrEnum):
    """The dtype of weights and matmuls."""

    SAVED = "saved"
    """The dtype in the model's files."""
    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Address, access and limits of a server."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    key: str | None = None
    context: int | None = None
    """Tokens of prompt and answer. None: the model's limit, at most 4,096."""
    precision: Precision = Precision.SAVED
    adapters: dict[str, str] = field(default_factory=dict)
    """Folders or runs of adapters for the model, by their names in the API."""
    origins: list[str] = field(default_factory=list)
    reload_from: str | None = None
    """Folder from which clients may load weights and adapters."""
    limits: Limits = field(default_factory=Limits)


def serve(name: str, options: ServerOptions) -> None:
    """Serve a model until a signal stops it. Raise InputError, if possible before loading the model."""
    loopback = check_key(options)
    report_bus_errors()  # weights are memory-mapped
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(options.host, options.port))
        logger.info("loading the model")
        models = open_models(name, options)
        served = models[0]
        stack.callback(served.close)
        if served.engine is not None:
            logger.info(
                "%s: %s, %s tokens of prompt and answer each", served.name, served.engine.note, f"{served.context:,}"
            )
        app = make_app(
            models, options.limits, key=options.key, loopback=loopback, origins=options.origins,
            reloader=_make_reloader(served, options),
        )  # fmt: skip
        host, port = listener.getsockname()[:2]
        names = ", ".join(model.name for model in models)
        logger.info("%s is served at http://%s:%s/v1; Ctrl-C ends", names, f"[{host}]" if ":" in host else host, port)
        avoid_full_collections()
        config = uvicorn.Config(
            app, http=TimedProtocol, log_level="warning", lifespan="off", server_header=False, timeout_keep_alive=30
        )
        server = uvicorn.Server(config)
        # uvicorn raises the signal again once all answers are finished.
        with suppress(KeyboardInterrupt), hide_elapsed():
            server.run(sockets=[listener])


def avoid_full_collections() -> None:
    """Make full garbage collections rare, since all threads wait for them, even /health.

    A body of 2 MB may be half a million lists. Full collections took half of the time to parse them.
    """
    gc.freeze()
    gc.set_threshold(700, 10, 1000)


def open_models(name: str, options: ServerOptions) -> list[ServedModel]:
    """Return the model, and the model with each adapter. Raise InputError if one cannot be served."""
    opened = _open_weights(name, options)
    if options.adapters:
        _check_supports_adapters(opened, options.adapters)
    with_adapters = {label: _with_adapter(opened, label, path) for label, path in options.adapters.items()}
    served = ServedModel(opened, get_api_name(name), options.limits.requests, options.context, tuple(options.adapters))
    return [served, *(served.with_adapter(adapted, label) for label, adapted in with_adapters.items())]


def _open_weights(name: str, options: ServerOptions) -> OpenedModel:
    """Open a model in the precision and on the device of the server."""
    opened = open_model(name, torch.device("cpu"))
    cast_weights(opened.model, options.precision, name)
    move_to_device(opened, current_device())  # after the cast, since bf16 takes half of the memory there
    return opened


def _make_reloader(served: ServedModel, options: ServerOptions) -> Reloader | None:
    """Return what loads weights for --reload-from. Raise InputError if the model cannot be replaced."""
    if options.reload_from is None:
        return None
    if not served.generates:
        raise InputError.at("--reload-from", f"{served.name} does not generate text", "remove it")
    if options.adapters or is_adapted(served.opened.model):
        raise InputError.at(
            "--reload-from", "the model has adapters", "serve the base model; the run loads its adapter"
        )
    return Reloader(served, Path(options.reload_from), lambda path: _open_weights(path, options), _with_adapter)


def _check_supports_adapters(opened: OpenedModel, adapters: dict[str, str]) -> None:
    """Raise InputError if the model cannot be served with adapters."""
    if is_adapted(opened.model):
        raise InputError.at("--adapter", f"{opened.name} is an adapter itself", "use its base model")
    if not opened.objective.generates:
        raise InputError.at(
            "--adapter", f"{opened.name} does not generate text", "serve the adapter alone: artel serve FOLDER"
        )
    if get_api_name(opened.name) in adapters:
        message = f"{get_api_name(opened.name)} is the name of the model itself"
        raise InputError.at("--adapter", message, "use another name for the adapter")


def _with_adapter(opened: OpenedModel, label: str, path: str) -> OpenedModel:
    """Load an adapter into the model. Return the model with the adapter's tokenizer, objective and run."""
    run_folder = RunFolder(Path(path))
    run = load_run(path) if run_folder.config.is_file() else None
    if run is not None:
        run_folder.check_config(run)
        run_folder.newest_model()
    folder = path if run is None else str(run_folder.model)
    adapter = read_adapter(folder)
    if adapter is None:
        fix = f"use {label}=FOLDER with an adapter, or a run with model.lora"
        raise InputError.at("--adapter", f"{folder} has no adapter", fix)
    if adapter.base_config is not None:
        message = f"{folder} was trained over a base whose configuration a run changed (model.rope, model.attention)"
        raise InputError.at("--adapter", message, f"merge and serve it: artel export {folder} FOLDER --merge")
    with renamed_for_language_part(opened.model, adapter) as renamed_adapter:
        load_adapter(opened.model, renamed_adapter, label)
    has_tokenizer = (Path(folder) / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(folder, where=path) if has_tokenizer else opened.tokenizer
    objective = open_objective(folder, run, tokenizer)
    return replace(opened, name=path, tokenizer=tokenizer, objective=objective, run=run)


def check_key(options: ServerOptions) -> bool:
    """Return True if only this machine can reach the server. Raise InputError if others can and there is no key."""
    loopback = is_loopback(options.host)
    if not loopback and not options.key:
        fix = "use --api-key KEY, or set ARTEL_API_KEY; or remove --host"
        raise InputError.at("--host", f"{options.host} can be reached by others, but no API key is set", fix)
    return loopback


def cast_weights(model: PreTrainedModel, precision: Precision, name: str) -> None:
    """Convert a model's weights to float32 or bfloat16. Raise InputError if they are quantized.

    Buffers stay unchanged, since the frequencies of rotary positions need float32.
    """
    if precision is Precision.SAVED:
        return
    if getattr(model, "is_quantized", False):
        raise InputError.at("--precision", f"the weights of {name} are quantized", "remove it")
    dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise InputError if the address or port cannot be used."""
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError.at("--host", f"{host}: {error.strerror}", "use an address of this machine") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise InputError.at(
            "--port", f"{host}:{port}: {error.strerror}", "use another --port; 0 picks a free one"
        ) from None
    return listener


# vLLM


_DTYPES = {Precision.SAVED: "auto", Precision.FP32: "float32", Precision.BF16: "bfloat16"}

_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""


def serve_with_vllm(name: str, options: ServerOptions) -> NoReturn:
    """Replace this process by vLLM's server. Raise InputError if vLLM is not installed or a run has no model."""
    check_key(options)
    if options.reload_from is not None:
        fix = "remove it, and start vLLM by its own command: docs/policy.md has it"
        raise InputError.at("--reload-from", "is an option of artel's own server", fix)
    program = shutil.which("vllm")
    if program is None:
        fix = "pip install vllm on a machine with a GPU, or remove --engine"
        raise InputError.at("--engine", "vllm is not installed", fix)
    arguments = vllm_arguments(name, options)
    limits, defaults = options.limits, Limits()
    is_changed = {
        "--queue": limits.queue != defaults.queue,
        "--timeout": limits.seconds != defaults.seconds,
        "--max-body": limits.body_bytes != defaults.body_bytes,
    }
    if ignored := [option for option, changed in is_changed.items() if changed]:
        message = f"{', '.join(ignored)}: ignored, since vLLM's server has no such limit"
        print(message, file=sys.stderr, flush=True)
    key = {} if options.key is None else {"VLLM_API_KEY": options.key}
    os.execve(program, [program, *arguments], {**os.environ, **key})


def vllm_arguments(name: str, options: ServerOptions) -> list[str]:
    """Return the command line of vLLM's server. An adapter is served with its base model, under the adapter's name.

    Raise InputError if a run has no model yet.
    """
    folder = _model_folder(name)
    main_adapter = read_adapter(folder)
    adapters = {}
    if main_adapter is None:
        arguments = ["serve", folder, "--served-model-name", get_api_name(name)]
    else:
        arguments = ["serve", main_adapter.base]
        adapters[get_api_name(name)] = main_adapter
    for label, path in options.adapters.items():
        adapter = read_adapter(_model_folder(path))
        if adapter is None:
            raise InputError.at("--adapter", f"{path} has no adapter", f"use {label}=FOLDER with an adapter")
        adapters[label] = adapter
    for label, adapter in adapters.items():
        if adapter.base_config is not None:
            message = f"{label} was trained over a base whose configuration a run changed (model.rope, model.attention)"
            raise InputError.at("--engine", message, f"merge and serve it: artel export {label} FOLDER --merge")
    if adapters:
        largest = max(adapter.config.r for adapter in adapters.values())
        rank = min((rank for rank in _VLLM_RANKS if rank >= largest), default=largest)
        arguments += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules"]
        arguments += [f"{label}={adapter.folder}" for label, adapter in adapters.items()]
    arguments += ["--host", options.host, "--port", str(options.port), "--dtype", _DTYPES[options.precision]]
    arguments += ["--max-num-seqs", str(options.limits.requests or DEFAULT_REQUESTS)]
    arguments += ["--allowed-origins", json.dumps(options.origins)]  # vLLM's default accepts pages of any origin
    if options.context is not None:
        arguments += ["--max-model-len", str(options.context)]
    return arguments


def _model_folder(name: str) -> str:
    """Return the folder or hub id of a model, or the final model of a run."""
    check_model_name(name)
    folder = RunFolder(Path(name))
    if not folder.config.is_file():
        return name
    folder.check_config(load_run(name))
    model = folder.newest_model()
    if model is None:
        raise InputError.at(name, "has no final model yet", f"finish it first: artel train {folder.config}")
    return str(model)
