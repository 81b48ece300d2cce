"""Schemathesis checks that replica, gateway and admin API conform to their own OpenAPI documents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_client import run_gateway_server
from tests.support.migrated_store import write_migrated_file
from tests.support.organisations import AdminGateway
from tests.support.pooling_engine import EMBEDDER, pooling_engine
from tests.support.replica_servers import MODEL, RunningReplica, serve
from tests.support.stored_rollout import StoredRollout

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway.admin import list_endpoints
from argosy.store import StoreConfig

# The gateway's background tasks draw random numbers in the same process while Hypothesis generates examples.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
SHARED = (
    "chat complete listModels getModel tokenize detokenize tokenizerInfo health ready version metrics openapi "
    "embed pool classify score scoreV1 rerank rerankV1"
)
"""Ids of the operations of both servers."""
DIALECTS = (
    "createResponse countResponseTokens compactResponse getResponse deleteResponse cancelResponse listResponseInput "
    "createConversation getConversation updateConversation deleteConversation listConversationItems "
    "addConversationItems getConversationItem deleteConversationItem createMessage countMessageTokens "
    "ollamaVersion ollamaChat ollamaGenerate ollamaEmbed ollamaEmbeddings ollamaTags ollamaRunning ollamaShow "
    "createBatch listBatches getBatch cancelBatch createMessageBatch listMessageBatches getMessageBatch "
    "deleteMessageBatch cancelMessageBatch messageBatchResults "
    "cohereEmbed cohereRerank listChats getChat updateChat deleteChat listChatMessages "
    "createFile listFiles getFile deleteFile downloadFile createUpload addUploadPart completeUpload cancelUpload"
)
POOLING_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hello"},
    "/pooling": {"input": ["Hello"]},
    "/score": {"text_1": "Hello", "text_2": "Bye"},
    "/v1/score": {"queries": "Hello", "documents": ["Bye"]},
    "/rerank": {"query": "Hello", "documents": ["Bye"]},
    "/v1/rerank": {"query": "Hello", "documents": ["Bye"]},
    "/v2/rerank": {"query": "Hello", "documents": ["Bye"]},
    "/v2/embed": {"texts": ["Hello"]},
    "/api/embed": {"input": "Hello"},
    "/api/embeddings": {"prompt": "Hello"},
}
"""Bodies of models that pool. The last three are of the gateway only."""
OTHER_TASKS = {*POOLING_EXAMPLES, "/classify"}
ADAPTER_PATHS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""Endpoints that need adapters and the permission to change them."""
EXAMPLES = POOLING_EXAMPLES | {"/tokenize": {"prompt": "Hello"}}
"""Valid bodies by path, of which few are generated."""
Adjust = Callable[[schemathesis.Case[Any], st.DataObject], None]
"""Replaces some parameters or fields of a request by ones that may succeed."""


class Explorer:
    """Sends generated requests to a server, and checks the responses against the server's own document."""

    def __init__(self, client: httpx2.AsyncClient, path: str = "/openapi.json") -> None:
        self._client, self._path = client, path
        self.document: dict[str, Any] = {}
        self._schema: Any = None

    async def list_operations(self) -> list[tuple[str, str]]:
        """Return path and method of each operation. Those that delete come last, and parts before their whole."""
        response = await self._client.get(self._path)
        self.document = response.json()
        self._schema = schemathesis.openapi.from_dict(self.document)
        found = [(path, method) for path, each in self.document["paths"].items() for method in each]
        return sorted(found, key=lambda one: (one[1] == "delete", -len(one[0])))

    def operation_ids(self) -> set[str]:
        return {
            operation["operationId"]
            for path, operations in self.document["paths"].items()
            for operation in operations.values()
            if not path.startswith("/admin")
        }

    async def explore(
        self, path: str, method: str, num_requests: int, adjust: Adjust, *more: CheckFunction
    ) -> set[int]:
        """Send requests to an operation. Returns the statuses of the responses.

        Args:
            path: Path of the operation.
            method: Its method.
            num_requests: Number of requests with the default profile.
            adjust: Makes some requests valid.
            more: Checks besides `CHECKS`.
        """
        statuses: set[int] = set()
        base_url = str(self._client.base_url).rstrip("/")
        headers = {
            name: self._client.headers[name]
            for name in self._client.headers
            if name == "authorization"
        }

        def send_examples() -> None:
            operation = self._schema[path][method]

            @seed(20261120)
            @settings(
                max_examples=round(num_requests * settings().max_examples / 50),
                deadline=None,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(), data=st.data())
            def check(case: schemathesis.Case[Any], data: st.DataObject) -> None:
                adjust(case, data)
                response = case.call_and_validate(
                    base_url=base_url, headers=headers, checks=[*CHECKS, *more]
                )
                statuses.add(response.status_code)

            check()

        await asyncio.to_thread(send_examples)
        return statuses


def adjust_request(**known: str) -> Adjust:
    """Use the bodies that are known to be valid for a half, and parameters of the path that exist for a third."""

    def adjust(case: schemathesis.Case[Any], data: st.DataObject) -> None:
        if isinstance(case.body, dict):
            case.body = drop_optional_fields(case.body, data)
        if case.path in EXAMPLES and data.draw(st.booleans()):
            case.body = {"model": MODEL, **EXAMPLES[case.path]}
        for name in sorted(case.path_parameters.keys() & known.keys()):
            case.path_parameters[name] = data.draw(st.sampled_from([known[name], "x/y", "%00"]))

    return adjust


