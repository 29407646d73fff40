"""Several adapters for one model: requests for the same adapter are batched, and the adapters take turns."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from artel.generation.base import Engine, EngineError, Generation
from artel.models.lora.adapters import use_adapter


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: list[int]
    generation: Generation
    adapter: str | None


class AdapterTurns:
    """Shares an engine between the adapters of its model. Call all methods from one thread.

    Requests for the active adapter start immediately, until a request for another adapter arrives. That request starts
    when all running answers are finished, so no request starves.
    """

    def __init__(self, engine: Engine, model: PreTrainedModel) -> None:
        """The engine must not share prefixes of prompts, since their keys and values depend on the adapter."""
        self._engine, self._model = engine, model
        self._adapter: str | None = None
        self._running_names: set[str] = set()
        self._waiting_requests: list[_Request] = []
        use_adapter(model, None)

    def get_engine(self, adapter: str | None) -> Engine:
        """Return the engine for requests to an adapter, or to the model without one."""
        note = f"{self._engine.note}, one adapter at a time"
        return _AdapterEngine(self, adapter, note, self._engine.requests)

    def submit(self, request: _Request) -> None:
        if self._running_names and (self._waiting_requests or request.adapter != self._adapter):
            self._waiting_requests.append(request)
        else:
            self._start([request])

    def cancel(self, generation: Generation) -> None:
        self._engine.cancel(generation)
        self._running_names.discard(generation.name)
        self._waiting_requests = [request for request in self._waiting_requests if request.generation is not generation]
        if self._waiting_requests and not self._running_names:
            adapter = self._waiting_requests[0].adapter
            next_requests = [request for request in self._waiting_requests if request.adapter == adapter]
            self._waiting_requests = [request for request in self._waiting_requests if request.adapter != adapter]
            self._start(next_requests)

    def close(self) -> None:
        self._engine.close()

    def _start(self, requests: list[_Request]) -> None:
        if requests[0].adapter != self._adapter:
            self._adapter = requests[0].adapter
            use_adapter(self._model, self._adapter)
        for request in requests:
            self._running_names.add(request.generation.name)
            try:
                self._engine.submit(request.prompt, request.generation)
            except EngineError as error:
                request.generation.fail(str(error))


class _AdapterEngine(Engine):
    """The engine as one adapter sees it."""

    def __init__(self, turns: AdapterTurns, adapter: str | None, note: str, requests: int) -> None:
        self._turns, self._adapter, self.note, self.requests = turns, adapter, note, requests

    def submit(self, prompt: list[int], generation: Generation) -> None:
        self._turns.submit(_Request(prompt, generation, self._adapter))

    def cancel(self, generation: Generation) -> None:
        self._turns.cancel(generation)

    def close(self) -> None:
        if self._adapter is None:  # the model without an adapter, which is closed last
            self._turns.close()
