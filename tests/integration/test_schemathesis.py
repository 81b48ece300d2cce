"""Schemathesis checks that the replica conforms to its own OpenAPI document."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from tests.support.fake_engine import FakeEngine
from tests.support.replica_servers import MODEL, RunningReplica

OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/load", "GET"),
    ("/health", "GET"),
    ("/ready", "GET"),
    ("/version", "GET"),
    ("/metrics", "GET"),
    ("/openapi.json", "GET"),
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
async def test_operation_conforms_to_openapi_document(
    replica_server: RunningReplica, engine: FakeEngine, path: str, method: str
) -> None:
    statuses: set[int] = set()

    def explore() -> None:
        schema = schemathesis.openapi.from_url(f"{replica_server.url}/openapi.json")
        operation = schema[path][method]

        @seed(20261120)
        @settings(
            max_examples=25,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(), data=st.data())
        def check(case: schemathesis.Case[Any], data: st.DataObject) -> None:
            if isinstance(case.body, dict):
                case.body = drop_optional_fields(case.body, data)
            if "model" in case.path_parameters:
                case.path_parameters["model"] = data.draw(st.sampled_from([MODEL, "x/y", "%00"]))
            response = case.call_and_validate(checks=CHECKS)
            statuses.add(response.status_code)

        check()

    await asyncio.to_thread(explore)
    assert 200 in statuses, "no example succeeded, so the document allows too much"
    assert not engine.live


def drop_optional_fields(body: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """Keep at most two optional fields of a body, so that some bodies pass validation."""
    required = {"model", "messages", "prompt", "tokens"}
    optional = sorted(body.keys() - required)
    kept = data.draw(st.sets(st.sampled_from(optional), max_size=2)) if optional else set()
    sparse_body = {name: value for name, value in body.items() if name in required | kept}
    if "model" in body:
        sparse_body["model"] = MODEL
    if "messages" in body and data.draw(st.booleans()):
        sparse_body["messages"] = [{"role": "user", "content": "Hello"}]
    return sparse_body
