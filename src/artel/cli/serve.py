"""`artel serve`: a model behind OpenAI's API, with a page to chat."""

from __future__ import annotations

from typing import Annotated

import typer

from artel.errors import InputError, missing_extra
from artel.launching.quiet_libraries import quiet_libraries

_EXTRA = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


def serve(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A run folder, a model folder or a hub id.")],
    host: Annotated[str, typer.Option(help="Address to listen on. Anything but loopback requires --api-key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="ARTEL_API_KEY", help="Key that clients must send as a bearer token.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Dtype of the weights: saved (as stored), fp32 or bf16.")] = "saved",
    context: Annotated[
        int | None,
        typer.Option(
            min=2, help="Maximum tokens of prompt plus completion (default: the model's limit, at most 4,096)."
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Concurrent requests (default: 16; up to 64 for a small model on a CPU)."),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; further ones get status 429.")] = 64,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds before a completion is cut off.")] = 600,
    max_body: Annotated[int, typer.Option(min=1024, help="Maximum size of a request body in bytes.")] = 2 * 2**20,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="LoRA adapter, served as model NAME. Repeatable."),
    ] = None,
    engine: Annotated[str, typer.Option(help="artel, or vllm (runs vLLM's server; must be installed).")] = "artel",
    reload_from: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Let clients replace the model with one from this folder, as training with policy.engine does.",
        ),
    ] = None,
    cors: Annotated[list[str] | None, typer.Option(metavar="ORIGIN", help="Allowed CORS origin. Repeatable.")] = None,
) -> None:
    """Serve a model: OpenAI's API at /v1, a chat page at /, Prometheus metrics at /metrics.

    Requests are batched continuously. Ctrl-C or SIGTERM stops the server after running requests finish.

    Example: artel serve runs/assistant --port 8000
    """
    _check_extra()
    quiet_libraries()
    from artel.inference.serve.app import Limits
    from artel.inference.serve.server import Precision, ServerOptions, serve_with_vllm
    from artel.inference.serve.server import serve as run_server

    if engine not in ("artel", "vllm"):
        raise InputError.at("--engine", f"unknown engine {engine}", "use artel or vllm")
    if precision not in list(Precision):
        raise InputError.at("--precision", f"unknown precision {precision}", f"use one of: {', '.join(Precision)}")
    limits = Limits(requests=requests, queue=queue, body_bytes=max_body, seconds=timeout)
    adapters = {}
    for argument in adapter or []:
        label, _, folder = argument.partition("=")
        if not label or not folder or label in adapters:
            message = f"{argument!r} is not NAME=FOLDER, or its name is used twice"
            raise InputError.at("--adapter", message, "use e.g. --adapter poet=runs/poet")
        adapters[label] = folder
    options = ServerOptions(
        host=host,
        port=port,
        key=api_key or None,
        context=context,
        precision=Precision(precision),
        adapters=adapters,
        origins=cors or [],
        reload_from=reload_from,
        limits=limits,
    )
    if engine == "vllm":
        serve_with_vllm(name, options)
    run_server(name, options)


def _check_extra() -> None:
    """Raise InputError if a package of the extra `serve` is not installed."""
    from importlib.util import find_spec

    for package in _EXTRA:
        if find_spec(package) is None:
            raise missing_extra(package, "serve", "artel serve")
