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
    lora_name: str = Field(min_length=1, max_length=200)
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
    _base: tuple[OpenedModel, str] = field(init=False)
    """The model without an adapter, and its name."""

    def __post_init__(self) -> None:
        self._base = self.served.opened, self.served.name

    def load_weights(self, path: str) -> None:
        """Serve the weights in a folder. Raise ApiError if they cannot be used."""
        opened = self._open(lambda: self.open_weights(self._check(path)))
        self._base = replace(self._base[0], model=opened.model), self._base[1]
        self.served.replace_model(*self._base)

    def load_adapter(self, name: str, path: str) -> None:
        """Serve the model with an adapter, under the adapter's name. Raise ApiError if it cannot be used."""
        if name == self._base[1]:
            raise ApiError(400, f"{name} is the name of the model itself; use another", "lora_name")
        self.unload_adapter()
        adapted = self._open(lambda: self.add_adapter(self._base[0], name, self._check(path)))
        use_adapter(adapted.model, name)
        self.served.replace_model(adapted, name)

    def unload_adapter(self) -> None:
        """Serve the model without an adapter, if it has one."""
        opened, name = self._base
        if self.served.name != name:
            adapter = self.served.name
            self.served.replace_model(opened, name)
            remove_adapter(opened.model, adapter)

    def _check(self, path: str) -> str:
        if not Path(path).resolve().is_relative_to(self.allowed.resolve()):
            raise ApiError(403, f"{path} is not in {self.allowed}, the folder of --reload-from")
        return path

    @staticmethod
    def _open(open_folder: Callable[[], OpenedModel]) -> OpenedModel:
        try:
            return open_folder()
        except InputError as error:
            raise ApiError(400, str(error)) from None


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
        if body.lora_name != reloader.served.name:
            raise ApiError(404, f"there is no adapter {body.lora_name[:100]!r}", "lora_name")
        await reloader.served.work(reloader.unload_adapter)
        return {}
