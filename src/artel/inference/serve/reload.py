"""Weights and adapters that a training run loads into the server (`policy.engine`), at the addresses of vLLM's server.

The model that was loaded last is served in place of the earlier one. Running answers are finished first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import Field

from artel.errors import InputError
from artel.inference.open import OpenedModel
from artel.inference.serve.api_errors import ApiError
from artel.inference.serve.schema import Body
from artel.inference.serve.served import ServedModel
from artel.models.lora.adapters import remove_adapter, use_adapter


class WeightsPath(Body):
    weights_path: str


class CallRequest(Body):
    """vLLM's request to call a method of its workers."""

    method: Literal["reload_weights"]
    kwargs: WeightsPath


class AdapterRequest(Body):
    lora_name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,200}$")
    lora_path: str


class AdapterName(Body):
    lora_name: str


@dataclass(slots=True)
class Reloader:
    """Replaces the model that is served by one in a folder."""

    served: ServedModel
    allowed: Path
    """All folders must be inside this one."""
    open_weights: Callable[[str], OpenedModel]
    add_adapter: Callable[[OpenedModel, str, str], OpenedModel]
    """Loads an adapter into a model, by its name and folder, and returns the model with the adapter's tokenizer."""
    _base: OpenedModel = field(init=False)
    """The model without an adapter."""
    _name: str = field(init=False)
    """Its name."""
    _adapter: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._base, self._name = self.served.opened, self.served.name

    def load_weights(self, path: str) -> None:
        """Serve the weights in a folder. Raise ApiError if they cannot be used."""
        folder = self._check(path)

        def load() -> OpenedModel:
            return replace(self._base, model=self.open_weights(folder).model)

        self._replace(load, self._name)
        self._base, self._adapter = self.served.opened, None

    def load_adapter(self, name: str, path: str) -> None:
        """Serve the model with an adapter, under the adapter's name. Raise ApiError if it cannot be used."""
        folder = self._check(path)
        if name in (self._name, self._adapter):
            raise ApiError(400, f"there is a model {name} already; use another name", "lora_name")

        def load() -> OpenedModel:
            self._remove_adapter()
            try:
                adapted = self.add_adapter(self._base, name, folder)
            except BaseException:
                remove_adapter(self._base.model, name)
                raise
            use_adapter(adapted.model, name)
            return adapted

        self._replace(load, name)
        self._adapter = name

    def unload_adapter(self, name: str) -> None:
        """Serve the model without its adapter. Raise ApiError if it has no such adapter."""
        if name != self._adapter:
            raise ApiError(404, f"there is no adapter {name[:100]!r}", "lora_name")

        def load() -> OpenedModel:
            self._remove_adapter()
            return self._base

        self._replace(load, self._name)

    def _remove_adapter(self) -> None:
        if self._adapter is not None:
            remove_adapter(self._base.model, self._adapter)
            self._adapter = None
            self.served.opened, self.served.name = self._base, self._name

    def _replace(self, load: Callable[[], OpenedModel], name: str) -> None:
        try:
            self.served.replace_model(load, name)
        except InputError as error:
            raise ApiError(400, str(error)) from None

    def _check(self, path: str) -> str:
        """Return a folder's path without links. Raise ApiError if it is not in `allowed`."""
        try:
            folder = Path(path).resolve(strict=True)
            is_allowed = folder.is_dir() and folder.is_relative_to(self.allowed.resolve())
        except (OSError, ValueError):  # ValueError: a NUL
            is_allowed = False
        if not is_allowed:
            raise ApiError(403, f"{path[:300]!r} is no folder in {self.allowed}, the folder of --reload-from")
        return str(folder)


def add_reload_routes(app: FastAPI, reloader: Reloader) -> None:
    """Add vLLM's routes for loading weights and adapters."""

    @app.post("/collective_rpc")
    async def call(body: CallRequest) -> dict[str, Any]:
        await reloader.served.work(lambda: reloader.load_weights(body.kwargs.weights_path))
        return {"results": [None]}

    @app.post("/reset_prefix_cache")
    async def reset_prefixes() -> dict[str, Any]:
        return {}  # a model that is loaded has none

    @app.post("/v1/load_lora_adapter")
    async def load_adapter(body: AdapterRequest) -> dict[str, Any]:
        await reloader.served.work(lambda: reloader.load_adapter(body.lora_name, body.lora_path))
        return {}

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: AdapterName) -> dict[str, Any]:
        await reloader.served.work(lambda: reloader.unload_adapter(body.lora_name))
        return {}
