"""Table of misbehaving replicas, and limits on what their responses and load reports may cost the gateway.

Each row of `ROWS` is one behaviour of one backend with its `Outcome`: the client's response, the usage record and the
status of the replica. A row with failover runs twice: alone, and beside a healthy replica that must complete every
request. Any other row runs on two replicas with the same behaviour, and each request must reach exactly one of them.

`tests/unit/gateway/test_stream_parsers.py` has the statuses for which errors stand, and
`tests/integration/gateway/test_upstream.py` the violations of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httptools
import httpx2
import pytest
from benchmarks.hostile_requests import Attacker
from benchmarks.hostile_upstreams import BEHAVIOURS, KINDS, answer
from structlog.testing import capture_logs
from tests.support.backend_formats import DONE, KeylessHosted, LlamaCpp, Sglang, Vllm
from tests.support.fake_backend import (
    ANSWER_TEXT,
    ANSWER_TOKENS,
    PROMPT_IDS,
    FakeBackend,
    Fault,
    Generation,
    sse,
)
from tests.support.fake_upstream import (
    FakeUpstream,
    Json,
    UpstreamRequest,
    UpstreamScript,
    build_response,
    build_stream,
    fake_upstream,
    listening,
    reset_connection,
    respond_with,
    respond_with_text,
)
from tests.support.gateway_client import (
    BODIES,
    CHAT,
    COMPLETION,
    chunk_text,
    parse_stream,
    run_gateway_server,
)
from tests.support.gateway_harness import GatewayHarness, run_gateway
from tests.support.metered_gateway import MeteredGateway, run_gateway_before

from argosy.deployment import BackendKind, GatewayConfig, ModelConfig, ReplicaConfig, Timeouts
from argosy.gateway.backends import stream_events
from argosy.gateway.pool.prober import MAX_LOAD_REPORT_BYTES
from argosy.gateway.request_fields import MAX_CHOICES
from argosy.gateway.upstream import upstream_response
from argosy.gateway.upstream.upstream_response import MAX_FETCHED_BYTES
from argosy.http_server.paced_protocol import MAX_BYTES_PER_TURN, MIN_PACED_BYTES, SLICE_BYTES
from argosy.policy import ReplicaStatus
from argosy.store import UsageRecord

NUM_REQUESTS = 8
"""Enough that each of two replicas fails more often in a row than the breaker allows."""
# Only the run alone may end by a timeout, because its request waits for a replica that never gets well.
ALONE = Timeouts(failover_timeout_s=0.1)
PATIENT = Timeouts(
    first_token_timeout_s=600.0, stream_idle_timeout_s=600.0, failover_timeout_s=600.0
)


class Outcome(NamedTuple):
    """Columns of the table."""

    error: str | None
    """Code of the gateway's error for the client, in the body or as the last event of a stream."""
    status: int
    """HTTP status of a response without events."""
    usage: tuple[str, int, int]
    """Status, prompt tokens and output tokens of the usage record."""
    replica: ReplicaStatus = ReplicaStatus.READY
    failover: bool = False
    """Whether another replica gets the request."""


SERVER_FAULT = Outcome("upstream_failed", 502, ("failed", 0, 0), ReplicaStatus.EJECTED, True)
FULL = Outcome("overloaded", 429, ("refused", 0, 0), ReplicaStatus.BACKOFF, True)
REQUEST_FAULT_IN_STREAM = Outcome("refused_by_replica", 400, ("refused", 0, 0))
# The response is only assembled after the attempt succeeded, which is too late for a failover.
UNUSABLE_AT_END = SERVER_FAULT._replace(replica=ReplicaStatus.READY, failover=False)


def request_fault(status: int) -> Outcome:
    """Outcome of a rejection that passes to the client unchanged."""
    return Outcome(None, status, ("refused", 0, 0))


def completed(prompt_tokens: int, output_tokens: int, status: str = "completed") -> Outcome:
    """Outcome of a response that passes to the client unchanged."""
    return Outcome(None, 200, (status, prompt_tokens, output_tokens))


STREAM: Json = {"stream": True}
ANSWERED = completed(len(PROMPT_IDS), len(ANSWER_TOKENS))
STOPPED = completed(len(PROMPT_IDS), len(ANSWER_TOKENS), "stopped")


