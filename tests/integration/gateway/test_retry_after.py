"""When a server that refused is asked again: as it says, in any of the ways in which HTTP lets it."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest
from tests.integration.gateway import test_gateway
from tests.integration.gateway.test_hostile_replicas import BODY, CHAT, behind
from tests.support.scripted_server import Asked, rough_server

from argosy.gateway import Timeouts


@pytest.mark.parametrize(
    ("told", "least_s", "most_s"),
    [
        ("40", 20, 41),
        ("40.5", 20, 41),
        (45, 10, 46),
        (86_400, 50, 61),
        (-86_400, 0, 10),
        ("100000000000", 50, 61),
        ("-1", 0, 10),
        ("nan", 0, 10),
        ("in a while", 0, 10),
        ("Sun, 06 Nov 99999 08:49:37 GMT", 0, 10),
    ],
)
async def test_a_full_server_is_left_alone_for_as_long_as_it_says(
    told: str | int, least_s: float, most_s: float
) -> None:
    if isinstance(told, int):  # a date, so far from now
        told = formatdate(time.time() + told, usegmt=True)
    refusal = f"HTTP/1.1 429 X\r\nretry-after: {told}\r\ncontent-length: 2\r\n\r\n{{}}".encode()
    well = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    async with behind(lambda path: refusal if path == CHAT else well, "openai") as running:
        before = time.monotonic()
        assert (await running.client.post(CHAT, json=BODY)).status_code == 429
        after, (replica,) = time.monotonic(), running.replicas
        assert replica.backpressure.is_backing_off(before + least_s) or not least_s
        assert not replica.backpressure.is_backing_off(after + most_s)


async def test_nobody_waits_for_a_server_that_is_full_for_longer_than_they_may() -> None:
    async def full(asked: Asked) -> None:
        asked.writer.write(b"HTTP/1.1 429 X\r\nretry-after: 1000\r\ncontent-length: 2\r\n\r\n{}")

    patient = Timeouts(failover_timeout_s=600)
    async with rough_server(full) as one, test_gateway.gateway(one, timeouts=patient) as client:
        for _ in range(2):  # who finds out, and who comes then
            answer = await client.post("/v1/completions", json=test_gateway.BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
            assert 900 < int(answer.headers["retry-after"]) <= 1000
        assert len(one.asked) == 1


async def test_who_may_wait_until_a_server_is_no_longer_full_does() -> None:
    refusals = [b"HTTP/1.1 429 X\r\nretry-after: 0.1\r\ncontent-length: 2\r\n\r\n{}"]

    async def full(asked: Asked) -> None:
        if refusals:
            asked.writer.write(refusals.pop())
        else:
            await test_gateway.whole(asked)

    patient = Timeouts(failover_timeout_s=600)
    async with rough_server(full) as one, test_gateway.gateway(one, timeouts=patient) as client:
        answer = await client.post("/v1/completions", json=test_gateway.BODY)
        assert answer.status_code == 200
        assert len(one.asked) == 2
