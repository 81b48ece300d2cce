"""How answers of other engines end, where that is not as it should be: without `[DONE]`, or with an error and 200."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.gateway.doubles.behind import BODIES, CHAT, COMPLETION, gateway, stream
from tests.integration.gateway.doubles.families import DONE, Hosted, Lmdeploy, Vllm
from tests.integration.gateway.doubles.server import (
    ANSWER,
    WHOLE,
    Asked,
    Double,
    Fault,
    Json,
    Part,
    running,
)

from argosy.gateway import ReplicaConfig


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
        seen = await stream(client, CHAT, tools=[{"type": "function", "function": {"name": "f"}}])
        assert (seen.text, seen.finish, seen.errors, seen.done) == (WHOLE, ["stop"], [], 1)


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
        assert server.replicas[0].breaker.closed


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