@dataclass(frozen=True)
class Row:
    """Behaviour of a backend for one request."""

    name: str
    upstream: type[FakeBackend] | UpstreamScript | bytes
    """Backend, or the script or response of an upstream that looks like a hosted API."""
    outcome: Outcome
    path: str = COMPLETION
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the request beside the prompt."""
    kind: BackendKind = "auto"
    error_message: str = ""

    @property
    def id(self) -> str:
        path = "chat" if self.path == CHAT else "completion"
        return "-".join([self.name, path, *(["stream"] if self.fields.get("stream") else [])])

    def create_upstream(self) -> FakeUpstream:
        if isinstance(self.upstream, bytes):
            return FakeUpstream(respond_with(self.upstream))
        if isinstance(self.upstream, type):
            upstream: FakeBackend = self.upstream()
            return upstream
        return FakeUpstream(self.upstream)


# --- responses without a stream ------------------------------------------------------------------

TEXT = b'{"id": "x", "choices": [{"index": 0, "text": "something", "finish_reason": "stop"}]}'
NO_ACCESS = b'{"error": {"message": "No access", "code": "model_not_found"}}'
MODERATION = b'{"error": {"message": "your input was flagged", "code": 403}}'
RESPONSES: dict[str, tuple[bytes, Outcome]] = {
    "redirect": (build_response(b"", None, 301, "location: https://127.0.0.1:1/"), SERVER_FAULT),
    "no-access": (build_response(NO_ACCESS, None, 403), SERVER_FAULT),
    "page": (build_response(b" <html></html>", "Text/HTML"), SERVER_FAULT),
    "moderation": (build_response(MODERATION, None, 403), request_fault(403)),
    "created": (build_response(TEXT, None, 201), completed(2, 2)),
    "byte-order-mark": (build_response(b"\xef\xbb\xbf" + TEXT, None), completed(2, 21)),
    "deeply-nested": (
        build_response(b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        completed(2, 76),
    ),
}


class ErrorWith200(KeylessHosted):
    """Hosted API that starts its response before it knows of the error."""

    def build_response(self, request: UpstreamRequest, generation: Generation) -> Json:
        return {"error": {"code": 502, "message": "the provider returned an error"}}


class TimedOut(KeylessHosted):
    """Another gateway, whose own limit on the duration of requests ended the response."""

    def generate(self, request: UpstreamRequest) -> Generation:
        generation = super().generate(request)
        generation.finish_reason = "length"
        return generation

    def stream_events(self, request: UpstreamRequest, generation: Generation) -> Iterator[bytes]:
        end = b'"finish_reason":"length"'
        for event in super().stream_events(request, generation):
            yield event.replace(end, end + b',"stop_reason":"deadline"')

    def build_response(self, request: UpstreamRequest, generation: Generation) -> Json:
        response = super().build_response(request, generation)
        response["choices"][0]["stop_reason"] = "deadline"
        return response


def rejecting(backend: type[FakeBackend], status: int, message: str) -> type[FakeBackend]:
    """Return the backend with this error for every request."""

    class Rejecting(backend):  # type: ignore[misc, valid-type]
        async def respond(self, request: UpstreamRequest) -> None:
            request.send_page(status, self.build_error(status, message))

    return Rejecting


def response_rows() -> Iterator[Row]:
    for name, (response, outcome) in RESPONSES.items():
        yield Row(name, response, outcome)
    yield Row("no-access", RESPONSES["no-access"][0], SERVER_FAULT, fields=STREAM)
    yield Row("reset", reset_connection, SERVER_FAULT, CHAT, STREAM, "vllm")
    invalid_event = build_stream(b'data: {"choices": 7}\n\n')
    yield Row("invalid-event", invalid_event, SERVER_FAULT, CHAT, STREAM, "vllm")
    yield Row("vllm-503", rejecting(Vllm, 503, "not now"), FULL, CHAT, STREAM)
    yield Row("error-502-with-200", ErrorWith200, SERVER_FAULT, CHAT)
    for path, streams in ((CHAT, False), (CHAT, True), (COMPLETION, True)):
        yield Row("timed-out", TimedOut, STOPPED, path, {"stream": streams})
    for streams in (False, True):
        backend = rejecting(LlamaCpp, 500, "Failed to parse messages: no 'role'")
        yield Row("llama-cpp-message", backend, request_fault(400), CHAT, {"stream": streams})


# --- broken streams ------------------------------------------------------------------------------

PROCESSING = b": PROCESSING\n\n"
PROVIDER_FAILED = sse({"error": {"code": 502, "message": "the provider failed"}})
PROVIDER_FULL = sse({"error": {"code": 429, "message": "the provider is full"}})
CHUNK = b'data: {"id": "x", "created": 1, "model": "m", "choices": [%b]}\n\n'
CHOICE = b'{"index": 0, "delta": {"content": %b}, "text": "", "finish_reason": null}'
MANY_CHOICES = b'data: {"choices": [%b{}]}\n\n' % (b"{}," * MAX_CHOICES)
MANY_OBJECTS = b'data: {"id": "x", "created": 1, "model": "m", "choices": [], "x": [%b{}]}\n\n' % (
    b"{}," * stream_events.MAX_JSON_CONTAINERS
)
SEAL = b": argosy prompt 7 3\n\n"
TEXT_A, TEXT_B = CHUNK % (CHOICE % b'"a"'), CHUNK % (CHOICE % b'"b"')
TEXT_A_AND_IDS, TEXT_B_AND_DONE = (
    (SEAL + TEXT_A + b": argosy 0 1\n\n",),
    (TEXT_B + b": argosy 0 3\n\n", DONE),
)
NOT_TEXT = CHUNK % (CHOICE % b"[1]")
NATIVE_STREAMS = {
    "no-chunks": ((SEAL, DONE), UNUSABLE_AT_END),
    "content-not-text": ((SEAL, NOT_TEXT, b": argosy 0 1\n\n", DONE), UNUSABLE_AT_END),
    "event-not-object": ((SEAL, b"data: 7\n\n", DONE), SERVER_FAULT),
    "invalid-token-ids": ((SEAL, TEXT_A, b": argosy 0 x\n\n", DONE), SERVER_FAULT),
    "huge-token-ids": ((SEAL, TEXT_A, b": argosy 0 " + b"9" * 5000 + b"\n\n"), SERVER_FAULT),
    "too-many-objects": ((MANY_OBJECTS, b": argosy prompt 1 0\n\n"), SERVER_FAULT),
    # A response that arrives at once must not skip the chunk that cannot be read.
    "gap-of-token-ids": ((*TEXT_A_AND_IDS, b": argosy 0 x\n\n", *TEXT_B_AND_DONE), SERVER_FAULT),
    "gap-of-event": (
        (*TEXT_A_AND_IDS, b"data: 7\n\n: argosy 0 2\n\n", *TEXT_B_AND_DONE),
        SERVER_FAULT,
    ),
}


def cut_native_end(choices: int, *, has_usage: bool) -> UpstreamScript:
    """Return a native replica that fails after its last token: before its usage, or before `[DONE]`."""

    async def respond(request: UpstreamRequest) -> None:
        response_id, created = request.headers["x-argosy-response-id"].split()
        head = {"id": response_id, "created": int(created), "model": "m"}
        request.start_stream()
        request.send_chunk(SEAL)
        for index in range(choices):
            choice: Json = {"index": index, "finish_reason": "stop", "stop_reason": None}
            choice |= {"delta": {"content": ANSWER_TEXT}, "logprobs": None}
            request.send_chunk(
                sse(head | {"choices": [choice]}) + b": argosy %d 1 stop\n\n" % index
            )
        if has_usage:
            usage = {"prompt_tokens": 7, "completion_tokens": choices}
            request.send_chunk(sse(head | {"choices": [], "usage": usage}))
        await request.writer.drain()
        request.writer.transport.abort()

    return respond


async def cut_after_comment(request: UpstreamRequest) -> None:
    request.start_stream()
    request.send_chunk(PROCESSING)
    request.writer.close()


def broken_stream_rows() -> Iterator[Row]:
    empty = sse({"choices": [{"index": 0, "text": ""}]})
    yield Row("comments-then-cut", cut_after_comment, SERVER_FAULT, fields=STREAM)
    failed = build_stream(PROCESSING, PROVIDER_FAILED, DONE)
    yield Row("comments-then-error", failed, SERVER_FAULT, fields=STREAM)
    full = build_stream(PROCESSING, PROVIDER_FULL, DONE)
    yield Row("comments-then-full", full, FULL, fields=STREAM)
    # The stream began as that of one hosted provider, and no other replica could continue it.
    full = build_stream(empty, PROVIDER_FULL, DONE)
    yield Row("begun-then-full", full, FULL._replace(failover=False), fields=STREAM)
    events: list[tuple[BackendKind, str, bytes]] = [
        ("openai", "event-with-too-many-choices", MANY_CHOICES),
        ("openai", "event-with-too-many-objects", MANY_OBJECTS),
        ("vllm", "event-with-too-many-objects", MANY_OBJECTS),
        ("vllm", "event-with-content-not-text", NOT_TEXT),
    ]
    for kind, name, event in events:
        stream = build_stream(event, DONE)
        yield Row(f"{kind}-{name}", stream, SERVER_FAULT, CHAT, STREAM, kind)
    for name, (pieces, outcome) in NATIVE_STREAMS.items():
        yield Row(f"native-{name}", build_stream(*pieces), outcome, CHAT, kind="argosy")
    for choices, has_usage, streams in (
        (1, False, True),
        (1, True, True),
        (2, False, True),
        (1, False, False),
    ):
        script = cut_native_end(choices, has_usage=has_usage)
        outcome = completed(7, choices)._replace(replica=ReplicaStatus.EJECTED)
        fields: Json = {"n": choices, "stream": streams}
        fields |= {"stream_options": {"include_usage": True}} if streams else {}
        yield Row(f"native-end-{choices}-{has_usage}", script, outcome, CHAT, fields, "argosy")
    stream = build_stream(*NATIVE_STREAMS["invalid-token-ids"][0])
    yield Row("native-invalid-token-ids", stream, SERVER_FAULT, CHAT, STREAM, "argosy")


# --- errors in streams ---------------------------------------------------------------------------

TOO_LONG = "The input (70 tokens) is longer than the model's context length (64 tokens)."
DEAD_END: Json = {
    "error": {
        "message": "The engine could not finish the request: the grammar permits no token.",
        "type": "invalid_request_error",
        "param": None,
        "code": "grammar_dead_end",
    }
}
REQUEST_FAULT_EVENT: Json = {"error": {"message": TOO_LONG, "type": "x", "code": 400}}


def with_events(
    backend: type[FakeBackend],
    rewrite: Callable[[list[bytes], int], Iterable[bytes]],
    fault: Fault | None = None,
) -> type[FakeBackend]:
    """Return the backend with rewritten events, for a number of choices, and with a fault of every stream."""

    class Rewritten(backend):  # type: ignore[misc, valid-type]
        def __post_init__(self) -> None:
            super().__post_init__()
            self.faults.extend([fault] * NUM_REQUESTS if fault else [])

        def stream_events(
            self, request: UpstreamRequest, generation: Generation
        ) -> Iterator[bytes]:
            events = list(super().stream_events(request, generation))
            yield from rewrite(events, request.body.get("n", 1))

    return Rewritten


def error_stream(
    backend: type[FakeBackend], error: Json, fault: Fault | None = None
) -> type[FakeBackend]:
    """Return the backend with streams that consist of this error."""
    return with_events(backend, lambda *_: [sse(error), DONE], fault)


def error_event_rows() -> Iterator[Row]:
    for backend, path, choices in ((Vllm, CHAT, 1), (Sglang, COMPLETION, 1), (Vllm, CHAT, 2)):
        yield Row(
            f"request-fault-event-{choices}-choices",
            error_stream(backend, REQUEST_FAULT_EVENT),
            REQUEST_FAULT_IN_STREAM,
            path,
            STREAM | {"n": choices},
            error_message=TOO_LONG,
        )
    for name, server, prompt_tokens in (
        ("vllm", Vllm, len(PROMPT_IDS)),
        ("hosted", KeylessHosted, ESTIMATED_PROMPT_TOKENS),
    ):
        yield Row(
            f"{name}-request-fault-after-tokens",
            with_events(server, lambda events, _: [*events[:4], sse(REQUEST_FAULT_EVENT)]),
            REQUEST_FAULT_IN_STREAM._replace(usage=("refused", prompt_tokens, 3)),
            CHAT,
            STREAM,
            error_message=TOO_LONG,
        )
    # A grammar without a next token is an error of the request, whichever replica finds it.
    yield Row(
        "native-request-fault-after-tokens",
        build_stream(*TEXT_A_AND_IDS, sse(DEAD_END)),
        REQUEST_FAULT_IN_STREAM._replace(usage=("refused", 7, 1)),
        CHAT,
        STREAM,
        "argosy",
        error_message="the grammar permits no token",
    )
    # The client gets the error although the stream never ends.
    yield Row(
        "request-fault-event-then-stall",
        error_stream(Vllm, REQUEST_FAULT_EVENT, Fault("stall", 1)),
        REQUEST_FAULT_IN_STREAM,
        CHAT,
        STREAM,
        error_message=TOO_LONG,
    )
    for name, code, outcome in (("full", 503, FULL), ("server-fault", 500, SERVER_FAULT)):
        upstream = error_stream(Sglang, {"error": {"message": "x", "code": code}})
        yield Row(f"{name}-event", upstream, outcome, CHAT, STREAM)


# --- streams that end early ----------------------------------------------------------------------

ESTIMATED_PROMPT_TOKENS = 9
TOOLS: Json = {"tools": [{"type": "function", "function": {"name": "f"}}]}
ESTIMATED_TOOL_TOKENS = 11


def early_end(
    backend: type[FakeBackend], num_missing: int, tail: bytes = b"", fault: Fault | None = None
) -> type[FakeBackend]:
    """Return the backend with `tail` instead of the last events of its streams."""

    def rewrite(events: list[bytes], choices: int) -> Iterator[bytes]:
        for choice in range(choices):
            for event in events[: len(events) - num_missing]:
                yield event.replace(b'"index":0', b'"index":%d' % choice)
        yield from [tail] if tail else []

    return with_events(backend, rewrite, fault)


def early_end_rows() -> Iterator[Row]:
    for server, path, name, tail in (
        (KeylessHosted, CHAT, "no-done", b""),
        (Vllm, COMPLETION, "no-done", b""),
        (Vllm, CHAT, "half-done", DONE[:-1]),
    ):
        upstream = early_end(server, 1, tail)
        yield Row(f"{server.__name__}-{name}", upstream, ANSWERED, path, STREAM)
    # The gateway counts and reports the usage that the backend did not.
    requests: list[tuple[str, Json, int]] = [("choices", {"n": 2}, 2), ("tools", TOOLS, 1)]
    for (name, fields, choices), disconnects in itertools.product(requests, (False, True)):
        fault = Fault("disconnect", 100) if disconnects else None
        tool_tokens = ESTIMATED_TOOL_TOKENS if "tools" in fields else 0
        prompt_tokens = ESTIMATED_PROMPT_TOKENS + tool_tokens
        outcome = completed(prompt_tokens, choices * len(ANSWER_TOKENS))
        yield Row(
            f"no-usage-{name}-{'disconnect' if disconnects else 'end'}",
            early_end(KeylessHosted, 2, fault=fault),
            outcome._replace(replica=ReplicaStatus.EJECTED) if disconnects else outcome,
            CHAT,
            STREAM | {"stream_options": {"include_usage": True}} | fields,
        )
    # The disconnect is after the role, the finish reason and the usage.
    backend = early_end(KeylessHosted, 0, fault=Fault("disconnect", len(ANSWER_TOKENS) + 3))
    outcome = ANSWERED._replace(replica=ReplicaStatus.EJECTED)
    yield Row("disconnect-before-done", backend, outcome, CHAT, STREAM | TOOLS)


ROWS = [*response_rows(), *broken_stream_rows(), *error_event_rows(), *early_end_rows()]


# --- the test ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def run(
    row: Row, folder: Path, upstreams: Sequence[FakeUpstream], timeouts: Timeouts = PATIENT
) -> AsyncIterator[MeteredGateway]:
    """Run a metered gateway in front of these upstreams, of which the first is the row's."""
    async with listening(*upstreams):
        configs = [
            ReplicaConfig(
                url=upstream.url,
                kind="auto" if isinstance(upstream, FakeBackend) else row.kind,
                model="cat" if isinstance(upstream, FakeBackend) else "rough",
            )
            for upstream in upstreams
        ]
        async with run_gateway_before(folder, *configs, timeouts=timeouts) as gateway:
            for replica in gateway.running.replicas:
                if replica.kind == "argosy":
                    replica.health.on_reported_state("ready", 0.0)
            yield gateway


