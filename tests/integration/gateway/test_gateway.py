"""The gateway in front of scripted servers: what passes, what is tried elsewhere, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from structlog.testing import capture_logs
from tests.support.scripted_server import Asked, Rough, rough_server

from argosy.gateway import (
    GatewayConfig,
    GatewayServer,
    ModelConfig,
    QueueConfig,
    ReplicaConfig,
    Timeouts,
)
from argosy.gateway.pool.prober import Prober
from argosy.policy import RoutingPolicyName

BODY = {"model": "big", "prompt": "Say something", "max_tokens": 3}
STREAM = BODY | {"stream": True}
QUICK = Timeouts(first_token_timeout_s=5.0, stream_idle_timeout_s=5.0, failover_timeout_s=0.5)


def config_of(
    replicas: Sequence[Rough], max_requests: int = 256, routing: RoutingPolicyName = "round-robin"
) -> GatewayConfig:
    """The model "big" on these servers."""
    behind = [
        ReplicaConfig(url=r.url, kind="openai", model="rough", max_requests=max_requests)
        for r in replicas
    ]
    model = ModelConfig(name="big", aliases=("default",), routing=routing, replicas=behind)
    return GatewayConfig(port=0, models=[model], timeouts=QUICK)


@contextlib.asynccontextmanager
async def gateway(
    *replicas: Rough,
    timeouts: Timeouts = QUICK,
    keep_alive_s: float = 15.0,
    body_limit_bytes: int = 1 << 20,
    queue: QueueConfig = QueueConfig(),  # noqa: B008 - immutable
    max_requests: int = 256,
    routing: RoutingPolicyName = "round-robin",
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a gateway in front of these servers."""
    config = msgspec.structs.replace(
        config_of(replicas, max_requests, routing),
        timeouts=timeouts,
        sse_keepalive_interval_s=keep_alive_s,
        body_limit_bytes=body_limit_bytes,
        queue=queue,
    )
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(config, url.set_result)
    running = asyncio.create_task(server.run())
    try:
        async with httpx2.AsyncClient(base_url=await url, timeout=30) as client:
            yield client
    finally:
        server.stop()
        await running


async def whole(asked: Asked) -> None:
    choice = {"index": 0, "text": "something", "finish_reason": "stop"}
    asked.json(200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]})


async def broken(asked: Asked) -> None:
    asked.json(500, {"error": {"message": "out of order"}})


async def events(client: httpx2.AsyncClient, body: dict[str, Any]) -> list[str]:
    """The data of a stream's events."""
    answer = await client.post("/v1/completions", json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return [
        block.removeprefix("data: ")
        for block in answer.text.strip().split("\n\n")
        if block.startswith("data: ")
    ]


async def test_a_request_passes_with_the_replicas_own_model_name() -> None:
    async with rough_server(whole) as replica, gateway(replica) as client:
        answer = await client.post("/v1/completions", json=BODY | {"model": "default", "top_k": 4})
        assert answer.json()["choices"][0]["text"] == "something"
        assert answer.headers["x-request-id"]
        assert replica.asked[0].body | {"seed": 0} == BODY | {
            "model": "rough",
            "top_k": 4,
            "seed": 0,
        }


async def test_streams_pass_event_by_event() -> None:
    async with rough_server() as replica, gateway(replica) as client:
        *chunks, done = await events(client, BODY)
        assert [json.loads(chunk)["choices"][0]["text"] for chunk in chunks] == [" 0", " 1", " 2"]
        assert done == "[DONE]"


async def test_a_piece_is_passed_on_before_the_next_comes() -> None:
    more = asyncio.Event()

    async def slow(asked: Asked) -> None:
        asked.stream()
        asked.say("first")
        await more.wait()
        asked.say("last", "stop")
        asked.end()

    async with (
        rough_server(slow) as replica,
        gateway(replica) as client,
        client.stream("POST", "/v1/completions", json=STREAM) as answer,
    ):
        pieces = answer.aiter_text()
        assert "first" in await anext(pieces)
        more.set()
        assert "last" in "".join([piece async for piece in pieces])


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled"])
async def test_a_whole_answer_that_was_broken_off_is_asked_of_another(reason: str) -> None:
    async def leaving(asked: Asked) -> None:
        choice = {"index": 0, "text": "some", "finish_reason": reason}
        asked.json(200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]})

    async with (
        rough_server(leaving) as one,
        rough_server(whole) as two,
        gateway(one, two) as client,
    ):
        for _ in range(2):
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.json()["choices"][0]["text"] == "something"
        assert one.asked