def drop_optional_fields(body: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """Keep at most two optional fields of a body, so that some bodies pass validation."""
    required = {"model", "messages", "prompt", "tokens", "items", "file", "data", "purpose"}
    required |= {"bytes", "filename", "mime_type", "part_ids"}
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
        sparse_body["stream"] = data.draw(st.booleans())
    return sparse_body


async def test_replica_conforms_to_its_openapi_document(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    explorer, adjust = Explorer(replica_server.client), adjust_request(model=MODEL)
    for path, method in await explorer.list_operations():
        if path not in OTHER_TASKS | ADAPTER_PATHS | {"/kv_events", "/drain", "/undrain"}:
            statuses = await explorer.explore(path, method, 15, adjust, unsupported_method)
            assert 200 in statuses, f"{path}: no example succeeded, so the document allows too much"
    assert explorer.operation_ids() == {
        *SHARED.split(),
        "rerankV2",
        "load",
        "followKvEvents",
        "drain",
        "undrain",
        *("sleep", "wakeUp", "isSleeping"),
        *("loadLoraAdapter", "unloadLoraAdapter"),
    }
    assert not engine.live


async def test_models_that_pool_conform_to_the_openapi_documents() -> None:
    async with serve(pooling_engine(EMBEDDER)) as replica:
        endpoint = ReplicaConfig(url=replica.url, name="one", model=MODEL)
        config = GatewayConfig(port=0, models=[ModelConfig(name=MODEL, replicas=[endpoint])])
        async with run_gateway_server(config) as (_, client):
            for explorer in (Explorer(replica.client), Explorer(client)):
                for path, method in await explorer.list_operations():
                    if path in POOLING_EXAMPLES:
                        adjust = adjust_request()
                        statuses = await explorer.explore(
                            path, method, 6, adjust, unsupported_method
                        )
                        assert 200 in statuses, path


async def test_gateway_conforms_to_its_openapi_document(
    replica_server: RunningReplica, engine: FakeEngine, tmp_path: Path
) -> None:
    url = write_migrated_file(tmp_path / "store.db")
    replica = ReplicaConfig(url=replica_server.url, name="one", model=MODEL)
    config = GatewayConfig(
        port=0,
        models=[ModelConfig(name=MODEL, replicas=[replica])],
        store=StoreConfig(url=url),
    )
    async with run_gateway_server(config) as (_, client):
        body: dict[str, Any] = {"model": MODEL, "input": "Hi", "background": True}
        response = (await client.post("/v1/responses", json=body)).json()["id"]
        body = {"items": [{"type": "message", "role": "user", "content": "Hi", "id": "msg_1"}]}
        conversation = (await client.post("/v1/conversations", json=body)).json()["id"]
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "store": True}
        chat = (await client.post("/v1/chat/completions", json=body)).json()["id"]
        form: dict[str, Any] = {"file": ("a", b"abc"), "purpose": (None, "batch")}
        file = (await client.post("/v1/files", files=form)).json()["id"]
        parents = {"responses": response, "chat": chat, "files": file}
        explorer = Explorer(client)
        for path, method in await explorer.list_operations():
            if not path.startswith("/admin") and path not in OTHER_TASKS | ADAPTER_PATHS:
                kind = path.removeprefix("/v1/").partition("/")[0]
                parent = parents.get(kind, conversation)
                adjust = adjust_request(model=MODEL, name="one", id=parent, item="msg_1")
                statuses = await explorer.explore(path, method, 8, adjust, unsupported_method)
                # No generated request is about an upload or a batch that exists.
                missing = ("/v1/uploads/", "/v1/batches", "/v1/messages/batches")
                assert 200 in statuses or path.startswith(missing), path
        admin = (await client.get("/admin/openapi.json")).json()
        head = await client.head("/openapi.json", timeout=5)
    assert (head.status_code, head.content) == (200, b"")
    ids = [*SHARED.split(), *DIALECTS.split(), "replicaMetrics"]
    ids += ["load_lora_adapter", "post_alerts", "unload_lora_adapter"]
    assert explorer.operation_ids() == {*ids}
    paths = explorer.document["paths"]
    assert admin["paths"].items() <= paths.items()
    schemas = explorer.document["components"]["schemas"]
    assert admin["components"]["schemas"].items() <= schemas.items()
    assert not engine.live


async def test_admin_api_conforms_to_its_openapi_document(admin_gateway: AdminGateway) -> None:
    store, client = admin_gateway.store, admin_gateway.client
    StoredRollout(store.fleets)
    client.headers |= admin_gateway.root_headers
    explorer = Explorer(client, "/admin/openapi.json")
    documented = await explorer.list_operations()
    assert {(method.upper(), path) for path, method in documented} == {
        (endpoint.method, endpoint.path) for endpoint in list_endpoints()
    }
    ids = [*(key.id for key in store.accounts.list_keys()), "absent", "\u0000"]
    ids += [project.id for project in store.accounts.list_projects()]
    ids += [organisation.id for organisation in store.accounts.list_organisations()]
    queries: dict[str, list[Any]] = {
        "revision": [1, 99],
        "wait_s": [0],
        "group_by": ["day,key", "", "x"],
    }

    def adjust(case: schemathesis.Case[Any], data: st.DataObject) -> None:
        if "id" in case.path_parameters:
            case.path_parameters["id"] = data.draw(st.sampled_from(ids))
        for name in sorted(case.query.keys() & queries.keys()):
            case.query[name] = data.draw(st.sampled_from(queries[name]))
        if case.path.endswith("/log"):
            case.query["replica"] = data.draw(st.sampled_from(["chat-1-0", "\u0000"]))
            case.query.pop("started_at", None)  # no run has begun then

    for path, method in documented:
        # Archiving or revoking would end the key of this test.
        if not path.endswith(("archive", "erase", "revoke")):
            statuses = await explorer.explore(path, method, 3, adjust)
            assert 200 in statuses or method != "get" or "{id}" in path, path
