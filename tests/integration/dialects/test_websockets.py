"""Responses and chats over a WebSocket, through the OpenAI client and the library `websockets`."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
import websockets
from openai.resources.responses.responses import AsyncResponsesConnection
from tests.integration.dialects.conftest import MODEL, DialectFleet
from tests.integration.test_parsed_output import THOUGHT
from tests.support.gateway_client import run_gateway_server
from tests.support.waiting import until
from websockets.asyncio.client import ClientConnection

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDS = {"response.completed", "response.incomplete", "response.failed", "error"}
CREATE = {"type": "response.create", "model": MODEL, "input": "Hi"}
FREE_TIMEOUT_S = 20.0
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def create(connection: AsyncResponsesConnection, **fields: Any) -> list[Any]:  # noqa: ANN401 - fields of a request
    """Create a response and return its events."""
    await connection.response.create(model=MODEL, **fields)
    events: list[Any] = []
    while not events or events[-1].type not in ENDS:
        events.append(await connection.recv())
    return events


def connect(fleet: DialectFleet, path: str, url: str = "", **headers: str) -> Any:  # noqa: ANN401 - the client's type
    """Connect the library's client with the fleet's key."""
    headers.setdefault("authorization", f"Bearer {fleet.key}")
    return websockets.connect(
        (url or fleet.url).replace("http", "ws") + path, additional_headers=headers
    )


async def receive(connection: ClientConnection, ends: Iterable[str] = ENDS) -> list[Any]:
    """Return the events of one response."""
    events: list[Any] = []
    while not events or events[-1]["type"] not in ends:
        events.append(json.loads(await connection.recv()))
    return events


async def test_responses_continue_each_other_without_store_and_survive_replica(
    fleet: DialectFleet,
) -> None:
    fleet.output, fleet.crash_after = THOUGHT + "Hello!", 2
    async with fleet.openai().responses.connect() as connection:
        first = await create(connection, input="Hi", store=False)
        assert [event.sequence_number for event in first] == list(range(len(first)))
        assert first[0].type == "response.created"
        response = first[-1].response
        assert (response.status, response.output_text) == ("completed", "Hello!")
        prompts = fleet.prompts()
        assert len(prompts) == 2, "the second replica resumed the response"
        second = await create(
            connection, input="And?", store=False, previous_response_id=response.id
        )
        assert second[-1].response.previous_response_id == response.id
        (prompt,) = fleet.prompts()
        assert "user: Hi" in prompt
        assert "assistant: Hello!\nuser: And?" in prompt
        (lost,) = await create(connection, input="x", store=False, previous_response_id=response.id)
        assert (lost.status, lost.error.code) == (400, "previous_response_not_found")
        assert lost.error.headers["x-request-id"].startswith("req_")
    rows = await fleet.take_rows(2)
    assert {row.status for row in rows} == {"completed"}
    assert len({row.request for row in rows}) == 2


async def test_failed_continuation_drops_last_response(fleet: DialectFleet) -> None:
    async with fleet.openai().responses.connect() as connection:
        response = (await create(connection, input="Hi", store=False))[-1].response
        chain: dict[str, Any] = {"store": False, "previous_response_id": response.id}
        (refused,) = await create(connection, input="x", tool_choice="required", **chain)
        assert refused.error.param == "tool_choice"
        (lost,) = await create(connection, input="x", **chain)
        assert lost.error.code == "previous_response_not_found"


async def test_stored_response_is_continued_on_other_connections(fleet: DialectFleet) -> None:
    client = fleet.openai()
    async with client.responses.connect() as connection:
        first = (await create(connection, input="Hi"))[-1].response
    assert (await client.responses.retrieve(first.id)).output_text == "Hello!"
    fleet.prompts()
    async with client.responses.connect() as connection:
        events = await create(connection, input="And?", previous_response_id=first.id)
    assert events[-1].type == "response.completed"
    assert "user: Hi" in fleet.prompts()[0]


async def test_response_without_output_prepares_next_one(fleet: DialectFleet) -> None:
    """Codex sends instructions and tools ahead this way."""
    async with fleet.openai().responses.connect() as connection:
        prepared = await create(
            connection, input="Hi", store=False, generate=False, instructions="Be brief."
        )
        response = prepared[-1].response
        assert (response.status, response.output) == ("completed", [])
        assert fleet.prompts() == []
        await create(connection, input="And?", store=False, previous_response_id=response.id)
    assert "user: Hi\nuser: And?" in fleet.prompts()[0]
    limited = fleet.accounts.project("limited")
    fleet.accounts.limit(limited, "requests", 1, "day")
    key = fleet.accounts.key(limited)
    await fleet.wait_for_key(key)
    body = json.dumps(CREATE | {"generate": False})
    async with connect(fleet, "/v1/responses", authorization=f"Bearer {key}") as connection:
        for expected in ("response.completed", "error"):
            await connection.send(body)
            events = await receive(connection)
            assert events[-1]["type"] == expected
    assert events[-1]["error"]["code"] == "rate_limit_exceeded"


async def test_idle_connection_keeps_no_message(fleet: DialectFleet) -> None:
    async with connect(fleet, "/v1/responses") as connection:
        message = json.dumps({"type": "unknown", "input": "x" * 8_000_000})
        tracemalloc.start()
        try:
            await connection.send(message)
            (error,) = await receive(connection)
            assert error["error"]["param"] == "type"
            async with asyncio.timeout(FREE_TIMEOUT_S):
                await until(lambda: tracemalloc.get_traced_memory()[0] < len(message) // 2)
        finally:
            tracemalloc.stop()


async def test_history_of_a_tenants_connections_is_bounded(
    fleet: DialectFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bound, responses without output would fill the memory at no cost."""
    monkeypatch.setattr("argosy.gateway.proxy.handlers.MAX_TENANT_PENDING_BYTES", 100_000)
    event = {"type": "response.create", "model": MODEL, "store": False, "generate": False}
    async with run_gateway_server(fleet.config) as (_, client):
        url = str(client.base_url).rstrip("/")

        async def prepare(connection: ClientConnection, **fields: str) -> Any:  # noqa: ANN401 - JSON value
            await connection.send(json.dumps(event | {"input": "x" * 60_000} | fields))
            return (await receive(connection))[-1]

        async with connect(fleet, "/v1/responses", url) as first:
            lost = (await prepare(first))["response"]["id"]
            async with connect(fleet, "/v1/responses", url) as second:
                kept = (await prepare(second))["response"]["id"]
                error = (await prepare(first, previous_response_id=lost))["error"]
                assert error["code"] == "previous_response_not_found"
                answer = await prepare(second, previous_response_id=kept, input="y")
                assert answer["type"] == "response.completed"
            await prepare(first)
            answer = await prepare(first, input="z" * 99_000)
            answer = await prepare(first, previous_response_id=answer["response"]["id"])
            assert answer["type"] == "response.completed"
            answer = await prepare(first, previous_response_id=answer["response"]["id"])
            assert answer["error"]["code"] == "previous_response_not_found"


