"""Schemathesis checks that replica and gateway conform to their own OpenAPI documents."""

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
from tests.support.gateway_client import run_gateway_server
from tests.support.replica_servers import MODEL, RunningReplica

from argosy.gateway import GatewayConfig, ModelConfig, ReplicaConfig

REPLICA = "one"

OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
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


REPLICA_OPERATIONS = [*OPERATIONS, ("/load", "GET")]
DIALECT_OPERATIONS = [
    ("/v1/responses", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/api/chat", "POST"),
    ("/api/generate", "POST"),
]
GATEWAY_OPERATIONS = [*OPERATIONS, ("/replicas/{name}/metrics", "GET"), *DIALECT_OPERATIONS]


async def explore(url: str, path: str, method: str, max_examples: int) -> None:
    """Send generated requests to an operation, and check the responses against the server's own document."""
    statuses: set[int] = set()

    def send_examples() -> None:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operation = schema[path][method]

        @seed(20261120)
        @settings(
            max_examples=max_examples,
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
            if "name" in case.path_parameters:
                case.path_parameters["name"] = data.draw(st.sampled_from([REPLICA, "x/y", "%00"]))
            response = case.call_and_validate(checks=CHECKS)
            statuses.add(response.status_code)

        check()

    await asyncio.to_thread(send_examples)
    assert 200 in statuses, "no example succeeded, so the document allows too much"


@pytest.mark.parametrize(("path", "method"), REPLICA_OPERATIONS)
async def test_replica_conforms_to_its_openapi_document(
    replica_server: RunningReplica, engine: FakeEngine, path: str, method: str
) -> None:
    await explore(replica_server.url, path, method, 25)
    assert not engine.live


# The gateway's background tasks draw random numbers in the same process while Hypothesis generates examples.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
async def test_gateway_conforms_to_its_openapi_document(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    replica = ReplicaConfig(url=replica_server.url, name=REPLICA, model=MODEL)
    config = GatewayConfig(port=0, models=[ModelConfig(name=MODEL, replicas=[replica])])
    async with run_gateway_server(config) as (_, client):
        url = str(client.base_url).rstrip("/")
        for path, method in GATEWAY_OPERATIONS:
            await explore(url, path, method, 12)
    assert not engine.live


async def test_documents_list_the_endpoints_of_their_server(replica_server: RunningReplica) -> None:
    replica_paths = set((await replica_server.client.get("/openapi.json")).json()["paths"])
    model = ModelConfig(
        name="big", replicas=[ReplicaConfig(url="http://127.0.0.1:1", kind="openai")]
    )
    async with run_gateway_server(GatewayConfig(port=0, models=[model])) as (_, client):
        document = (await client.get("/openapi.json")).json()
        admin = (await client.get("/admin/openapi.json")).json()
        head = await client.head("/openapi.json", timeout=5)
    assert (head.status_code, head.content) == (200, b"")
    paths = set(document["paths"])
    own = {"/load", "/kv_events", "/drain", "/undrain"}
    assert own <= replica_paths
    shared = (replica_paths - own) | set(admin["paths"])
    assert {path for path, _ in GATEWAY_OPERATIONS} <= paths
    assert paths - shared - {"/replicas/{name}/metrics"} == {
        path
        for path in paths
        if path.startswith(("/api/", "/v1/responses", "/v1/messages", "/v1/conversations"))
    }
    assert "Argosy gateway" in document["info"]["title"]
    for path, operations in admin["paths"].items():
        assert document["paths"][path] == operations
    assert admin["components"]["schemas"].items() <= document["components"]["schemas"].items()
    operation_ids = [
        operation["operationId"]
        for operations in document["paths"].values()
        for operation in operations.values()
    ]
    assert len(operation_ids) == len(set(operation_ids))


def drop_optional_fields(body: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """Keep at most two optional fields of a body, so that some bodies pass validation."""
    required = {"model", "messages", "prompt", "tokens"}
    optional = sorted(body.keys() - required)
    kept = data.draw(st.sets(st.sampled_from(optional), max_size=2)) if optional else set()
    sparse_body = {name: value for name, value in body.items() if name in required | kept}
    if not body.keys() & required - {"model"} and data.draw(st.booleans()):
        sparse_body["input"] = "Hello"
    if "model" in body:
        sparse_body["model"] = MODEL
    if "messages" in body and data.draw(st.booleans()):
        sparse_body["messages"] = [{"role": "user", "content": "Hello"}]
        sparse_body["max_tokens"] = 9
    return sparse_body
