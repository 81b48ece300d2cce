"""How answers of other engines end, where that is not as it should be: without `[DONE]`, or with an error and 200."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.backend_formats import DONE, Hosted, LlamaCpp, Lmdeploy, Vllm
from tests.support.fake_backend import (
    ANSWER,
    WHOLE,
    Asked,
    Double,
    Fault,
    Json,
    Part,
    running,
)
from tests.support.gateway_client import BODIES, CHAT, COMPLETION, gateway, stream

from argosy.gateway import ReplicaConfig

TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Open(Hosted):
    """A hosted API that anybody may ask."""

    def refusal(self, asked: Asked) -> str | None:
        return None


def without_done(family: type[Double], end: bytes) -> type[Double]:
    """Its streams end with `end` instead."""

    class Ending(family):  # type: ignore[misc, valid-type]
        def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
            *events, _ = super().events(asked, part)
            yield from (*events, end) if end else events

    return Ending


def behind(*doubles: Double) -> list[ReplicaConfig]:
    return [ReplicaConfig(url=double.url, model=double.model) for double in doubles]


async def test_a_server_that_dies_once_all_was_told_costs_nobody_anything() -> None:
    double = Open()
    async with running(double), gateway(*behind(double)) as (_, client):
        double.faults.append(Fault("die", len(ANSWER) + 3))  # the role, the end and usage come too
        seen = await stream(client, CHAT, tools=TOOLS)
        assert (seen.text, seen.finish, seen.errors, seen.done) == (WHOLE, ["stop"], [], 1)


@pytest.mark.parametrize("how", ["die", "end"])
@pytest.mark.parametrize("asks", [{"n": 2}, {"tools": TOOLS}], ids="-".join)
async def test_the_usage_of_what_is_more_than_text_is_told_though_its_server_is_lost_before_that(
    asks: dict[str, object], how: str
) -> None:
    """What was told is counted then, as it is billed."""

    class Cut(Open):
        def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
            *events, _, _ = super().events(asked, part)
            for choice in range(asked.body.get("n", 1)):
                for event in events:
                    yield event.replace(b'"index":0', b'"index":%d' % choice)

    double = Cut()
    async with running(double), gateway(*behind(double)) as (server, client):
        if how == "die":
            double.faults.append(Fault("die", 100))
        seen = await stream(client, CHAT, stream_options={"include_usage": True}, **asks)
        choices = len(seen.finish)
        assert (seen.finish, seen.errors, seen.done) == (["stop"] * choices, [], 1)
        assert [usage["completion_tokens"] for usage in seen.usage] == [len(ANSWER) * choices]
        assert len({chunk["id"] for chunk in seen.chunks}) == 1
        assert server.replicas[0].breaker.is_closed


@pytest.mark.parametrize("end", [b"", DONE[:-1]], ids=["nothing", "half an event"])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("family", [Open, Vllm, Lmdeploy], ids=lambda family: family.__name__)
async def test_an_answer_that_is_finished_needs_no_more_to_be_whole(
    family: type[Double], path: str, end: bytes
) -> None:
    double = without_done(family, end)()
    async with running(double), gateway(*behind(double)) as (server, client):
        for _ in range(4):
            seen = await stream(client, path)
            assert (seen.text, seen.finish, seen.errors, seen.done) == (WHOLE, ["stop"], [], 1)
        assert len(double.asked) == 4
        assert server.replicas[0].breaker.is_closed


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_an_error_that_comes_with_200_is_no_answer(path: str) -> None:
    """Some hosted APIs begin their answers before they know."""

    class Erring(Open):
        def whole(self, asked: Asked, part: Part) -> Json:
            return {"error": {"code": 502, "message": "the provider returned an error"}}

    bad, good = Erring(), Open()
    async with running(bad, good), gateway(*behind(bad, good)) as (_, client):
        for _ in range(2):  # in turn
            answer = await client.post(path, json=BODIES[path])
            assert answer.json()["usage"]["completion_tokens"] == len(ANSWER)
        assert bad.asked
        assert len(good.asked) == 2


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_an_answer_whose_time_was_over_at_another_gateway_is_one(path: str) -> None:
    """A gateway of ours ends it so where its own settings say how long a request may take."""

    class Late(Open):
        def whole(self, asked: Asked, part: Part) -> Json:
            part.finish = "timeout"
            return super().whole(asked, part)

        def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
            part.finish = "timeout"
            return super().events(asked, part)

    double = Late()
    async with running(double), gateway(*behind(double)) as (server, client):
        answer = (await client.post(path, json=BODIES[path])).json()
        assert answer["choices"][0]["finish_reason"] == "timeout"
        seen = await stream(client, path)
        assert (seen.text, seen.finish, seen.errors, seen.done) == (WHOLE, ["timeout"], [], 1)
        assert len(double.asked) == 2
        assert server.replicas[0].breaker.is_closed


MISREAD = [
    "Failed to parse messages: Missing 'role' in message: {}",
    "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
    "\n------------\nWhile executing CallExpression at line 1, column 2\nError: Jinja Exception: no such role",
]


@pytest.mark.parametrize("message", MISREAD, ids=["message", "picture", "template"])
async def test_what_llama_cpp_cannot_read_is_not_its_failure(message: str) -> None:
    """It answers 500 to that, which one that reads as it does would answer as well."""

    class Misreading(LlamaCpp):
        def error(self, status: int, _: str) -> Json:
            return {"error": {"code": status, "message": message, "type": "server_error"}}

    one, two = Misreading(), Misreading()
    async with running(one, two), gateway(*behind(one, two)) as (server, client):
        for count in range(1, 9):
            one.faults.append(Fault("refuse", status=500))
            answer = await client.post(CHAT, json=BODIES[CHAT] | {"stream": count % 2 == 0})
            assert (answer.status_code, answer.json()) == (400, one.error(500, ""))
            assert len(one.asked) + len(two.asked) == count
        assert all(replica.breaker.is_closed for replica in server.replicas)


async def test_what_llama_cpp_fails_at_is_made_up_for_by_another() -> None:
    one, two = LlamaCpp(), LlamaCpp()
    async with running(one, two), gateway(*behind(one, two)) as (_, client):
        one.faults.append(Fault("refuse", status=500))
        assert (await stream(client, CHAT)).text == WHOLE