async def test_steering_is_refused_and_acknowledgements_are_ignored(fleet: DialectFleet) -> None:
    async with fleet.openai().responses.connect() as connection:
        await connection.send_raw(b'{"type": "response.processed", "response_id": "resp_1"}')
        await connection.response.steer(input="stop", previous_response_id="resp_1")
        refused: Any = await connection.recv()
    assert (refused.type, refused.error.code) == ("response.steer.failed", "steering_not_supported")
    assert (refused.steer.input, refused.steer.previous_response_id) == ("stop", "resp_1")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("{", None),
        ('{"type": "session.update"}', "type"),
        ('{"type": "response.create"}', "input"),
        ('{"type": "response.create", "model": "big", "input": "x", "stream_id": "a"}', "stream_id"),
        ('{"type": "response.create", "model": "big", "input": "x", "background": true}', "background"),
        ('{"type": "response.create", "model": "none", "input": "x"}', "model"),
    ],
)  # fmt: skip
async def test_invalid_event_is_error_and_connection_goes_on(
    fleet: DialectFleet, message: str, param: str | None
) -> None:
    async with connect(fleet, "/v1/responses") as connection:
        await connection.send(message)
        (error,) = await receive(connection)
        assert (error["status"] // 100, error["error"]["param"]) == (4, param)
        await connection.send(json.dumps({"type": "response.create", "model": MODEL, "input": "x"}))
        assert (await receive(connection))[-1]["type"] == "response.completed"


async def test_chats_are_answered_in_turn(fleet: DialectFleet) -> None:
    async with connect(fleet, "/v1/chat/completions") as connection:
        await connection.send(json.dumps({**CHAT, "stream": True}))
        await connection.send(json.dumps({**CHAT, "model": "none"}))
        await connection.send(json.dumps(CHAT).encode())
        frames = [await connection.recv()]
        while frames[-1] != "[DONE]":
            frames.append(await connection.recv())
        chunks = [json.loads(frame) for frame in frames[:-1]]
        texts = [one["choices"][0]["delta"].get("content", "") for one in chunks]
        assert "".join(texts) == "Hello!"
        error = json.loads(await connection.recv())
        assert (error["status"], error["error"]["code"]) == (404, "model_not_found")
        whole = json.loads(await connection.recv())
        assert whole["choices"][0]["message"]["content"] == "Hello!"
    assert len(await fleet.take_rows(2)) == 2


async def test_disconnect_cancels_response(fleet: DialectFleet) -> None:
    fleet.hold(1)
    async with connect(fleet, "/v1/chat/completions") as connection:
        await connection.send(json.dumps({**CHAT, "stream": True}))
        await fleet.wait_held()
    (row,) = await fleet.take_rows(1)
    assert row.status == "cancelled"
    await until(lambda: not any(engine.live for engine in fleet.engines))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer wrong"}, 401),
        ({"origin": "https://elsewhere.example"}, 403),
        ({"sec-websocket-version": "12"}, 400),
    ],
)
async def test_handshake_is_refused(
    fleet: DialectFleet, headers: dict[str, str], status: int
) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        await connect(fleet, "/v1/responses", **headers)
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body)["error"]["message"]


async def test_draining_gateway_completes_response_and_closes(fleet: DialectFleet) -> None:
    fleet.hold(1)
    async with run_gateway_server(fleet.config) as (server, client):
        path = "/v1/chat/completions"
        idle = await connect(fleet, path, str(client.base_url).rstrip("/"))
        async with connect(fleet, path, str(client.base_url).rstrip("/")) as busy:
            await busy.send(json.dumps({**CHAT, "stream": True}))
            await fleet.wait_held()
            server.stop()
            await idle.wait_closed()
            assert idle.close_code == 1001
            fleet.release()
            frames = [frame async for frame in busy]
            assert frames[-1] == "[DONE]"
            assert busy.close_code == 1001
            await asyncio.wait_for(busy.wait_closed(), 30)
