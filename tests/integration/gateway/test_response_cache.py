"""Response cache in a gateway: what hits, what never does, equal requests at once, and damaged or missing stores."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, listening
from tests.support.gateway_client import run_gateway_server
from tests.support.gateway_processes import open_organisation
from tests.support.native_upstream import (
    EventEncoder,
    NativeScript,
    NativeUpstream,
    continue_call,
    start_call,
)
from tests.support.services import running_redis

from argosy.deployment import (
    AuthConfig,
    CacheRule,
    ContentRule,
    GatewayConfig,
    LimitsConfig,
    ModelConfig,
    ReplicaConfig,
)
from argosy.protocol import SSE_DONE, format_event
from argosy.store import (
    CachedResponse,
    IdempotencyStore,
    InFlightClaim,
    Price,
    StoreConfig,
    create_idempotency_store,
)

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tell me"}]
BODY: dict[str, Any] = {"model": "big", "messages": MESSAGES, "temperature": 0, "max_tokens": 50}


@contextlib.asynccontextmanager
async def caching_gateway(
    *rules: CacheRule,
    replica: FakeUpstream | None = None,
    kind: str = "argosy",
    **config: Any,  # noqa: ANN401
) -> AsyncIterator[tuple[httpx2.AsyncClient, FakeUpstream]]:
    if replica is None:
        replica = NativeUpstream()
        replica.native_script = NativeScript(
            deltas=[{"content": each} for each in ("Hel", "lo ", "jo@example.com")]
        )
    async with listening(replica):
        entry = ReplicaConfig(url=replica.url, kind=kind, model="m")  # type: ignore[arg-type]
        settings = GatewayConfig(
            port=0,
            models=[ModelConfig(name="big", aliases=("other",), replicas=[entry])],
            cache_rules=list(rules or [CacheRule(name="all")]),
            **config,
        )
        async with run_gateway_server(settings) as (_, client):
            yield client, replica


def count(replica: FakeUpstream) -> int:
    """Return the number of requests that a replica has computed."""
    return sum("messages" in each.body for each in replica.requests)


async def ask(
    client: httpx2.AsyncClient,
    headers: dict[str, str] | None = None,
    **fields: Any,  # noqa: ANN401
) -> httpx2.Response:
    response = await client.post(CHAT, json=BODY | fields, headers=headers)
    assert response.status_code == 200, response.text
    return response


async def test_equal_requests_get_the_same_answer_in_every_form() -> None:
    async with caching_gateway() as (client, replica):
        first = await ask(client)
        assert first.headers["x-argosy-cache"] == "miss"
        second = await ask(client, user="somebody", metadata={"a": "b"})
        assert (second.headers["x-argosy-cache"], second.headers["age"]) == ("hit", "0")
        one, two = first.json(), second.json()
        assert one.pop("id") != two.pop("id")
        assert one.pop("created") <= two.pop("created")
        assert one == two
        stream = await ask(client, stream=True, stream_options={"include_usage": True})
        chunks = [
            json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")
        ]
        assert (
            "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks[:-1])
            == "Hello jo@example.com"
        )
        assert chunks[-1]["usage"]["completion_tokens"] == one["usage"]["completion_tokens"]
        assert len({each["id"] for each in chunks}) == 1
        assert stream.text.endswith("data: [DONE]\n\n")
        response = await client.post("/v1/responses", json={"model": "big", "input": "Tell me", "temperature": 0,
                                                             "max_output_tokens": 50, "store": False})  # fmt: skip
        assert response.json()["output"][0]["content"][0]["text"] == "Hello jo@example.com"
        assert count(replica) <= 2
        explanation = await client.get(f"/admin/requests/{second.headers['x-argosy-request']}")
        (row,) = explanation.json()["cache"]
        assert row.pop("saved_s") >= 0
        assert row.pop("age_s") >= 0
        assert row == {"rule": "all", "result": "hit", "saved_nano_dollars": 0}
        assert explanation.json()["tokens"]["output"] == one["usage"]["completion_tokens"]
        assert "argosy_gateway_cache_requests_total" in (await client.get("/metrics")).text


RICH: dict[str, Any] = BODY | {
    "messages": [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "more"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "response_format": {"type": "json_object"},
    "stop": ["x", "y"],
    "seed": 7,
    "top_p": 0.5,
    "logprobs": False,
    "logit_bias": {"1": 2},
    "a_later_parameter": [1, None],
}  # fmt: skip


def mutate(value: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield each value that differs from a JSON value in one place."""
    match value:
        case dict():
            for name, each in value.items():
                yield {key: other for key, other in value.items() if key != name}
                yield from ({**value, name: other} for other in mutate(each))
        case list():
            yield [*value, *value[-1:]]
            for index, each in enumerate(value):
                yield value[:index] + value[index + 1 :]
                yield from ([*value[:index], other, *value[index + 1 :]] for other in mutate(each))
        case bool():
            yield not value
        case str():
            yield value + " "
        case int() | float():
            yield value + 1
        case _:
            yield 0


