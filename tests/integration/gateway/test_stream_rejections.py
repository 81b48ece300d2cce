"""What servers refuse in a stream that they have begun with 200: whose fault it is, and what the client is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.gateway.test_backend_stream_endings import Open
from tests.support.backend_formats import Lmdeploy, Sglang, TensorRtLlm, Tgi, Vllm
from tests.support.fake_backend import (
    WHOLE,
    Asked,
    Double,
    Fault,
    Json,
    Part,
    running,
    sse,
)
from tests.support.gateway_client import CHAT, COMPLETION, gateway, stream

from argosy.gateway import GatewayServer, ReplicaConfig, Timeouts


class Gateway(Open):
    """Another one of ours."""


TOO_LONG = "The input (70 tokens) is longer than the model's context length (64 tokens)."
REFUSED: dict[type[Double], Json] = {
    Vllm: {"error": {"message": TOO_LONG, "type": "BadRequestError", "param": None, "code": 400}},
    Sglang: {"error": {"object": "error", "message": TOO_LONG, "type": "BAD_REQUEST", "code": 400}},
    TensorRtLlm: {"object": "error", "message": TOO_LONG, "type": "X", "param": None, "code": 400},
    Tgi: {"error": {"message": f"Input validation error: {TOO_LONG}", "http_status_code": 422}},
    Lmdeploy: {"object": "error", "message": TOO_LONG, "type": "X", "param": None, "code": 400},
    Open: {"error": {"message": TOO_LONG, "code": "400"}},  # as LiteLLM's proxy writes its status
    Gateway: {
        "error": {
            "message": TOO_LONG,
            "type": "invalid_request_error",
            "code": "refused_by_replica",
        }
    },
}
FULL: dict[type[Double], Json] = {
    Gateway: {
        "error": {"message": "It goes away.", "type": "overloaded_error", "code": "draining"}
    },
    Open: {"type": "error", "error": {"message": "Slow down", "type": "rate_limit_error"}},
    Sglang: {"error": {"object": "error", "message": "The request queue is full.", "code": 503}},
    Tgi: {"error": {"message": "Model is overloaded", "http_status_code": 422}},
}
FAILED: dict[type[Double], Json] = {
    Vllm: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}},
    Tgi: {"error": {"message": "Request failed during generation: x", "http_status_code": 422}},
}


def refusing(family: type[Double], told: Json, times: int) -> type[Double]:
    """Servers of a kind whose first streams, so many of all, are such an error."""
    left = itertools.repeat(told, times)

    class Refusing(family):  # type: ignore[misc, valid-type]
        def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
            error = next(left, None)
            if error is None:
                yield from super().events(asked, part)
            else:
                yield sse(error)
                yield b"data: [DONE]\n\n"

    return Refusing


def behind(*doubles: Double) -> list[ReplicaConfig]:
    return [ReplicaConfig(url=double.url, model=double.model) for double in doubles]


def unharmed(server: GatewayServer) -> bool:
    """Nothing is held against any of them."""
    return all(
        replica.breaker.is_closed and not replica.outage.is_down for replica in server.replicas
    )


@pytest.mark.parametrize("asks", [{}, {"n": 2}], ids=["text", "more than text"])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.__name__)
async def test_what_is_the_requests_own_fault_is_told_and_no_servers_failure(
    family: type[Double], path: str, asks: dict[str, Any]
) -> None:
    kind = refusing(family, REFUSED[family], 8)
    one, two = kind(), kind()
    async with running(one, two), gateway(*behind(one, two)) as (server, client):
        for _ in range(8):
            seen = await stream(client, path, **asks)
            assert (seen.text, seen.done, len(seen.errors)) == ("", 0, 1)
            assert (seen.errors[0]["code"], seen.errors[0]["type"]) == (
                "refused_by_replica",
                "invalid_request_error",
            )
            assert TOO_LONG in seen.errors[0]["message"]
        assert len(one.asked) + len(two.asked) == 8
        assert unharmed(server)
        assert (await stream(client, path, **asks)).text == WHOLE


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.__name__)
async def test_it_is_told_at_once_whatever_its_server_does_then(family: type[Double]) -> None:
    double = refusing(family, REFUSED[family], 4)()
    patient = Timeouts(first_token_timeout_s=600, stream_idle_timeout_s=600)
    async with running(double), gateway(*behind(double), timeouts=patient) as (server, client):
        for _ in range(4):
            double.faults.append(Fault("stall", 1))
            seen = await stream(client, CHAT)
            assert [error["code"] for error in seen.errors] == ["refused_by_replica"]
        assert unharmed(server)


@pytest.mark.parametrize("family", FULL, ids=lambda family: family.__name__)
async def test_one_that_is_full_is_asked_less_and_not_taken_for_ill(family: type[Double]) -> None:
    kind = refusing(family, FULL[family], 1)
    one, two = kind(), kind()
    async with running(one, two), gateway(*behind(one, two)) as (server, client):
        seen = await stream(client, CHAT)
        assert (seen.text, seen.done, seen.errors) == (WHOLE, 1, [])
        cool = [replica.backpressure.concurrency_limit(0.0) == 0 for replica in server.replicas]
        assert sorted(cool) == [False, True]
        assert unharmed(server)


@pytest.mark.parametrize("family", FAILED, ids=lambda family: family.__name__)
async def test_one_that_fails_is_made_up_for_by_another(family: type[Double]) -> None:
    kind = refusing(family, FAILED[family], 1)
    one, two = kind(), kind()
    async with running(one, two), gateway(*behind(one, two)) as (_, client):
        seen = await stream(client, CHAT)
        assert (seen.text, seen.done, seen.errors) == (WHOLE, 1, [])
