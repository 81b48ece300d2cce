"""What a request says of its own urgency: `timeout_s`, at which it ends with what there is, and `priority`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import Watching, front
from tests.support.replica_servers import MODEL, events, serve
from tests.support.scripted_server import Asked, rough_server
from tests.support.waiting import until

from argosy.engine.serving.core_messages import EngineRequest
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig
from argosy.gateway.config import Timeouts
from argosy.protocol import ApiError

TOKENS = list(range(100, 160))
CHAT = "/v1/chat/completions"
SOON_S = 1.0
"""Long enough for the tokens that come at once, and short enough to wait for."""


def body(timeout_s: object, **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"model": "big", "messages": messages, "max_tokens": 60, "timeout_s": timeout_s}
    return asked | more


def told(content: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream that ended as it should."""
    *chunks, done = events(content)
    assert done == b"[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def stuck(tokenizer: Tokenizer, after: int) -> FakeEngine:
    """An engine that gives so many tokens, and no more."""
    return FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length", pause_after=after))


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_ends_with_what_there_is(tokenizer: Tokenizer, stream: bool) -> None:
    engine, watching = stuck(tokenizer, 40), Watching()
    async with (
        serve(engine) as served,
        front([watching], ReplicaConfig(url=served.url, model=MODEL)) as running,
    ):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        asked = body(SOON_S, return_token_ids=True, **options)
        answer = await running.client.post(CHAT, json=asked)
        await engine.nothing_runs()  # it is told at once that nobody waits
    assert answer.status_code == 200, answer.text
    chunks = told(answer.content) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [i for one in choices for i in one.get("token_ids") or ()] == TOKENS[:40]
    assert choices[-1]["finish_reason"] == "timeout"
    assert chunks[-1]["usage"]["completion_tokens"] == 40
    (context,) = watching.left
    assert (context.status, context.delivered.output_tokens) == ("stopped", 40)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_choice_that_has_not_begun_has_no_tokens_and_says_so(
    tokenizer: Tokenizer, path: str
) -> None:
    def first_only(request: EngineRequest) -> Script:
        return Script(list(TOKENS), pause_after=0 if request.parent_id else 5)

    async with (
        serve(FakeEngine(tokenizer, first_only)) as served,
        front([], ReplicaConfig(url=served.url, model=MODEL)) as running,
    ):
        asked = body(SOON_S, n=2, return_token_ids=True)
        if path != CHAT:
            asked = {**asked, "prompt": "Hi"}
            del asked["messages"]
        answer = await running.client.post(path, json=asked)
    choices = answer.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["timeout", "timeout"]
    assert [choice.get("token_ids") for choice in choices] == [TOKENS[:5], []]


async def test_a_stream_on_the_fast_path_ends_too(tokenizer: Tokenizer) -> None:
    engine = stuck(tokenizer, 40)
    async with (
        serve(engine) as served,
        front([], ReplicaConfig(url=served.url, model=MODEL)) as running,
    ):
        asked = asyncio.create_task(running.client.post(CHAT, json=body(SOON_S, stream=True)))
        await until(lambda: running.serving.fast_path_streams == 1)
        chunks = told((await asked).content)
    assert chunks[-1]["choices"][0]["finish_reason"] == "timeout"


async def test_another_servers_stream_ends_too() -> None:
    async def silent(asked: Asked) -> None:
        assert "timeout_s" not in asked.body  # it does not know it
        asked.stream()
        asked.say("one")
        asked.say(" two")
        await asyncio.Event().wait()

    async with (
        rough_server(silent) as rough,
        front([], ReplicaConfig(url=rough.url, kind="openai")) as running,
    ):
        asked = {"model": "big", "prompt": "Hi", "stream": True, "timeout_s": SOON_S}
        answer = await running.client.post("/v1/completions", json=asked)
    choices = [chunk["choices"][0] for chunk in told(answer.content)]
    assert "".join(choice["text"] for choice in choices) == "one two"
    assert choices[-1]["finish_reason"] == "timeout"