async def send(gateway: MeteredGateway, row: Row) -> httpx2.Response:
    return await gateway.running.client.post(row.path, json=BODIES[row.path] | row.fields)


def usage_records(gateway: MeteredGateway) -> list[tuple[str, int, int]]:
    records: list[UsageRecord] = []
    gateway.usage_log.drain(records.extend)
    return [(record.status, record.input_tokens, record.output_tokens) for record in records]


def statuses(gateway: MeteredGateway) -> list[ReplicaStatus]:
    return [replica.health.status(time.monotonic()) for replica in gateway.running.replicas]


def is_stream(response: httpx2.Response) -> bool:
    return response.headers["content-type"].startswith("text/event-stream")


def check_response(row: Row, response: httpx2.Response) -> None:
    """Check that the client gets the row's error, or else the response of the upstream."""
    error, status, (_, _, output_tokens), *_ = row.outcome
    if not is_stream(response):
        assert response.status_code == status
        if error is not None:
            assert response.json()["error"]["code"] == error
        elif isinstance(row.upstream, bytes):
            assert response.content == row.upstream.partition(b"\r\n\r\n")[2]
        return
    result = parse_stream(response.text)
    if error is None:
        choices = row.fields.get("n", 1)
        assert result.is_complete
        assert len(result.finish_reasons) == choices
        assert len(result.text) == choices * len(ANSWER_TEXT)
        assert len({chunk["id"] for chunk in result.chunks}) == 1
        if "stream_options" in row.fields:
            (usage,) = result.usage
            assert usage["completion_tokens"] == output_tokens
        return
    assert (bool(result.text), result.done_count) == (output_tokens > 0, 0)
    assert [event["code"] for event in result.errors] == [error]
    assert row.error_message in result.errors[0]["message"]
    if error == "refused_by_replica":
        assert result.errors[0]["type"] == "invalid_request_error"


