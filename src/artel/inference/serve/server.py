"""The server itself: models are opened, the port is taken, and on SIGTERM running answers finish."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum

import torch
import uvicorn
from transformers import PreTrainedModel

from artel.errors import InputError
from artel.inference.open import open_model
from artel.inference.serve.app import Limits, make_app
from artel.inference.serve.served import ServedModel, name_of

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
    origins: list[str] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)


def serve(name: str, options: ServerOptions, tell: Tell) -> None:
    """Serve a model until a signal comes. Raises InputError before the model is loaded, where that is possible."""
    loopback = check_key(options)
    with ExitStack() as stack:
        listening = stack.enter_context(_listen(options.host, options.port))
        tell("loading the model")
        opened = open_model(name)
        hold_weights(opened.model, options.precision, name)
        served = ServedModel(opened, name_of(name), options.limits.requests, options.context)
        stack.callback(served.close)
        if served.engine is not None:
            tell(f"{served.name}: {served.engine.note}, {served.context:,} tokens of prompt and answer each")
        app = make_app([served], options.limits, key=options.key, loopback=loopback, origins=options.origins)
        host, port = listening.getsockname()[:2]
        tell(f"{served.name} is served at http://{f'[{host}]' if ':' in host else host}:{port}/v1; Ctrl-C ends")
        config = uvicorn.Config(app, log_level="warning", lifespan="off", server_header=False, timeout_keep_alive=30)
        server = uvicorn.Server(config)
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when all answers are finished
            server.run(sockets=[listening])


def check_key(options: ServerOptions) -> bool:
    """Whether the server can be reached from this machine alone. Raises InputError where it cannot and has no key."""
    loopback = _is_loopback(options.host)
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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


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
