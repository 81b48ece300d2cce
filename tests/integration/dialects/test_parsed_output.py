"""Parsed output of chats through the gateway: equal to the replica's own, also after a failover at any token."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest
from tests.integration.dialects.conftest import MODEL, DialectFleet
from tests.integration.test_parsed_output import CASES
from tests.support.gateway_client import run_gateway_server
from tests.support.replica_servers import MODEL as REPLICA_MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
NUM_CUTS = 6
"""Positions at which a stream is cut in each case, spread over its tokens."""


async def send(client: httpx2.AsyncClient, body: dict[str, Any], replica_url: str = "") -> str:
    """Return a chat's response through the gateway, or of a replica itself, as `normalize` does."""
    message = {"role": "user", "content": "Weather?"}
    request = {"model": REPLICA_MODEL if replica_url else MODEL, "messages": [message], **body}
    response = await client.post(replica_url + CHAT, json=request)
    assert response.status_code == 200, response.text
    return normalize(response.text)


def normalize(text: str) -> str:
    """Replace ids, times and cache counts, which differ between requests, and sort events by choice."""
    events = text.split("\n\n")
    events.sort(key=lambda event: '"choices":[{"index":1' in event and "data: " in event)
    text = "\n\n".join(events)
    text = re.sub(r'"(chatcmpl-|call_)[0-9a-f]*"', r'"\1"', text)
    text = re.sub(r'"model":"[^"]*"', '"model":""', text)
    return re.sub(r'"(created|cached_tokens)":\d+', "", text)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stream", [True, False])
async def test_replica_lost_at_any_token_changes_nothing(
    fleet: DialectFleet, name: str, *, stream: bool
) -> None:
    fleet.output, options = CASES[name]
    body = options | {"seed": 1}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    # A gateway of its own, since breakers open and the budget of retries is used up.
    async with run_gateway_server(fleet.config) as (_, client):
        client.headers["authorization"] = f"Bearer {fleet.key}"
        undisturbed = await send(client, body)
        if not stream:
            url = str(fleet.config.models[0].replicas[0].url)
            assert await send(client, body, url) == undisturbed
        found = re.search(r'"completion_tokens":(\d+)', undisturbed)
        assert found is not None
        num_tokens = int(found[1]) // options.get("n", 1)
        for cut in sorted({num_tokens * part // NUM_CUTS for part in range(NUM_CUTS)}):
            fleet.crash_after = cut
            assert await send(client, body) == undisturbed
            assert fleet.crash_after is None