def check_answer(response: httpx2.Response) -> None:
    """Check that the client gets the complete answer of a healthy replica."""
    assert response.status_code == 200
    if is_stream(response):
        result = parse_stream(response.text)
        assert (result.text, result.is_complete) == (ANSWER_TEXT, True)
    else:
        (choice,) = response.json()["choices"]
        assert chunk_text(choice) or choice["message"]["content"] == ANSWER_TEXT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
async def test_misbehaving_replica_costs_what_its_row_says(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BASE_BACKOFF_S", "MAX_BACKOFF_S"):  # it lasts until the status is read
        monkeypatch.setattr(f"argosy.policy.backpressure.{name}", 600.0)
    upstream, peer = row.create_upstream(), row.create_upstream()
    if not row.outcome.failover:
        async with run(row, tmp_path, [upstream, peer]) as gateway:
            # A second request would wait for the end of the backoff.
            count = 1 if row.outcome.replica is ReplicaStatus.BACKOFF else NUM_REQUESTS
            for _ in range(count):
                check_response(row, await send(gateway, row))
            assert len(upstream.requests) + len(peer.requests) == count
            assert set(usage_records(gateway)) == {row.outcome.usage}
            assert {*statuses(gateway), ReplicaStatus.READY} == {
                row.outcome.replica,
                ReplicaStatus.READY,
            }
        return
    async with run(row, tmp_path, [upstream], ALONE) as gateway:
        check_response(row, await send(gateway, row))
        assert usage_records(gateway) == [row.outcome.usage]
    upstream, healthy = row.create_upstream(), LlamaCpp()
    async with run(row, tmp_path, [upstream, healthy]) as gateway:
        for _ in range(NUM_REQUESTS):
            check_answer(await send(gateway, row))
        assert upstream.requests
        assert len(healthy.requests) == NUM_REQUESTS
        assert set(usage_records(gateway)) == {ANSWERED.usage}
        assert statuses(gateway) == [row.outcome.replica, ReplicaStatus.READY]


TOO_MANY = {"prompt_tokens": 500_000, "completion_tokens": 1_000_000}
NATIVE_WITH_TOO_MANY = (
    b": argosy prompt 500000 0\n\n",
    TEXT_A + b": argosy 0 1" + b",1" * 200_000 + b"\n\n",
    *TEXT_B_AND_DONE,
)


@pytest.mark.parametrize("kind", ["openai", "argosy"])
@pytest.mark.parametrize("limit", [5, None])
async def test_usage_that_cannot_be_true_is_capped_and_marked(
    kind: BackendKind, limit: int | None, tmp_path: Path
) -> None:
    response = build_response(TEXT[:-1] + b', "usage": %b}' % json.dumps(TOO_MANY).encode())
    if kind == "argosy":
        response = build_stream(*NATIVE_WITH_TOO_MANY)
    fields = {} if limit is None else {"max_tokens": limit}
    row = Row(
        "too-many", response, ANSWERED, CHAT if kind == "argosy" else COMPLETION, fields, kind
    )
    async with run(row, tmp_path, [row.create_upstream()]) as gateway:
        with capture_logs() as logs:
            assert (await send(gateway, row)).status_code == 200
        records: list[UsageRecord] = []
        gateway.usage_log.drain(records.extend)
    (record,) = records
    assert record.is_capped
    assert record.input_tokens < 9_000
    if limit is not None:
        assert record.output_tokens < 100
    assert "usage_corrected" in [each["event"] for each in logs]


@pytest.mark.parametrize("is_resumable", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_usage_of_zero_is_replaced_by_our_count_and_marked(
    is_resumable: bool, stream: bool, tmp_path: Path
) -> None:
    usage = b', "usage": {"prompt_tokens": 0, "completion_tokens": 0}}'
    response = build_response(TEXT[:-1] + usage)
    if stream:
        event = TEXT_A.removesuffix(b"\n\n").removesuffix(b"}") + usage + b"\n\n"
        response = build_stream(event, TEXT_B, DONE)
    fields = {"stream": stream} | ({} if is_resumable else {"logprobs": 1})
    row = Row("zero", response, ANSWERED, CHAT if stream else COMPLETION, fields, "openai")
    async with run(row, tmp_path, [row.create_upstream()]) as gateway:
        assert (await send(gateway, row)).status_code == 200
        records: list[UsageRecord] = []
        gateway.usage_log.drain(records.extend)
    (record,) = records
    assert record.input_tokens > 0
    assert record.output_tokens == 2
    assert record.is_capped


# --- limits on the cost of responses -------------------------------------------------------------

BODY = BODIES[CHAT]


@contextlib.asynccontextmanager
async def raw_upstream(
    raw_response: Callable[[str], bytes], kind: BackendKind = "vllm"
) -> AsyncIterator[GatewayHarness]:
    """Run a gateway in front of a replica that sends `raw_response` of each path."""
    upstream = FakeUpstream(raw_response=raw_response)
    async with listening(upstream):
        config = ReplicaConfig(url=upstream.url, name="bad", kind=kind)
        async with run_gateway([], config) as running:
            yield running


def only_at(path: str, response: bytes) -> Callable[[str], bytes]:
    """Return the response at one path and an empty object at all others."""
    return lambda requested: response if requested == path else build_response(b"{}")


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize(
    ("content_type", "forwarded"),
    [
        ("text/html", "text/plain"),
        ("TEXT/HTML; a=b", "text/plain"),
        ("image/svg+xml", "text/plain"),
        ("", "text/plain"),
        ("nonsense", "text/plain"),
        ("application/json", "application/json"),
        (METRICS_TYPE, METRICS_TYPE),
    ],
)
async def test_content_type_of_page_becomes_plain_text(content_type: str, forwarded: str) -> None:
    """A page would run scripts in the gateway's origin, with the rights of a local administrator."""
    page = build_response(b"<script>fetch('/admin/keys')</script>", content_type, 403)
    async with raw_upstream(lambda _: page) as running:
        response = await running.client.post(CHAT, json=BODY)
        metrics = await running.client.get("/replicas/bad/metrics")
    assert response.headers["content-type"] == metrics.headers["content-type"] == forwarded


OVERSIZED = build_response(json.dumps({"choices": []}).ljust(1 << 17).encode())
SHORT_BODY = {"model": "big", "prompt": "Once", "max_tokens": 3}
LONG_BODY = SHORT_BODY | {"prompt": "All"}


async def respond_oversized(request: UpstreamRequest) -> None:
    """Send more than the limit for one of the prompts."""
    is_long = request.body["prompt"] == "All"
    await (respond_with(OVERSIZED) if is_long else respond_with_text)(request)


async def test_oversized_responses_do_not_eject_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities of a long prompt are an example."""
    monkeypatch.setattr(upstream_response, "MAX_BUFFERED_BYTES", 1 << 16)
    async with fake_upstream(respond_oversized) as one, fake_upstream(respond_oversized) as two:
        configs = [ReplicaConfig(url=each.url, kind="openai") for each in (one, two)]
        async with run_gateway([], *configs) as running:
            for _ in range(4):
                response = await running.client.post(COMPLETION, json=LONG_BODY)
                assert response.status_code == 413
                assert response.json()["error"]["code"] == "request_too_large"
            assert len(one.requests) + len(two.requests) == 8  # another may have a shorter response
            for _ in range(2):
                response = await running.client.post(COMPLETION, json=SHORT_BODY)
                assert response.status_code == 200
            assert len(one.requests) == len(two.requests) == 5


async def test_oversized_response_fails_over_to_shorter_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream_response, "MAX_BUFFERED_BYTES", 1 << 16)
    async with fake_upstream(respond_oversized) as bad, fake_upstream() as good:
        configs = [ReplicaConfig(url=each.url, kind="openai") for each in (bad, good)]
        async with run_gateway([], *configs) as running:
            for _ in range(4):
                response = await running.client.post(COMPLETION, json=LONG_BODY)
                assert response.status_code == 200
            assert bad.requests


@pytest.mark.parametrize("status", [401, 402, 429, 500])
async def test_error_message_of_replica_is_logged_and_not_forwarded(status: int) -> None:
    message = "You exceeded your quota, org-1"
    error = build_response(json.dumps({"error": {"message": message}}).encode(), None, status)
    async with raw_upstream(only_at(COMPLETION, error), "openai") as running:
        with capture_logs() as logs:
            response = await running.client.post(COMPLETION, json=BODIES[COMPLETION])
        failures = [line for line in logs if line["event"] == "attempt_failed"]
        assert {line.get("upstream_message") for line in failures} == {message}
        trace = running.traces.find(response.headers["x-argosy-request"])
        assert trace is not None
        assert f"status {status}" in str(trace.to_dict())
        assert message not in str(trace.to_dict()) + response.text


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "event",
    [
        {
            "choices": [
                {"index": number, "text": "a", "finish_reason": LONG[:99]}
                for number in range(5_000)
            ]
        },
        {"choices": [{"index": 0, "delta": {}, "finish_reason": LONG}]},
        {"choices": [{"index": 0, "delta": {LONG: 1}, "logprobs": 1}]},
        {"error": {"message": LONG}},
    ],
    ids=["many-choices", "finish-reason", "field-name", "error-message"],
)
async def test_trace_stays_small_for_any_stream(event: dict[str, object]) -> None:
    stream = build_stream(sse(event), b"data: [DONE]\n\n")
    async with raw_upstream(lambda _: stream) as running:
        response = await running.client.post(CHAT, json=BODY | STREAM | {"n": 2})
        trace = running.traces.find(response.headers["x-argosy-request"])
    assert trace is not None
    assert len(str(trace.to_dict())) < 20_000


# --- load reports --------------------------------------------------------------------------------

HUGE = b"1" + b"0" * 400
NATIVE_LOAD = (
    b'{"server_load": 0, "state": "ready", "models": ["big"], "running": 0, "waiting": %b, '
    b'"queued_tokens": %b, "max_seqs": %b, "max_model_len": 8192, "block_size": 16, "kv_blocks_total": %b, '
    b'"kv_blocks_used": 0, "kv_blocks_cached": 0, "step": 1, "step_s": 0.1}'
)


@pytest.mark.parametrize(
    "values",
    [
        (HUGE, b"0", b"1", b"9"),
        (b"0", HUGE, b"1", b"9"),
        (b"0", b"0", HUGE, b"9"),
        (b"0", b"0", b"-1", b"9"),
        (b"0", b"0", b"1", HUGE),
    ],
    ids=["waiting", "queued-tokens", "max-seqs", "negative-max-seqs", "kv-blocks"],
)
async def test_impossible_native_load_report_is_ignored(values: tuple[bytes, ...]) -> None:
    load = build_response(NATIVE_LOAD % values)
    async with raw_upstream(only_at("/load", load), "argosy") as running:
        assert running.replicas[0].load.reported_at < 0
        assert (await running.client.post(CHAT, json=BODY)).status_code == 502


async def test_replica_that_reports_inexact_results_is_not_resumed() -> None:
    load = (NATIVE_LOAD % (b"0", b"0", b"1", b"9"))[:-1] + b', "exact": false}'
    async with raw_upstream(only_at("/load", build_response(load)), "argosy") as running:
        replica = running.replicas[0]
        assert replica.load.reported_at > 0
        assert not replica.adapter.token_id_paths


@pytest.mark.parametrize(
    ("kind", "path", "report"),
    [
        (
            "vllm",
            "/metrics",
            b"".join(b'vllm:num_requests_running{engine="%d"} 1e308\n' % n for n in range(2)),
        ),
        (
            "vllm",
            "/metrics",
            b"vllm:num_requests_running{} 9\nvllm:num_requests_waiting{} 9\n".ljust(
                MAX_LOAD_REPORT_BYTES + 1, b"\n"
            ),
        ),
        (
            "sglang",
            "/v1/loads",
            b'{"loads": [{"num_waiting_reqs": %b, "max_running_requests": -1}]}' % HUGE,
        ),
        (
            "tensorrt-llm",
            "/metrics",
            b'[{"numQueuedRequests": %b, "maxNumActiveRequests": -1}]' % HUGE,
        ),
    ],
    ids=["vllm-infinite-sum", "vllm-too-long", "sglang-huge", "tensorrt-llm-huge"],
)
async def test_impossible_load_report_is_ignored_and_replica_stays_in_use(
    kind: BackendKind, path: str, report: bytes
) -> None:
    """Reading sixty megabytes of lines would block the gateway for twenty seconds, at every probe."""
    load = build_response(report, "text/plain")
    async with raw_upstream(only_at(path, load), kind) as running:
        await running.probe()
        await running.probe()
        assert running.replicas[0].load.running == 0
        assert (await running.client.get("/ready")).is_success
        assert (await running.client.post(CHAT, json=BODY)).is_success


async def test_too_long_model_list_is_ignored() -> None:
    cards = b'{"data": [%b{"id": "big"}]}' % (b"{}," * (MAX_FETCHED_BYTES // 3))
    async with raw_upstream(only_at("/v1/models", build_response(cards))) as running:
        assert not (await running.client.get("/ready")).is_success


@pytest.mark.parametrize("kind", ["argosy", "vllm"])
async def test_pages_that_are_not_utf8_do_not_fail_probe(kind: BackendKind) -> None:
    page = build_response(b'{"state": "\xff", "models": ["\xff"], "data": [{"id": "\xff"}]}')
    async with raw_upstream(lambda _: page, kind) as running:
        await running.probe()


async def test_replica_with_invalid_documents_is_used_once_they_are_valid() -> None:
    documents = dict.fromkeys(("/v1/models", "/info"), b'{"a":' + b"[" * 100_000)
    async with raw_upstream(
        lambda path: build_response(documents.get(path, b"{}")), "auto"
    ) as running:
        (replica,) = running.replicas
        assert not replica.health.is_schedulable
        documents.update({"/v1/models": b'{"data": [{"id": "big"}]}', "/info": b"{}"})
        await running.probe()
        assert replica.health.is_schedulable
        assert not replica.health.is_ejected


# --- upstreams without an end --------------------------------------------------------------------


async def test_upstreams_without_end_share_budget_of_each_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Comments of three bytes, or chunks of one, held up all requests for many seconds."""
    parsed_by_turn = [0]

    class CountingParser(httptools.HttpResponseParser):
        def feed_data(self, data: bytes) -> None:  # type: ignore[override]
            if not parsed_by_turn[-1]:
                asyncio.get_running_loop().call_soon(parsed_by_turn.append, 0)
            parsed_by_turn[-1] += len(data)
            super().feed_data(data)

    monkeypatch.setattr(httptools, "HttpResponseParser", CountingParser)
    models, servers = [], []
    for name in ("healthy", *BEHAVIOURS):
        respond = partial(answer, BEHAVIOURS.get(name))
        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        servers.append(server)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for kind in KINDS[-1:] if name == "healthy" else KINDS:
            replica = ReplicaConfig(url=url, kind=kind, model="m")
            models.append(ModelConfig(name=f"{name} of {kind}", replicas=[replica]))
    async with run_gateway_server(GatewayConfig(port=0, models=models)) as (_, client):
        attacker = Attacker(str(client.base_url), "", math.inf)
        attacks = [asyncio.create_task(attacker.run(model.name)) for model in models[1:]]
        for _ in range(4):
            assert (await client.get("/health")).status_code == 200
            response = await client.post(CHAT, json=BODY | {"model": models[0].name})
            assert response.status_code == 200
        for attack in attacks:
            attack.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)
    for server in servers:
        server.close()
    small_reads = MIN_PACED_BYTES * 2 * len(models)
    assert max(parsed_by_turn) <= MAX_BYTES_PER_TURN + SLICE_BYTES + small_reads
    assert sum(parsed_by_turn) > 10 * MAX_BYTES_PER_TURN