async def test_a_request_that_differs_in_one_place_never_hits() -> None:
    async with caching_gateway(CacheRule(with_tools=True, sampled=True)) as (client, _):
        assert (await ask(client, **RICH)).headers["x-argosy-cache"] == "miss"
        results = Counter[str]()
        for body in mutate(RICH):
            if "model" in body:
                response = await client.post(CHAT, json=body)
                results[response.headers.get("x-argosy-cache", "refused")] += 1
        assert set(results) == {"miss", "refused"}
        assert results["miss"] > 60
        shuffled = dict(reversed(RICH.items()))
        assert (await ask(client, **shuffled)).headers["x-argosy-cache"] == "hit"


@pytest.mark.parametrize(
    ("fields", "headers", "rule", "expected"),
    [
        ({"temperature": 1}, {}, CacheRule(), "bypass"),
        ({"temperature": 1, "seed": 3}, {}, CacheRule(), "hit"),
        ({"temperature": 1}, {}, CacheRule(sampled=True), "hit"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, {}, CacheRule(), "bypass"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, {}, CacheRule(with_tools=True), "hit"),
        ({}, {"cache-control": "no-store"}, CacheRule(), "bypass"),
        ({}, {"cache-control": "no-cache"}, CacheRule(), "miss"),
        ({}, {}, CacheRule(headers={"x-cache": "1"}), None),
    ],
)  # fmt: skip
async def test_rules_and_headers(
    fields: dict[str, Any], headers: dict[str, str], rule: CacheRule, expected: str | None
) -> None:
    async with caching_gateway(rule) as (client, replica):
        for _ in range(2):
            response = await ask(client, headers, **fields)
        assert response.headers.get("x-argosy-cache") == expected
        assert count(replica) == (1 if expected == "hit" else 2)


async def test_only_complete_answers_are_kept() -> None:
    async with caching_gateway() as (client, replica):
        assert isinstance(replica, NativeUpstream)
        for reason in ("length", "content_filter"):
            replica.native_script = NativeScript(deltas=[{"content": "a"}], finish_reason=reason)
            for _ in range(2):
                assert (await ask(client)).headers["x-argosy-cache"] == "miss"
        call = [start_call(0, "f"), *(continue_call(0, each) for each in '{"a": 1}')]
        replica.native_script = NativeScript(deltas=call, finish_reason="tool_calls")
        answers = [(await ask(client)).json()["choices"] for _ in range(2)]
        assert answers[0] == answers[1]
        assert count(replica) == 5