async def test_one_that_waits_to_be_carried_on_ends_too(tokenizer: Tokenizer) -> None:
    crashing = Script(TOKENS[:20], crash=RuntimeError("gone"))
    engine = FakeEngine(tokenizer, lambda _: crashing)
    patient = Timeouts(failover_timeout_s=30.0)
    async with serve(engine) as served:
        replica = ReplicaConfig(url=served.url, model=MODEL)
        async with front([], replica, timeouts=patient) as running:
            engine.script = lambda _: crashing
            asked = asyncio.create_task(running.client.post(CHAT, json=body(SOON_S, stream=True)))
            await engine.asked.wait()
            engine.refusal = ApiError(503, "engine_unavailable", "restarting")
            chunks = told((await asked).content)
    assert chunks[-1]["choices"][0]["finish_reason"] == "timeout"


def refused(answer: httpx2.Response) -> None:
    assert answer.status_code == 504, answer.text
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [True, False])
async def test_one_of_which_nothing_came_is_refused(tokenizer: Tokenizer, stream: bool) -> None:
    watching = Watching()
    async with serve(stuck(tokenizer, 0)) as served:
        replica = ReplicaConfig(url=served.url, model=MODEL)
        async with front([watching], replica) as running:
            refused(await running.client.post(CHAT, json=body(0.1, stream=stream)))
            trace = running.traces.find(watching.left[0].response_id)
    assert trace is not None
    assert (trace.status, trace.error_code, trace.output_tokens) == (
        "stopped",
        "deadline_exceeded",
        0,
    )


async def test_the_queue_goes_by_them_and_drops_who_is_too_late() -> None:
    gate, order = asyncio.Event(), []

    async def answer(asked: Asked) -> None:
        order.append(asked.body["user"])
        await gate.wait()
        asked.json(200, {"choices": []})

    async with rough_server(answer) as rough:
        replica = ReplicaConfig(url=rough.url, kind="openai", max_requests=1)
        async with front([], replica) as running:

            def ask(
                user: str, timeout_s: float | None, priority: int = 0
            ) -> asyncio.Task[httpx2.Response]:
                asked = body(timeout_s, user=user, priority=priority)
                return asyncio.create_task(running.client.post(CHAT, json=asked))

            asked = [ask("first", None)]
            await until(lambda: order == ["first"])
            urgencies = (
                ("modest", 10.0, 1),
                ("patient", None, 0),
                ("later", 25.0, 0),
                ("sooner", 20.0, 0),
            )
            for place, urgency in enumerate(urgencies, 1):
                asked.append(ask(*urgency))
                await running.queued(place)
            refused(await ask("too late", 0.05))
            await running.queued(4)
            gate.set()
            assert [(await each).status_code for each in asked] == [200] * 5
    assert order == ["first", "sooner", "later", "patient", "modest"]


async def test_the_operator_may_bound_all_requests(tokenizer: Tokenizer) -> None:
    async with serve(stuck(tokenizer, 0)) as served:
        replica = ReplicaConfig(url=served.url, model=MODEL)
        async with front([], replica, timeouts=Timeouts(request_timeout_s=0.1)) as running:
            refused(await running.client.post(CHAT, json=body(None)))
            refused(await running.client.post(CHAT, json=body(30.0)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout_s": 0},
        {"timeout_s": "soon"},
        {"timeout_s": 1e9},
        {"priority": -1},
        {"priority": 9},
    ],
    ids=str,
)
async def test_what_cannot_be_is_refused_by_name(wrong: dict[str, object]) -> None:
    async with (
        rough_server() as rough,
        front([], ReplicaConfig(url=rough.url, kind="openai")) as running,
    ):
        answer = await running.client.post(CHAT, json=body(1.0) | wrong)
    assert answer.status_code == 400
    assert [answer.json()["error"]["param"]] == list(wrong)
