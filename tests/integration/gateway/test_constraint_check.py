"""Malformed constraints and tools are refused before a native replica gets the request."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.backend_formats import Vllm
from tests.support.fake_upstream import listening
from tests.support.gateway_client import BODIES, CHAT, gateway_to
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.native_upstream import NativeScript, NativeUpstream

from argosy.deployment import ReplicaConfig
from argosy.gateway.proxy import constraint_check

UNENFORCEABLE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def tool(**function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def json_schema(schema: object, *, strict: bool) -> dict[str, Any]:
    wrapper = {"name": "n", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": wrapper}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "strict schema": (
        json_schema(UNENFORCEABLE, strict=True),
        "response_format.json_schema.schema",
    ),
    "regular expression": ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    "two constraints": ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    "nested too deeply": (
        json_schema({"items": {}}, strict=True)
        | {"tools": [tool(parameters={"x": "[" * 50})], "tool_choice": {"type": "x"}},
        "tool_choice.type",
    ),
    "duplicate tools": ({"tools": [tool(), tool()]}, "tools[1]"),
    "strict tool": (
        {"tools": [tool(parameters=UNENFORCEABLE, strict=True)]},
        "tools[0].function.parameters",
    ),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "schema": json_schema(SCHEMA, strict=True),
    "relaxed schema": json_schema(UNENFORCEABLE, strict=False),
    "regular expression": {"guided_regex": "[a-z]+"},
    "strict tool": {"tools": [tool(parameters=SCHEMA, strict=True)]},
    "tool": {"tools": [tool(parameters=UNENFORCEABLE)], "tool_choice": "required"},
    "unused strict tool": {
        "tools": [tool(parameters=UNENFORCEABLE, strict=True)],
        "tool_choice": "none",
    },
}


@contextlib.asynccontextmanager
async def run_native(
    recorder: RecordingFilter,
) -> AsyncIterator[tuple[GatewayHarness, NativeUpstream]]:
    upstream = NativeUpstream(native_script=NativeScript(deltas=[{"content": "x"}]))
    async with (
        listening(upstream),
        run_gateway([recorder], ReplicaConfig(url=upstream.url, kind="argosy")) as running,
    ):
        for replica in running.replicas:
            # the fake replica does not report readiness
            replica.health.on_reported_state("ready", 0.0)
        yield running, upstream


async def test_malformed_request_is_refused_before_it_is_queued() -> None:
    recorder = RecordingFilter()
    async with run_native(recorder) as (running, upstream):
        for fields, param in [*REFUSED.values()] * 2:  # the second time from the cache
            response = await running.client.post(CHAT, json=BODIES[CHAT] | fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not upstream.requests
    assert {context.status for context in recorder.completed} == {"refused"}
    assert not any(context.trace.attempts for context in recorder.completed)


async def test_valid_request_reaches_replica() -> None:
    async with run_native(RecordingFilter()) as (running, upstream):
        for kind, fields in ACCEPTED.items():
            response = await running.client.post(CHAT, json=BODIES[CHAT] | fields)
            assert response.status_code == 200, kind
            assert fields.items() <= upstream.requests[-1].body.items(), kind


async def test_abilities_of_other_backends_are_not_reduced() -> None:
    """The keywords that vLLM enforces are not those of a native replica."""
    backend = Vllm()
    fields = json_schema(UNENFORCEABLE, strict=True) | {"tools": [tool(), tool()]}
    async with gateway_to(backend) as (_, client):
        response = await client.post(CHAT, json=BODIES[CHAT] | fields)
    assert response.status_code == 200
    assert fields.items() <= backend.requests[0].body.items()


async def test_replica_checks_request_while_too_many_checks_are_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constraint_check, "MAX_PENDING_CHECKS", 0)
    fields, _ = REFUSED["duplicate tools"]
    async with run_native(RecordingFilter()) as (running, upstream):
        response = await running.client.post(CHAT, json=BODIES[CHAT] | fields)
    assert response.status_code == 200
    assert len(upstream.requests) == 1