async def test_the_requests_own_fault_is_told_and_not_tried_elsewhere() -> None:
    async def refuse(asked: Asked) -> None:
        asked.json(422, {"error": {"message": "temperature is too high", "code": "too_hot"}})

    async with (
        rough_server(refuse) as one,
        rough_server(refuse) as two,
        gateway(one, two) as client,
    ):
        for body in (BODY, STREAM):
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 422
            assert answer.json()["error"]["code"] == "too_hot"
        assert len(one.asked) + len(two.asked) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_replica_costs_nothing_when_there_is_another(stream: bool) -> None:
    good = whole if not stream else Rough().script
    async with rough_server(broken) as one, rough_server(good) as two, gateway(one, two) as client:
        for _ in range(4):
            answer = await client.post("/v1/completions", json=BODY | {"stream": stream})
            assert answer.status_code == 200, answer.text
        assert one.asked
        assert len(two.asked) == 4


async def test_when_all_are_full_the_client_is_told_so() -> None:
    async def full(asked: Asked) -> None:
        asked.json(429, {"error": {"message": "slow down"}})

    async with rough_server(full) as one, gateway(one) as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert answer.headers["retry-after"] == "1"


async def test_a_replica_that_refuses_the_gateways_own_key_is_not_the_clients_affair() -> None:
    async def locked(asked: Asked) -> None:
        asked.json(401, {"error": {"message": "Incorrect API key provided: sk-proj-abcd"}})

    async with rough_server(locked) as one, gateway(one) as client:
        for body in (BODY, STREAM):
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 502
            assert "sk-proj" not in answer.text


async def test_when_all_are_broken_the_refusal_says_when_to_come_back() -> None:
    async with rough_server(broken) as one, gateway(one) as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "upstream_failed"
        assert answer.headers["retry-after"] == "1"


async def test_a_stream_that_is_cut_and_cannot_be_carried_on_ends_with_an_error_event() -> None:
    async def cut(asked: Asked) -> None:
        asked.stream()
        asked.say("half an")
        asked.writer.close()

    async with rough_server(cut) as replica, gateway(replica) as client:
        first, last = await events(client, BODY)
        assert "half an" in first
        assert json.loads(last)["error"]["code"] == "upstream_failed"


async def test_a_stream_that_ends_early_but_politely_is_no_answer_either() -> None:
    async def polite(asked: Asked) -> None:
        asked.stream()
        asked.say("half an")
        asked.writer.write(b"0\r\n\r\n")

    async with rough_server(polite) as replica, gateway(replica) as client:
        *_, last = await events(client, BODY)
        assert "error" in json.loads(last)
        sdk = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError):
            async for _ in await sdk.completions.create(model="big", prompt="x", stream=True):
                pass
        await sdk.close()


async def test_a_client_that_goes_away_is_noticed_by_the_replica_at_once() -> None:
    gone = asyncio.Event()

    async def forever(asked: Asked) -> None:
        asked.stream()
        with contextlib.suppress(ConnectionError):
            while not asked.writer.is_closing():
                asked.say("on and on")
                await asked.writer.drain()
                await asyncio.sleep(0.01)
        gone.set()

    async with rough_server(forever) as replica, gateway(replica) as client:
        async with client.stream("POST", "/v1/completions", json=STREAM) as answer:
            await anext(answer.aiter_bytes())
        await asyncio.wait_for(gone.wait(), 10)


async def test_clients_that_go_away_are_not_held_against_the_replica() -> None:
    async def endless(asked: Asked) -> None:
        if asked.body.get("stream"):
            asked.stream()
            asked.say("on and on")
            await asyncio.sleep(3600)
        await whole(asked)

    async with (
        rough_server(endless) as one,
        rough_server(endless) as two,
        gateway(one, two) as client,
    ):
        for _ in range(8):
            async with client.stream("POST", "/v1/completions", json=STREAM) as answer:
                await anext(answer.aiter_bytes())
        for _ in range(4):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert len(one.asked) == len(two.asked) == 6


async def test_a_stalled_replica_is_given_up() -> None:
    async def stalled(asked: Asked) -> None:
        asked.stream()
        asked.say("and then")
        await asyncio.sleep(3600)

    timeouts = Timeouts(
        first_token_timeout_s=0.5, stream_idle_timeout_s=0.5, failover_timeout_s=0.2
    )
    async with rough_server(stalled) as replica, gateway(replica, timeouts=timeouts) as client:
        *_, last = await events(client, BODY)
        assert json.loads(last)["error"]["code"] == "upstream_failed"


