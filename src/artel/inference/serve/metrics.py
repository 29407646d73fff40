"""Prometheus metrics of the server: requests, tokens, running answers, time to the first token and between tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "artel_requests", "Requests by path and status.", ["path", "status"], registry=self._registry
        )
        self._tokens = Counter("artel_tokens", "Tokens of prompts and of answers.", ["kind"], registry=self._registry)
        self._answers = Gauge("artel_answers", "Answers running or queued.", registry=self._registry)
        self._first_token_seconds = Histogram(
            "artel_first_token_seconds", "Time to the first token.", buckets=_BUCKETS, registry=self._registry
        )
        self._token_seconds = Histogram(
            "artel_token_seconds", "Time from one token to the next.", buckets=_BUCKETS, registry=self._registry
        )

    def count_request(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def count_prompt(self, tokens: int) -> None:
        self._tokens.labels("prompt").inc(tokens)

    def count_answer(self, tokens: int) -> None:
        """Count the tokens of a whole answer."""
        self._tokens.labels("answer").inc(tokens)

    @contextmanager
    def track_answer(self) -> Iterator[_Timer]:
        """Count an answer as running inside the block."""
        self._answers.inc()
        try:
            yield _Timer(self)
        finally:
            self._answers.dec()

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _Timer:
    """Observes the time of each token of an answer."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last_time = metrics._clock()
        self._histogram = metrics._first_token_seconds

    def count_token(self) -> None:
        now = self._metrics._clock()
        self._histogram.observe(now - self._last_time)
        self._metrics._tokens.labels("answer").inc()
        self._last_time, self._histogram = now, self._metrics._token_seconds
