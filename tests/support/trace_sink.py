"""Receivers of traces: sinks over HTTP and gRPC that decode what they get, rotel, a collector, and Phoenix."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib.util
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class TraceSink:
    """Spans that a receiver got."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    """Decoded spans, without those of a gateway's start."""
    bodies: list[bytes] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    """Statuses of the next answers, which stand for their counterparts of gRPC. Then 200."""
    hold_s: float = 0.0
    """Time for which answers are held back."""
    starts: int = 0

    def receive(self, headers: Mapping[str, str], body: bytes) -> int:
        """Decode a request, and return the status of the answer."""
        self.headers.append({name.lower(): value for name, value in headers.items()})
        if self.answers:
            return self.answers.pop(0)
        if self.headers[-1].get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            pairs = resource.resource.attributes
            self.resources.append({pair.key: pair.value.string_value for pair in pairs})
            for scope in resource.scope_spans:
                self.starts += sum(span.name == "argosy.start" for span in scope.spans)
                self.spans += [span for span in scope.spans if span.name != "argosy.start"]
        return HTTPStatus.OK

    def traces(self) -> dict[str, list[Any]]:
        """Return the spans by trace id, in the order of their start."""
        found: dict[str, list[Any]] = {}
        for span in sorted(self.spans, key=lambda span: span.start_time_unix_nano):
            found.setdefault(span.trace_id.hex(), []).append(span)
        return found


@contextlib.contextmanager
def trace_sink() -> Iterator[TraceSink]:
    """Run a sink in a thread."""
    sink = TraceSink()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = sink.receive(dict(self.headers), body)
            threading.Event().wait(sink.hold_s)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        sink.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield sink
        server.shutdown()
        thread.join()


RETRY_AFTER_1_S = (
    bytes.fromhex("0808")
    + b"\x1a\x2e\x0a\x28type.googleapis.com/google.rpc.RetryInfo\x12\x04\x0a\x02\x08\x01"
)
"""A `google.rpc.Status` with `RetryInfo`."""
REFUSALS = {
    429: (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy"),
    503: (grpc.StatusCode.UNAVAILABLE, "starting"),
    413: (grpc.StatusCode.RESOURCE_EXHAUSTED, "received message larger than max (9 vs. 4)"),
}


@contextlib.contextmanager
def grpc_sink() -> Iterator[TraceSink]:
    """Run a sink that receives by gRPC."""
    sink = TraceSink()

    def export(request: bytes, context: grpc.ServicerContext) -> bytes:
        status = sink.receive(dict(context.invocation_metadata()), request)
        if status in REFUSALS:
            if status == HTTPStatus.TOO_MANY_REQUESTS:
                context.set_trailing_metadata([("grpc-status-details-bin", RETRY_AFTER_1_S)])
            context.abort(*REFUSALS[status])
        return b""

    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    sink.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield sink
    server.stop(None).wait()


@contextlib.asynccontextmanager
async def rotel(sink: TraceSink, folder: Path, protocol: str) -> AsyncIterator[str]:
    """Run the collector rotel, which forwards to a sink, and yield its URL for a protocol."""
    found = importlib.util.find_spec("rotel")
    assert found is not None
    assert found.origin is not None
    program = Path(found.origin).with_name("rotel-agent")
    ports = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            free = stack.enter_context(socket.socket())
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    port = ports[protocol == "grpc"]
    process = await asyncio.create_subprocess_exec(
        *(str(program), "start", "--exporter", "otlp"),
        *("--otlp-http-endpoint", f"127.0.0.1:{ports[0]}"),
        *("--otlp-grpc-endpoint", f"127.0.0.1:{ports[1]}"),
        *("--otlp-exporter-endpoint", sink.url, "--otlp-exporter-protocol", "http"),
        *("--batch-timeout", "10ms", "--pid-file", str(folder / "rotel.pid")),
        *("--log-file", str(folder / "rotel.log")),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            assert process.returncode is None, "rotel has ended"
            await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


PHOENIX = Path(
    os.environ.get("ARGOSY_PHOENIX", Path(__file__).parents[2] / ".venv-peers" / "phoenix")
)


@contextlib.asynccontextmanager
async def phoenix(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Run Arize Phoenix, which `make peers/phoenix` installs, and yield a client of its API."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        http_port, grpc_port = (str(each.getsockname()[1]) for each in sockets)
    environment = {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": http_port,
        "PHOENIX_GRPC_PORT": grpc_port,
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    process = await asyncio.create_subprocess_exec(
        PHOENIX / "bin" / "phoenix",
        "serve",
        env=os.environ | environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{http_port}"
        async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    await client.get("/v1/projects")
                    break
                assert process.returncode is None, "Phoenix has ended"
                await asyncio.sleep(0.2)
            yield client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
