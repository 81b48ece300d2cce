"""Table of misbehaving upstreams: the client's response, the usage record and the status of the replica.

Each row of `ROWS` is one behaviour of one backend with its `Outcome`. A row with failover runs twice: alone, and beside
a healthy replica that must complete every request. Any other row runs on two replicas with the same behaviour, and each
request must reach exactly one of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from tests.support.backend_formats import (
    DONE,
    SELF_HOSTED,
    KeylessHosted,
    LlamaCpp,
    Lmdeploy,
    Sglang,
    TensorRtLlm,
    Tgi,
    Vllm,
)
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
    listening,
    respond_with,
)
from tests.support.gateway_client import BODIES, CHAT, COMPLETION, chunk_text, parse_stream
from tests.support.metered_gateway import MeteredGateway, run_gateway_before

from argosy.deployment import BackendKind, ReplicaConfig, Timeouts
from argosy.gateway.backends import stream_events
from argosy.gateway.proxy.upstream_call import MAX_JSON_CONTAINERS
from argosy.gateway.request_fields import MAX_CHOICES
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
EMPTY_OBJECTS = b"{}," * MAX_JSON_CONTAINERS
NO_ACCESS = b'{"error": {"message": "No access", "code": "model_not_found"}}'
SERVER_FAULT_RESPONSES = {
    "redirect-301": build_response(b"", None, 301, "location: https://127.0.0.1:1/v1/completions"),
    "redirect-307": build_response(b"moved", None, 307, "location: /v1/completions/"),
    "no-content": build_response(b"", None, 204),
    "queued": build_response(b'{"id": "queued"}', None, 202),
    "no-credit": build_response(b'{"error": {"message": "No credits", "code": 402}}', None, 402),
    "no-access": build_response(NO_ACCESS, None, 403),
    "unknown-model": build_response(NO_ACCESS, None, 404),
    "unknown-model-vllm": build_response(
        b'{"object": "error", "message": "The model `a` does not exist.", "code": 404}', None, 404
    ),
    "unknown-model-ollama": build_response(
        b"""{"error": {"message": "model 'a' not found, try pulling it first"}}""", None, 404
    ),
}
NOT_JSON_RESPONSES = {
    "empty": build_response(b"", None),
    "empty-page": build_response(b"", "text/html"),
    "text": build_response(b"upstream connect error", "text/plain"),
    "page": build_response(b" <html></html>", "Text/HTML"),
    "truncated": build_response(TEXT[:-9], None),
    "compressed": build_response(b"\x1f\x8b\x08{}", None, 200, "content-encoding: gzip"),
    # Reading megabytes of empty choices would block the gateway for all clients.
    "too-many-choices": build_response(b'{"choices": [%b{}]}' % (b"{}," * MAX_CHOICES)),
    "too-many-objects": build_response(b'{"x": [%b{}]}' % EMPTY_OBJECTS),
    "too-many-objects-404": build_response(
        b'{"error": [%b{}]}' % EMPTY_OBJECTS, "application/json", 404
    ),
}
# If these counted against the replica, one client could take it away from all others.
NOT_FOR_COMPLETIONS = "This is a chat model and not supported in the v1/completions endpoint."
REQUEST_FAULT_RESPONSES = {
    "moderation": (403, "model-a requires moderation: your input was flagged", 403),
    "wrong-endpoint": (404, NOT_FOR_COMPLETIONS, 404),
    "no-image-support": (404, "No endpoints found that support image input", 404),
    "error-400-with-200": (200, "the prompt is too long", 400),
}
COMPLETE_RESPONSES = {
    "created": (build_response(TEXT, None, 201), completed(2, 2)),
    # DeepSeek and OpenRouter send empty lines while they compute.
    "empty-lines": (build_response(b"\n" * 500 + TEXT + b"\r\n", None), completed(2, 2)),
    "byte-order-mark": (build_response(b"\xef\xbb\xbf" + TEXT, None), completed(2, 21)),
    "deeply-nested": (
        build_response(b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        completed(2, 50_001),
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


# llama.cpp sends status 500 for invalid requests too.
LLAMA_CPP_REQUEST_FAULTS = {
    "message": "Failed to parse messages: Missing 'role' in message: {}",
    "image": "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
    "template": "\n------------\nWhile executing CallExpression at line 1, column 2\n"
    "Error: Jinja Exception: no such role",
}


def http_violation(response: bytes) -> UpstreamScript:
    """Return a script that sends these bytes and closes the connection."""

    async def respond(request: UpstreamRequest) -> None:
        request.writer.write(response)
        request.writer.close()

    return respond


HTTP_VIOLATIONS = {
    "nothing": b"",
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "short-body": b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nshort",
    "two-lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"
    b"0\r\n\r\n",
    "huge-chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    "huge-head": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
    "informational": b"HTTP/1.1 100 Continue\r\n\r\n" * 5_000,
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    "invalid-event": b'HTTP/1.1 200 OK\r\ncontent-length: 21\r\n\r\ndata: {"choices": 7}\n\n',
}


def response_rows() -> Iterator[Row]:
    for (name, response), streams in itertools.product(
        SERVER_FAULT_RESPONSES.items(), (False, True)
    ):
        yield Row(name, response, SERVER_FAULT, fields={"stream": streams})
    for name, response in HTTP_VIOLATIONS.items():
        script = http_violation(response)
        yield Row(f"http-{name}", script, SERVER_FAULT, CHAT, {"stream": True}, "vllm")
    for name, response in NOT_JSON_RESPONSES.items():
        yield Row(name, response, SERVER_FAULT)
    for name, (status, message, code) in REQUEST_FAULT_RESPONSES.items():
        error = json.dumps({"error": {"message": message, "code": code}}).encode()
        yield Row(name, build_response(error, None, status), request_fault(code))
    for name, (response, outcome) in COMPLETE_RESPONSES.items():
        yield Row(name, response, outcome)
    for server in SELF_HOSTED:
        yield Row(f"{server.__name__}-503", rejecting(server, 503, "not now"), FULL, CHAT, STREAM)
    for path in (CHAT, COMPLETION):
        yield Row("error-502-with-200", ErrorWith200, SERVER_FAULT, path)
    for path, streams in itertools.product((CHAT, COMPLETION), (False, True)):
        yield Row("timed-out", TimedOut, STOPPED, path, {"stream": streams})
    for streams in (False, True):
        fields = {"stream": streams}
        for name, message in LLAMA_CPP_REQUEST_FAULTS.items():
            backend = rejecting(LlamaCpp, 500, message)
            yield Row(f"llama-cpp-{name}", backend, request_fault(400), CHAT, fields)
        backend = rejecting(LlamaCpp, 500, "not now")
        yield Row("llama-cpp-other-500", backend, SERVER_FAULT, CHAT, fields)


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
    stream = build_stream(*NATIVE_STREAMS["invalid-token-ids"][0])
    yield Row("native-invalid-token-ids", stream, SERVER_FAULT, CHAT, STREAM, "argosy")


# --- errors in streams ---------------------------------------------------------------------------


class OtherGateway(KeylessHosted):
    """Gateway of another fleet."""


TOO_LONG = "The input (70 tokens) is longer than the model's context length (64 tokens)."
REQUEST_FAULT_EVENTS: dict[type[FakeBackend], Json] = {
    Vllm: {"error": {"message": TOO_LONG, "type": "BadRequestError", "param": None, "code": 400}},
    Sglang: {"error": {"object": "error", "message": TOO_LONG, "type": "BAD_REQUEST", "code": 400}},
    TensorRtLlm: {"object": "error", "message": TOO_LONG, "type": "X", "param": None, "code": 400},
    Tgi: {"error": {"message": f"Input validation error: {TOO_LONG}", "http_status_code": 422}},
    Lmdeploy: {"object": "error", "message": TOO_LONG, "type": "X", "param": None, "code": 400},
    KeylessHosted: {"error": {"message": TOO_LONG, "code": "400"}},  # as LiteLLM's proxy
    OtherGateway: {
        "error": {
            "message": TOO_LONG,
            "type": "invalid_request_error",
            "code": "refused_by_replica",
        }
    },
}
FULL_EVENTS: dict[type[FakeBackend], Json] = {
    OtherGateway: {
        "error": {"message": "It goes away.", "type": "overloaded_error", "code": "draining"}
    },
    KeylessHosted: {"type": "error", "error": {"message": "Slow down", "type": "rate_limit_error"}},
    Sglang: {"error": {"object": "error", "message": "The request queue is full.", "code": 503}},
    Tgi: {"error": {"message": "Model is overloaded", "http_status_code": 422}},
}
SERVER_FAULT_EVENTS: dict[type[FakeBackend], Json] = {
    Vllm: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}},
    Tgi: {"error": {"message": "Request failed during generation: x", "http_status_code": 422}},
}


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


def error_event_rows() -> Iterator[Row | Any]:
    for backend, error in REQUEST_FAULT_EVENTS.items():
        for path, choices in itertools.product((CHAT, COMPLETION), (1, 2)):
            marks = [] if (path == CHAT) == (choices == 1) else [pytest.mark.exhaustive]
            row = Row(
                f"{backend.__name__}-request-fault-event-{choices}-choices",
                error_stream(backend, error),
                REQUEST_FAULT_IN_STREAM,
                path,
                STREAM | {"n": choices},
                error_message=TOO_LONG,
            )
            yield pytest.param(row, marks=marks, id=row.id)
        # The client gets the error although the stream never ends.
        yield Row(
            f"{backend.__name__}-request-fault-event-then-stall",
            error_stream(backend, error, Fault("stall", 1)),
            REQUEST_FAULT_IN_STREAM,
            CHAT,
            STREAM,
            error_message=TOO_LONG,
        )
    for events, outcome, name in (
        (FULL_EVENTS, FULL, "full-event"),
        (SERVER_FAULT_EVENTS, SERVER_FAULT, "server-fault-event"),
    ):
        for backend, error in events.items():
            upstream = error_stream(backend, error)
            yield Row(f"{backend.__name__}-{name}", upstream, outcome, CHAT, STREAM)


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
    for backend, path, (name, tail) in itertools.product(
        (KeylessHosted, Vllm, Lmdeploy),
        (CHAT, COMPLETION),
        (("no-done", b""), ("half-done", DONE[:-1])),
    ):
        upstream = early_end(backend, 1, tail)
        yield Row(f"{backend.__name__}-{name}", upstream, ANSWERED, path, STREAM)
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
    assert (result.text, result.done_count) == ("", 0)
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
async def test_upstream_conformance(
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
