"""The server itself: models are opened, the port is taken, and on SIGTERM running answers finish."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import torch
import uvicorn
from transformers import PreTrainedModel

from artel.config import load_run
from artel.elapsed import paused
from artel.errors import InputError
from artel.inference.open import OpenedModel, move_to_device, objective_of_folder, open_model
from artel.inference.serve.app import Limits, make_app
from artel.inference.serve.guard import TimedProtocol, is_loopback
from artel.inference.serve.served import ServedModel, name_of
from artel.models.device import own_device
from artel.models.loading.language_part import renamed_for_language_part
from artel.models.lora.adapter_folder import load_adapter, read_adapter
from artel.models.lora.adapters import is_adapted
from artel.storage import report_bus_errors
from artel.tokens import load_tokenizer
from artel.training import RunFolder

Tell = Callable[[str], None]


class Precision(StrEnum):
    """What weights are held and multiplied in."""

    SAVED = "saved"
    """As the folder has them."""
    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where and how models are served."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any that is free."""
    key: str | None = None
    context: int | None = None
    """Tokens of prompt and answer; the model's own limit, 4,096 at most, where None."""
    precision: Precision = Precision.SAVED
    adapters: dict[str, str] = field(default_factory=dict)
    """Folders or runs of adapters over the model, by the names that they are served by."""
    origins: list[str] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)


def serve(name: str, options: ServerOptions, tell: Tell) -> None:
    """Serve a model until a signal comes. Raises InputError before the model is loaded, where that is possible."""
    loopback = check_key(options)
    report_bus_errors()  # weights are pages of their files
    with ExitStack() as stack:
        listening = stack.enter_context(_listen(options.host, options.port))
        tell("loading the model")
        models = open_models(name, options)
        served = models[0]
        stack.callback(served.close)
        if served.engine is not None:
            tell(f"{served.name}: {served.engine.note}, {served.context:,} tokens of prompt and answer each")
        app = make_app(models, options.limits, key=options.key, loopback=loopback, origins=options.origins)
        host, port = listening.getsockname()[:2]
        names = ", ".join(model.name for model in models)
        tell(f"{names} is served at http://{f'[{host}]' if ':' in host else host}:{port}/v1; Ctrl-C ends")
        avoid_full_collections()
        config = uvicorn.Config(
            app, http=TimedProtocol, log_level="warning", lifespan="off", server_header=False, timeout_keep_alive=30
        )
        server = uvicorn.Server(config)
        with suppress(KeyboardInterrupt), paused():  # uvicorn raises the signal again when all answers are finished
            server.run(sockets=[listening])


def avoid_full_collections() -> None:
    """Make garbage collections that look through all objects rare: every thread waits for one, and /health with it.

    A body of 2 MB may be half a million lists, and full collections took half of the time of reading them.
    """
    gc.freeze()
    gc.set_threshold(700, 10, 1000)


def open_models(name: str, options: ServerOptions) -> list[ServedModel]:
    """The model, and the same with each of the adapters. Raises InputError."""
    opened = open_model(name, torch.device("cpu"))
    hold_weights(opened.model, options.precision, name)
    move_to_device(opened, own_device())  # only now: what is held in bf16 takes half of the room there
    if options.adapters:
        _check_takes_adapters(opened, options.adapters)
    with_adapters = {label: _with_adapter(opened, label, place) for label, place in options.adapters.items()}
    served = ServedModel(opened, name_of(name), options.limits.requests, options.context, tuple(options.adapters))
    return [served, *(served.with_adapter(each, label) for label, each in with_adapters.items())]


def _check_takes_adapters(opened: OpenedModel, adapters: dict[str, str]) -> None:
    """Raise InputError for a model over which no adapters can be served."""
    if is_adapted(opened.model):
        raise InputError.at("--adapter", f"{opened.name} is an adapter itself", "give the model beneath it")
    if not opened.objective.generates:
        raise InputError.at("--adapter", f"{opened.name} writes no text", "serve the adapter alone: artel serve FOLDER")
    if name_of(opened.name) in adapters:
        what = f"{name_of(opened.name)} is the name of the model itself"
        raise InputError.at("--adapter", what, "give the adapter another one")


def _with_adapter(opened: OpenedModel, label: str, place: str) -> OpenedModel:
    """The model with another adapter loaded into it, and what belongs to that. Raises InputError."""
    run_folder = RunFolder(Path(place))
    run = load_run(place) if run_folder.config.is_file() else None
    if run is not None:
        run_folder.check_config(run)
        run_folder.newest_model()
    folder = place if run is None else str(run_folder.model)
    adapter = read_adapter(folder)
    if adapter is None:
        fix = f"write {label}=FOLDER of one, or of a run with model.lora"
        raise InputError.at("--adapter", f"{folder} holds no adapter", fix)
    if adapter.base_config is not None:
        what = f"{folder} was trained over a base whose configuration a run changed (model.rope, model.attention)"
        raise InputError.at("--adapter", what, f"merge it, and serve that: artel export {folder} FOLDER --merge")
    with renamed_for_language_part(opened.model, adapter) as named:
        load_adapter(opened.model, named, label)
    has_tokenizer = (Path(folder) / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(folder, where=place) if has_tokenizer else opened.tokenizer
    objective = objective_of_folder(folder, run, tokenizer)
    return replace(opened, name=place, tokenizer=tokenizer, objective=objective, run=run)


def check_key(options: ServerOptions) -> bool:
    """Whether the server can be reached from this machine alone. Raises InputError where it cannot and has no key."""
    loopback = is_loopback(options.host)
    if not loopback and not options.key:
        fix = "write --api-key KEY, or set ARTEL_API_KEY; or leave --host out"
        raise InputError.at("--host", f"{options.host} can be reached by others, and there is no key", fix)
    return loopback


def hold_weights(model: PreTrainedModel, precision: Precision, name: str) -> None:
    """Hold a model's weights in float32 or bfloat16. Raises InputError where they are quantized.

    Other tensors stay as they are: the frequencies of rotary positions need float32.
    """
    if precision is Precision.SAVED:
        return
    if getattr(model, "is_quantized", False):
        raise InputError.at("--precision", f"the weights of {name} are quantized", "leave it out")
    dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises InputError."""
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError.at("--host", f"{host}: {error.strerror}", "write an address of this machine") from None
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise InputError.at("--port", f"{host}:{port}: {error.strerror}", "write another --port, 0 for any") from None
    return listening
