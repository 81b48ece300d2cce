"""When a server that refused is asked again: as it says, in any of the ways in which HTTP lets it."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest
from tests.integration.gateway.test_hostile_replicas import BODY, CHAT, behind


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
        assert replica.backpressure.cooling(before + least_s) or not least_s
        assert not replica.backpressure.cooling(after + most_s)
