"""Schemathesis checks that replica and gateway conform to their own OpenAPI documents."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
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
from tests.support.pooling_engine import EMBEDDER, pooling_engine
from tests.support.replica_servers import MODEL, RunningReplica, serve

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig

REPLICA = "one"

OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/tokenizer_info", "GET"),
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
    ("/v1/responses/input_tokens", "POST"),
    ("/v1/responses/compact", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/api/chat", "POST"),
    ("/api/generate", "POST"),
    ("/api/show", "POST"),
    ("/api/tags", "GET"),
    ("/api/ps", "GET"),
    ("/api/version", "GET"),
]
POOLING_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hello"},
    "/pooling": {"input": ["Hello"]},
    "/score": {"text_1": "Hello", "text_2": "Bye"},
    "/v1/score": {"queries": "Hello", "documents": ["Bye"]},
    "/rerank": {"query": "Hello", "documents": ["Bye"]},
    "/v1/rerank": {"query": "Hello", "documents": ["Bye"]},
    "/v2/rerank": {"query": "Hello", "documents": ["Bye"]},
}
"""Bodies of models that pool."""
GATEWAY_POOLING_EXAMPLES = POOLING_EXAMPLES | {
    "/v2/embed": {"texts": ["Hello"]},
    "/api/embed": {"input": "Hello"},
    "/api/embeddings": {"prompt": "Hello"},
}
EXAMPLES = GATEWAY_POOLING_EXAMPLES | {"/tokenize": {"prompt": "Hello"}}
"""Valid bodies by path, of which few are generated."""
STATE_OPERATIONS = [
    ("/v1/responses/{id}", "GET"),
    ("/v1/responses/{id}/input_items", "GET"),
    ("/v1/responses/{id}/cancel", "POST"),
    ("/v1/conversations", "POST"),
    ("/v1/conversations/{id}", "GET"),
    ("/v1/conversations/{id}", "POST"),
    ("/v1/conversations/{id}/items", "POST"),
    ("/v1/conversations/{id}/items", "GET"),
    ("/v1/conversations/{id}/items/{item}", "GET"),
    ("/v1/conversations/{id}/items/{item}", "DELETE"),
    ("/v1/conversations/{id}", "DELETE"),
    ("/v1/responses/{id}", "DELETE"),
]
"""Operations on stored responses and conversations. Those that delete come last."""
GATEWAY_OPERATIONS = [*OPERATIONS, ("/replicas/{name}/metrics", "GET"), *DIALECT_OPERATIONS]


SCALE = settings().max_examples / 50
"""Number of requests relative to that of the default profile."""


async def explore(url: str, path: str, method: str, num_requests: int, **known: str) -> None:
    """Send generated requests to an operation, and check the responses against the server's own document.

    Args:
        url: URL of the server.
        path: Path of the operation.
        method: Its method.
        num_requests: Number of requests with the default profile.
        known: Values of parameters in the path that exist.
    """
    known = {"model": MODEL, "name": REPLICA, **known}
    statuses: set[int] = set()

    def send_examples() -> None:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operation = schema[path][method]

        @seed(20261120)
        @settings(
            max_examples=round(num_requests * SCALE),
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(), data=st.data())
        def check(case: schemathesis.Case[Any], data: st.DataObject) -> None:
            if isinstance(case.body, dict):
                case.body = drop_optional_fields(case.body, data)
            if path in EXAMPLES and data.draw(st.booleans()):
                case.body = {"model": MODEL, **EXAMPLES[path]}
            for name in sorted(case.path_parameters.keys() & known.keys()):
                case.path_parameters[name] = data.draw(st.sampled_from([known[name], "x/y", "%00"]))
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


@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
async def test_models_that_pool_conform_to_the_openapi_documents() -> None:
    async with serve(pooling_engine(EMBEDDER)) as replica:
        for path in POOLING_EXAMPLES:
            await explore(replica.url, path, "POST", 6)
        endpoint = ReplicaConfig(url=replica.url, name=REPLICA, model=MODEL)
        config = GatewayConfig(port=0, models=[ModelConfig(name=MODEL, replicas=[endpoint])])
        async with run_gateway_server(config) as (_, client):
            for path in GATEWAY_POOLING_EXAMPLES:
                await explore(str(client.base_url).rstrip("/"), path, "POST", 6)


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


@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
async def test_stored_responses_conform_to_the_openapi_document(
    replica_server: RunningReplica, migrated: Path, tmp_path: Path
) -> None:
    shutil.copy(migrated, tmp_path / "store.db")
    config = GatewayConfig(
        port=0,
        models=[
            ModelConfig(
                name=MODEL,
                replicas=[ReplicaConfig(url=replica_server.url, name=REPLICA, model=MODEL)],
            )
        ],
        store=StoreConfig(url=f"sqlite:///{tmp_path}/store.db"),
    )
    async with run_gateway_server(config) as (_, client):
        url = str(client.base_url).rstrip("/")
        body: dict[str, Any] = {"model": MODEL, "input": "Hi", "background": True}
        response = (await client.post("/v1/responses", json=body)).json()
        item = {"type": "message", "role": "user", "content": "Hi", "id": "msg_1"}
        body = {"items": [item]}
        conversation = (await client.post("/v1/conversations", json=body)).json()
        for path, method in STATE_OPERATIONS:
            parent = response if path.startswith("/v1/responses") else conversation
            await explore(url, path, method, 12, id=parent["id"], item="msg_1")


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
    assert {path for path, _ in [*GATEWAY_OPERATIONS, *STATE_OPERATIONS]} <= paths
    assert paths - shared - {"/replicas/{name}/metrics"} == {
        path
        for path in paths
        if path.startswith(
            ("/api/", "/v1/responses", "/v1/messages", "/v1/conversations", "/v2/embed")
        )
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
    required = {"model", "messages", "prompt", "tokens", "items"}
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
