"""Requests that schemathesis makes of the server's own OpenAPI schema: none is answered with a fault of the server."""

from __future__ import annotations

from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from support.chat_models import MARKS, llama, saved, trained_tokenizer
from support.serving import app_of, served_model

CASES = 200
"""Of each operation, that its schema allows; and as many that it does not."""


def asking(operation, mode: GenerationMode, statuses: Counter[int]):
    """A test of one operation, with requests that its schema allows or does not allow."""

    @settings(
        max_examples=CASES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case):
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = ""  # the one that is served: any other name would end it all
        response = case.call()
        statuses[response.status_code] += 1
        assert response.status_code < 500, (case.as_curl_command(), response.text)

    return ask


@pytest.mark.long
def test_no_request_ends_in_a_fault_of_the_server(tmp_path):
    tokenizer = trained_tokenizer(MARKS)
    folder = saved(tmp_path / "tiny", llama(tokenizer), tokenizer)
    statuses: Counter[int] = Counter()
    with served_model(folder, context=64) as served:
        schema = schemathesis.openapi.from_asgi("/openapi.json", app_of(served, loopback=False))
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in GenerationMode if operation.method == "post" else [GenerationMode.POSITIVE]:
                asking(operation, mode, statuses)()
    assert statuses[200] > 50
    assert statuses.total() >= 2000, statuses
