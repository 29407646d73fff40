"""Requests that schemathesis makes of the server's own OpenAPI schema: none is answered with a fault of the server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

import artel
from support.objectives import objective_run
from support.serving import app_of, served_model, tiny_model

pytestmark = pytest.mark.long


def asking(operation, mode: GenerationMode, statuses: Counter[int], cases: int):
    """A test of one operation, with so many requests that its schema allows or does not allow."""

    @settings(
        max_examples=cases, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case):
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = ""  # the one that is served: any other name would end it all
        response = case.call()
        statuses[response.status_code] += 1
        assert response.status_code < 500, (case.as_curl_command(), response.text)

    return ask


def answered(served, cases: int, paths: list[str] | None = None) -> Counter[int]:
    """How often each status was given. `paths`: of these operations alone."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_asgi("/openapi.json", app_of(served, loopback=False))
    for result in schema.get_all_operations():
        operation = result.ok()
        if paths is None or operation.path in paths:
            for mode in GenerationMode if operation.method == "post" else [GenerationMode.POSITIVE]:
                asking(operation, mode, statuses, cases)()
    return statuses


def test_no_request_ends_in_a_fault_of_the_server(tmp_path):
    with served_model(tiny_model(tmp_path), context=64) as served:
        statuses = answered(served, 200)
    assert statuses[200] > 50
    assert statuses.total() >= 2000, statuses


@pytest.mark.parametrize(
    "name", ["masked", "span_qa", "tokens", "labels_of_pairs", "reward", "rerank", "embedding", "seq2seq"]
)
def test_nor_does_one_to_an_encoder(name):
    run = objective_run(Path("run.yaml").absolute(), name, train={"steps": 1, "batch": 8})
    folder = artel.train(run).folder
    with served_model(folder) as served:
        statuses = answered(served, 40, served.endpoints)
    assert statuses[200] > 5, statuses