async def test_an_idle_stream_shows_that_somebody_is_there() -> None:
    more = asyncio.Event()
    timeouts = Timeouts(
        first_token_timeout_s=30.0, stream_idle_timeout_s=0.1
    )  # the head is no token

    async def thinking(asked: Asked) -> None:
        asked.stream()
        await more.wait()
        asked.say("well", "stop")
        asked.end()

    async with (
        rough_server(thinking) as replica,
        gateway(replica, timeouts=timeouts, keep_alive_s=0.2) as client,
        client.stream("POST", "/v1/completions", json=STREAM) as answer,
    ):
        pieces = answer.aiter_text()
        assert await anext(pieces) == ": keep-alive\n\n"
        more.set()
        assert "well" in "".join([piece async for piece in pieces])


async def test_http_1_0_gets_a_stream_without_chunks() -> None:
    async with rough_server() as replica, gateway(replica) as client:
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        body = json.dumps(STREAM).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert rest.startswith(b"data: ")
        assert rest.endswith(b"data: [DONE]\n\n")
        writer.close()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'{"prompt": "x"}', 400, "model"),
        (b'{"model": "big"}', 400, "prompt"),
        (b'{"model": 3, "prompt": "x"}', 400, "model"),
        (b'{"model": "big", "prompt": "x", "max_tokens": "many"}', 400, "max_tokens"),
        (b'{"model": "small", "prompt": "x"}', 404, "model"),
        (b'{"model": "big", "prompt": "' + b"x" * 2000 + b'"}', 413, None),
    ],
)
async def test_what_the_gateway_itself_refuses(body: bytes, status: int, param: str | None) -> None:
    async with rough_server() as replica, gateway(replica, body_limit_bytes=1000) as client:
        answer = await client.post("/v1/completions", content=body)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"]
        assert not replica.asked


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/chat/completions", "Use '/v1/chat/completions'"),
        ("/v1/v1/models/big", "Use '/v1/models/big'"),
        ("/v1/models/", "Use '/v1/models', without a slash at its end"),
        (
            "/v1/responses",
            "Configure the client to use chat completions at '/v1/chat/completions'",
        ),
        ("/responses", "Configure the client to use chat completions"),
        ("/v1/responses/resp_1", "Configure the client to use chat completions"),
        ("/v1/messages", "Configure the client to use chat completions"),
        ("/v1/messages/count_tokens", "Configure the client to use chat completions"),
        ("/v1/", "See /openapi.json"),
        ("/v1/embeddings", "See /openapi.json"),
        ("/nowhere", "See /openapi.json"),
    ],
)
async def test_a_wrong_path_is_told_what_is_right(path: str, remedy: str) -> None:
    async with rough_server() as replica, gateway(replica) as client:
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert remedy in answer.json()["error"]["message"]


async def test_models_and_what_is_not_there() -> None:
    async with rough_server() as replica, gateway(replica) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["big", "default"]
        assert (await client.get("/v1/models/big")).json()["id"] == "big"
        assert (await client.get("/v1/models/small")).status_code == 404
        assert (await client.get("/v1/completions")).status_code == 405


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_replicas_die_of_does_not_go_to_all_of_them(stream: bool) -> None:
    async def dies(asked: Asked) -> None:
        asked.writer.transport.abort()

    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(rough_server(dies)) for _ in range(6)]
        client = await stack.enter_async_context(gateway(*replicas))
        answer = await client.post("/v1/completions", json=BODY | {"stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")
    assert sum(bool(replica.asked) for replica in replicas) == 4


async def test_sessions_stay_at_a_replica_where_the_rule_is_hash() -> None:
    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(rough_server(whole)) for _ in range(3)]
        client = await stack.enter_async_context(gateway(*replicas, routing="hash"))

        async def ask(fields: dict[str, str], headers: dict[str, str]) -> int:
            before = [len(replica.asked) for replica in replicas]
            prompt = {"prompt": f"{next(prompts)}"}
            asked = BODY | prompt | fields
            answer = await client.post("/v1/completions", json=asked, headers=headers)
            assert answer.status_code == 200
            after = [len(replica.asked) for replica in replicas]
            return [a - b for a, b in zip(after, before, strict=True)].index(1)

        prompts = itertools.count()
        went = {}
        for session in map(str, range(16)):
            ways: list[tuple[dict[str, str], dict[str, str]]] = [
                ({"session_id": session}, {"x-session-affinity": "another"}),
                ({"prompt_cache_key": "another"}, {"x-session-affinity": session}),
                ({"prompt_cache_key": session}, {}),
            ]
            (went[session],) = {await ask(*way) for way in ways}
    assert set(went.values()) == {0, 1, 2}


