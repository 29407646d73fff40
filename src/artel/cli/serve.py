"""`artel serve`: a model behind OpenAI's API, with a page to chat."""

from __future__ import annotations

from typing import Annotated

import typer

from artel.errors import InputError, missing_extra
from artel.launching.quiet_libraries import quiet_libraries

_EXTRA = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


def serve(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A run's folder, a model folder or a hub id.")],
    host: Annotated[str, typer.Option(help="The address to listen on; another than this machine's needs a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="ARTEL_API_KEY", help="Clients must send it as a bearer token.")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="What weights are held in: saved (as the folder has them), fp32 or bf16.")
    ] = "saved",
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer at most; the model's limit, up to 4,096.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Answers that are computed at once; 16, and up to 64 of a small model on a CPU."),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Answers that wait; who comes then gets 429.")] = 64,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for an answer, which is cut off then.")] = 600,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request at most.")] = 2 * 2**20,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="An adapter over the model, by a name of its own; may be repeated."),
    ] = None,
    engine: Annotated[str, typer.Option(help="artel, or vllm: its own server, where it is installed.")] = "artel",
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Pages of this origin may call; may be repeated.")
    ] = None,
) -> None:
    """Serve a model: OpenAI's API at /v1, a chat page at /, Prometheus metrics at /metrics.

    Requests are computed together, and new ones join at each token. Ctrl-C or SIGTERM ends it when running answers are
    finished.

    Example: artel serve runs/assistant --port 8000
    """
    _check_extra()
    quiet_libraries()
    from artel.inference.serve.app import Limits
    from artel.inference.serve.server import Precision, ServerOptions, serve, serve_with_vllm

    if engine not in ("artel", "vllm"):
        raise InputError.at("--engine", f"there is no {engine}", "write artel or vllm")
    if precision not in list(Precision):
        raise InputError.at("--precision", f"there is no {precision}", f"write one of: {', '.join(Precision)}")
    limits = Limits(requests, queue, max_body, timeout)
    adapters = {}
    for each in adapter or []:
        label, _, folder = each.partition("=")
        if not label or not folder or label in adapters:
            what = f"{each!r} is not NAME=FOLDER with a name of its own"
            raise InputError.at("--adapter", what, "write --adapter poet=runs/poet")
        adapters[label] = folder
    options = ServerOptions(host, port, api_key or None, context, Precision(precision), adapters, cors or [], limits)
    if engine == "vllm":
        serve_with_vllm(name, options)
    serve(name, options)


def _check_extra() -> None:
    """Raise InputError if a package of the extra is not installed."""
    from importlib.util import find_spec

    for package in _EXTRA:
        if find_spec(package) is None:
            raise missing_extra(package, "serve", "artel serve")
