"""Requests in the shapes of agents and frameworks are served, with nothing lost but what is named."""

from __future__ import annotations

import pytest
from tests.integration.dialects.conftest import DialectFleet
from tests.support.client_requests import CLIENT_REQUESTS, ClientRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAST_EVENTS = {
    "/v1/responses": '"type":"response.completed"',
    "/v1/messages": '"type":"message_stop"',
    "/api/chat": '"done":true',
}


@pytest.mark.parametrize("request_", CLIENT_REQUESTS.values(), ids=CLIENT_REQUESTS.keys())
async def test_request_of_a_client_is_served(fleet: DialectFleet, request_: ClientRequest) -> None:
    headers = {"authorization": f"Bearer {fleet.key}", **request_.headers}
    response = await fleet.client.post(request_.path, json=request_.body, headers=headers)
    assert response.status_code == 200, response.text
    ignored = response.headers.get("x-argosy-ignored-fields", "")
    assert tuple(filter(None, ignored.split(","))) == request_.ignored_fields
    *_, last = filter(None, response.text.splitlines())
    assert LAST_EVENTS.get(request_.path.partition("?")[0], "[DONE]") in last
    (prompt,) = fleet.prompts()
    for text in request_.in_prompt:
        assert text in prompt
    for text in request_.not_in_prompt:
        assert text not in prompt