class GatedReplica(NativeUpstream):
    """Replica that sends its first token, waits for the gate, and goes on or fails."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__(
            native_script=NativeScript(deltas=[{"content": each} for each in ("Hel", "lo")])
        )
        self.gate = asyncio.Event()
        self.failures = failures
        """Requests that fail at the gate."""

    async def _stream(self, request: UpstreamRequest) -> None:
        encoder = EventEncoder(request)
        if self.failures:
            await self.gate.wait()
            self.failures -= 1
            request.send_json(500, {"error": {"message": "broken"}})
            return
        request.start_stream()
        for number in range(3):
            request.send_chunk(encoder.encode_token(self.native_script, number))
            await request.writer.drain()
            await self.gate.wait()
        request.send_chunk(SSE_DONE)
        request.send_chunk(b"")


async def wait_in_flight(client: httpx2.AsyncClient, expected: int) -> None:
    """Wait until a gateway has this number of requests beside that for its metrics."""
    line = f"argosy_gateway_requests_in_flight {expected + 1}.0\n"
    while line not in (await client.get("/metrics")).text:  # noqa: ASYNC110 - the gateway's own count
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def open_crowd(*clients: httpx2.AsyncClient) -> AsyncIterator[list[httpx2.AsyncClient]]:
    """Open clients of the same gateways with any number of connections."""
    limits = httpx2.Limits(max_connections=None)
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                httpx2.AsyncClient(base_url=each.base_url, limits=limits, timeout=60)
            )
            for each in clients
        ]


async def read_text(lines: AsyncIterator[str]) -> str:
    """Read a stream up to its next text."""
    async for line in lines:
        if line.startswith("data: {"):
            text = json.loads(line[6:])["choices"][0]["delta"].get("content")
            if text:
                return str(text)
    return ""


async def test_200_equal_requests_at_once_are_computed_once() -> None:
    replica = GatedReplica()
    async with caching_gateway(replica=replica) as (client, _), open_crowd(client) as (crowd,):
        asked = [asyncio.create_task(ask(crowd, stream=each % 2 == 1)) for each in range(200)]
        await wait_in_flight(client, 200)
        replica.gate.set()
        responses = await asyncio.gather(*asked)
        results = Counter(each.headers["x-argosy-cache"] for each in responses)
        assert results == {"miss": 1, "joined": 199}
        assert count(replica) == 1


@pytest.mark.parametrize("is_redis_lost", [False, True])
async def test_gateways_with_a_common_redis_compute_equal_requests_once(
    is_redis_lost: bool,
) -> None:
    replica = GatedReplica()
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(running_redis())
        limits = LimitsConfig(redis=server.url)
        first, _ = await stack.enter_async_context(caching_gateway(replica=replica, limits=limits))
        entry = ReplicaConfig(url=replica.url, kind="argosy", model="m")
        config = GatewayConfig(port=0, models=[ModelConfig(name="big", replicas=[entry])],
                               cache_rules=[CacheRule(name="all")], limits=limits)  # fmt: skip
        _, second = await stack.enter_async_context(run_gateway_server(config))
        if is_redis_lost:
            server.process.kill()
        crowds = await stack.enter_async_context(open_crowd(first, second))
        asked = [asyncio.create_task(ask(crowds[each % 2])) for each in range(20)]
        await asyncio.gather(*(wait_in_flight(each, 10) for each in (first, second)))
        replica.gate.set()
        responses = await asyncio.gather(*asked)
        assert {each.json()["choices"][0]["message"]["content"] for each in responses} == {"Hello"}
        results = Counter(each.headers["x-argosy-cache"] for each in responses)
        if not is_redis_lost:
            assert count(replica) == 1
            assert results == {"miss": 1, "joined": 19 - results["hit"], "hit": results["hit"]}
        else:  # each gateway has its own
            assert count(replica) == 2
            assert results == {"miss": 2, "joined": 18}


async def test_others_stream_along_when_the_first_client_leaves() -> None:
    replica = GatedReplica()
    async with caching_gateway(replica=replica) as (client, _), open_crowd(client) as (crowd,):
        body = BODY | {"stream": True}
        async with contextlib.AsyncExitStack() as others:
            streams = []
            async with crowd.stream("POST", CHAT, json=body) as first:
                assert await read_text(first.aiter_lines()) == "Hel"
                for _ in range(2):
                    stream = crowd.stream("POST", CHAT, json=body)
                    response = await others.enter_async_context(stream)
                    assert response.headers["x-argosy-cache"] == "joined"
                    lines = response.aiter_lines()
                    assert await read_text(lines) == "Hel"
                    streams.append(lines)
            explanation = first.headers["x-argosy-request"]
            replica.gate.set()
            assert [await read_text(each) for each in streams] == ["lo", "lo"]
            assert [[line async for line in each][-2] for each in streams] == ["data: [DONE]"] * 2
        assert (await ask(client)).headers["x-argosy-cache"] == "hit"
        assert count(replica) == 1
        status = (await client.get(f"/admin/requests/{explanation}")).json()["status"]
        assert status == "completed"


async def test_the_last_client_that_leaves_ends_the_computation() -> None:
    replica = GatedReplica()
    async with caching_gateway(replica=replica) as (client, _), open_crowd(client) as (crowd,):
        asked = [asyncio.create_task(ask(crowd)) for _ in range(3)]
        await wait_in_flight(client, 3)
        for each in asked:
            each.cancel()
        await wait_in_flight(client, 0)
        replica.gate.set()
        assert (await ask(client)).headers["x-argosy-cache"] == "miss"
        assert count(replica) == 2


@pytest.mark.parametrize(("failures", "computed", "served"), [(2, 3, 18), (9, 3, 0)])
async def test_others_compute_in_turn_if_the_first_one_fails(
    failures: int, computed: int, served: int
) -> None:
    replica = GatedReplica(failures)
    async with (
        caching_gateway(replica=replica, max_failed_attempts=1) as (client, _),
        open_crowd(client) as (crowd,),
    ):
        asked = [asyncio.create_task(crowd.post(CHAT, json=BODY)) for _ in range(20)]
        await wait_in_flight(client, 20)
        replica.gate.set()
        statuses = Counter([(await each).status_code for each in asked])
        assert statuses[200] == served
        assert count(replica) == computed


async def test_others_receive_no_part_of_an_answer_that_another_model_gives() -> None:
    """The answer is not kept, so that they would wait for an end that does not come."""
    weak, spare = GatedReplica(failures=9), GatedReplica()
    spare.gate.set()
    async with contextlib.AsyncExitStack() as stack:
        models = []
        for name, replica, fallbacks in (("big", weak, ("spare",)), ("spare", spare, ())):
            await stack.enter_async_context(listening(replica))
            entry = ReplicaConfig(url=replica.url, kind="argosy", model="m")
            models.append(ModelConfig(name=name, replicas=[entry], fallback_models=fallbacks))
        config = GatewayConfig(port=0, models=models, cache_rules=[CacheRule(model="big")],
                               max_failed_attempts=1)  # fmt: skip
        _, client = await stack.enter_async_context(run_gateway_server(config))
        (crowd,) = await stack.enter_async_context(open_crowd(client))
        asked = [asyncio.create_task(ask(crowd, stream=True)) for _ in range(5)]
        await wait_in_flight(client, 5)
        weak.gate.set()
        for response in await asyncio.gather(*asked):
            assert response.text.endswith("data: [DONE]\n\n"), response.text
            assert response.headers["x-argosy-model"] == "spare"


async def test_content_rules_filter_replayed_answers() -> None:
    rule = ContentRule(headers={"x-filter": "1"}, output={"email": "redact"})
    async with caching_gateway(content_rules=[rule]) as (client, replica):
        assert "jo@example.com" in (await ask(client)).text
        filtered = await ask(client, {"x-filter": "1"})
        assert filtered.headers["x-argosy-cache"] == "hit"
        assert filtered.json()["choices"][0]["message"]["content"] == "Hello [email]"
        assert count(replica) == 1


async def test_answers_of_other_engines_are_kept_for_every_form() -> None:
    """They have fewer fields. A stream with an event that is no chunk is sent as without a rule, but not kept."""
    end = {"finish_reason": "stop"}
    parts = [{"index": 0, "delta": {"content": "Hi"}}, {"index": 0, "delta": {}} | end]
    call = {"id": "c", "type": "function", "function": {"name": "f"}}
    message = {"role": "assistant", "content": "Hi", "tool_calls": None, "reasoning_content": "So"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    bodies: dict[str, Any] = {
        "whole": {"id": "x", "object": "chat.completion", "created": 1, "model": "m"},
        "bare": {},
    }
    streams: dict[str, list[Any]] = {
        "bare stream": [{"choices": [each]} for each in parts],
        "no index": [{"choices": [{"delta": each["delta"]} | end]} for each in parts[:1]],
        "no delta": [{"choices": [parts[0]]}, {"choices": [{"index": 0, "delta": None} | end]}],
        "other": ["ping", *({"choices": [each]} for each in parts)],
        "list": [{"choices": [parts[0] | {"delta": {"content": []}}]}, {"choices": [parts[1]]}],
        "call": [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}} | end]}],
    }

    async def respond(request: UpstreamRequest) -> None:
        name = request.body["messages"][0]["content"]
        if name in bodies:
            choice = {"index": 0, "message": message, "logprobs": None} | end
            request.send_json(200, bodies[name] | {"choices": [choice], "usage": usage})
            return
        request.start_stream()
        for each in streams[name]:
            request.send_chunk(format_event(json.dumps(each).encode()))
        request.end_stream(tokens=2)

    replica = FakeUpstream(respond)
    rule = CacheRule(sampled=True)
    async with caching_gateway(rule, replica=replica, kind="openai") as (client, _):
        for name in (*bodies, *streams):
            results = list[tuple[object, ...]]()
            is_kept = name not in {"other", "list"}
            for stream in (name in streams, True, False) if is_kept else (True, True):
                body = BODY | {"messages": [{"role": "user", "content": name}], "stream": stream}
                response = await client.post(CHAT, json=body)
                results.append((response.status_code, response.headers["x-argosy-cache"]))
            if not is_kept:
                assert results == [(200, "miss")] * 2, name
                assert response.text.endswith("data: [DONE]\n\n")
            elif name == "call":  # without arguments, and so in no response in one piece
                assert results == [(200, "miss"), (200, "hit"), (502, "hit")]
                assert "no-cache" in response.text
            else:
                assert results == [(200, "miss"), (200, "hit"), (200, "hit")], name
                answer = response.json()
                assert answer["choices"][0]["message"]["content"] == "Hi"
                assert answer["choices"][0]["finish_reason"] == "stop"
                assert answer["usage"]["completion_tokens"] == 2
                assert answer["model"] == ("m" if name == "whole" else "big")
                if name in bodies:
                    assert answer["choices"][0]["message"]["reasoning_content"] == "So"


async def test_damaged_and_expired_entries_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged: list[str] = []

    def create_damaging_store(*arguments: Any) -> IdempotencyStore:  # noqa: ANN401
        store = create_idempotency_store(*arguments)
        claim_original = store.claim

        async def claim(key: str, claim: InFlightClaim) -> InFlightClaim | CachedResponse | None:
            found = await claim_original(key, claim)
            if isinstance(found, CachedResponse) and not damaged:
                damaged.append(key)
                return msgspec.structs.replace(found, body=found.body[:-1] + b"!")
            return found

        monkeypatch.setattr(store, "claim", claim)
        return store

    monkeypatch.setattr("argosy.gateway.server.create_idempotency_store", create_damaging_store)
    async with caching_gateway() as (client, replica):
        results = [(await ask(client)).headers["x-argosy-cache"] for _ in range(3)]
        assert results == ["miss", "miss", "hit"]
        assert count(replica) == 2
        assert len(damaged) == 1
    async with caching_gateway(CacheRule(max_age_s=1e-9)) as (client, _):
        for _ in range(2):
            assert (await ask(client)).headers["x-argosy-cache"] == "miss"


async def test_projects_share_no_answer_and_hits_cost_their_charge(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/argosy.db"
    with open_organisation(url) as accounts:
        keys = [accounts.key(accounts.project(name)) for name in ("one", "two")]
        accounts.store.limits_and_prices.set_price(
            Price(model="big", input=1000, cached_input=1000, output=10_000), actor="test"
        )
        async with caching_gateway(
            CacheRule(charge=0.25), store=StoreConfig(url=url), auth=AuthConfig(mode="required")
        ) as (client, replica):
            results, costs = [], []
            for key in (keys[0], keys[1], keys[0]):
                headers = {"authorization": f"Bearer {key}"}
                response = await ask(client, headers)
                results.append(response.headers["x-argosy-cache"])
                path = f"/admin/requests/{response.headers['x-argosy-request']}"
                costs.append(
                    (await client.get(path, headers=headers)).json()["ledger"]["nano_dollars"]
                )
            assert results == ["miss", "miss", "hit"]
            assert costs[0] == costs[1] == 4 * costs[2] > 0
            assert count(replica) == 2


async def test_a_purge_reaches_the_answers_of_a_project_or_model_at_all_gateways(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/argosy.db"
    with open_organisation(url) as accounts:
        projects = [accounts.project(name) for name in ("one", "two")]
        keys = [{"authorization": f"Bearer {accounts.key(each)}"} for each in projects]
        auth = AuthConfig(mode="required")
        root = accounts.key(projects[0], "root", role="operator", scope="gateway")
        admin = {"authorization": f"Bearer {root}"}
        async with contextlib.AsyncExitStack() as stack:
            clients = []
            for _ in range(2):
                gateway = caching_gateway(store=StoreConfig(url=url), auth=auth)
                clients.append((await stack.enter_async_context(gateway))[0])

            async def ask_all() -> list[str]:
                answers = [await ask(client, key) for client in clients for key in keys]
                return [each.headers["x-argosy-cache"] for each in answers]

            assert await ask_all() == ["miss"] * 4
            path = "/admin/cache/purge"
            response = await clients[0].post(path, json={"project": projects[0]}, headers=admin)
            assert response.json() == {"purged": 2, "gateways": 2, "unreachable": []}
            assert await ask_all() == ["miss", "hit", "miss", "hit"]
            for model, purged in (("other", 0), ("big", 4)):
                response = await clients[1].post(path, json={"model": model}, headers=admin)
                assert response.json()["purged"] == purged
            assert await ask_all() == ["miss"] * 4
            (rule,) = (await clients[0].get("/admin/cache", headers=admin)).json()["data"]
            assert (rule["results"], rule["hit_rate"]) == ({"miss": 5, "hit": 1}, 1 / 6)