async def test_a_gateway_that_leaves_answers_what_runs_and_nothing_after() -> None:
    """However busy the connections are that it has."""
    gate = Gate()
    async with rough_server(gate) as replica:
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = GatewayServer(config_of([replica]), url.set_result)
        running = asyncio.create_task(server.run())
        async with httpx2.AsyncClient(base_url=await url, timeout=30) as client:
            assert (await client.get("/health")).status_code == 200  # whose connection is kept
            asked = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await gate.asked.acquire()
            server.stop()
            with contextlib.suppress(httpx2.TransportError):
                while (await client.get("/health")).is_success:
                    pass  # it was answered for as long as it asked
            gate.open.release()
            answer = await asked
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            await running


@pytest.mark.parametrize("stream", [False, True])
async def test_who_is_still_answered_when_a_gateway_must_leave_is_told(*, stream: bool) -> None:
    begun = asyncio.Event()

    async def endless(asked: Asked) -> None:
        if stream:
            asked.stream()
            asked.say("first")
        begun.set()
        await asyncio.Event().wait()

    async with rough_server(endless) as replica:
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = GatewayServer(config_of([replica]), url.set_result)
        running = asyncio.create_task(server.run())
        async with httpx2.AsyncClient(base_url=await url, timeout=30) as client:
            body = BODY | {"stream": stream}
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            await begun.wait()
            server.stop()
            server.stop()
            answer = await asked
        assert answer.status_code == (200 if stream else 503)
        assert '"code":"draining"' in answer.text
        await running


# --- the queue -----------------------------------------------------------------------------------


class Gate:
    """A server's script that answers only when told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)
        self.open = asyncio.Semaphore(0)

    async def __call__(self, asked: Asked) -> None:
        self.asked.release()
        await self.open.acquire()
        await whole(asked)


async def test_a_request_waits_in_the_gateway_until_a_replica_has_room() -> None:
    gate = Gate()
    async with rough_server(gate) as replica, gateway(replica, max_requests=1) as client:
        posts = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(4)]
        for _ in posts:
            await gate.asked.acquire()
            gate.open.release()
        assert [answer.status_code for answer in await asyncio.gather(*posts)] == [200] * 4
        assert replica.most_at_once == 1


async def test_a_full_queue_and_a_long_wait_are_refused_with_the_time_to_come_back() -> None:
    gate, queue = Gate(), QueueConfig(max_requests=1, timeout_s=0.3)
    async with (
        rough_server(gate) as replica,
        gateway(replica, max_requests=1, queue=queue) as client,
    ):
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await gate.asked.acquire()
        refused = await asyncio.gather(
            *(client.post("/v1/completions", json=BODY) for _ in range(2))
        )
        assert [answer.status_code for answer in refused] == [429, 429]
        assert {answer.json()["error"]["code"] for answer in refused} == {"overloaded"}
        assert all(answer.headers["retry-after-ms"] for answer in refused)
        gate.open.release()
        assert (await running).status_code == 200


async def test_what_cannot_be_looked_after_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks(self: Prober) -> None:
        raise RuntimeError(f"a bug: {self}")

    monkeypatch.setattr(Prober, "run", breaks)
    with capture_logs() as logs:
        async with rough_server(whole) as replica, gateway(replica) as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    (told,) = (line for line in logs if line["event"] == "background_task_failed")
    assert told["log_level"] == "error"


EMPTY = 'argosy_gateway_queue_depth{model="big"} 0.0'


async def test_who_leaves_the_queue_frees_its_place() -> None:
    gate = Gate()
    async with rough_server(gate) as replica, gateway(replica, max_requests=1) as client:
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await gate.asked.acquire()
        for stream in (False, True):
            with pytest.raises(httpx2.ReadTimeout):
                await client.post(
                    "/v1/completions",
                    json=BODY | {"stream": stream},
                    timeout=httpx2.Timeout(30, read=0.2),
                )
        while EMPTY not in (await client.get("/metrics")).text:
            pass  # they are asked whether they have left
        gate.open.release()
        gate.open.release()
        assert (await running).status_code == 200
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert len(replica.asked) == 2
