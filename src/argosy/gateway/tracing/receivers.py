"""Connections to a receiver of OTLP, over HTTP or gRPC. They block, so they are used from a thread."""

from __future__ import annotations

import gzip
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from argosy.proxies import direct_mounts

if TYPE_CHECKING:
    import grpc
    import httpx2

EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
GRPC_PORT = 4317
_RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_TOO_LARGE = 413
_RETRIED_CODES = frozenset(
    {
        *("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE"),
        "DATA_LOSS",
    }
)
"""Codes of gRPC after which OTLP sends a request again."""
_LARGE_MESSAGE = re.compile(r"larger than max|too large", re.IGNORECASE)
"""Part of the message with which servers of gRPC refuse a large request. They use several codes."""
_RETRY_INFO = re.compile(
    rb"google\.rpc\.RetryInfo\x12[\x00-\x7f]\x0a[\x00-\x7f]\x08([\x80-\xff]*[\x00-\x7f])"
)
"""Detail of a refusal by gRPC after which a request is sent again: a duration, whose first field has its seconds."""


class ReceiverAnswer(NamedTuple):
    """Answer of a receiver to a request with spans."""

    outcome: Literal["taken", "unreachable", "too_large", "refused"]
    """Whether the request may be sent again: if the receiver is `unreachable`, or in parts if it is `too_large`."""
    problem: str = ""
    """Problem; empty if the spans were taken."""
    wait_s: float = 0.0
    """Seconds before which the receiver wants no other try."""
    content: bytes = b""
    """Beginning of the response to a request that was taken."""


class Receiver(Protocol):
    """Connection to a receiver of OTLP."""

    def export(self, request: bytes) -> ReceiverAnswer:
        """Send an encoded `ExportTraceServiceRequest`, compressed."""
        ...

    def close(self) -> None:
        """Close the connection."""


class HttpReceiver:
    """Receiver of OTLP over HTTP, with protobuf as the format."""

    def __init__(
        self, endpoint: str, headers: Mapping[str, str], certificate: str, timeout_s: float
    ) -> None:
        """Connect at the first request.

        Args:
            endpoint: URL to which requests are posted.
            headers: Headers of the requests.
            certificate: File with the certificates of authorities; empty for those of the system.
            timeout_s: Timeout of a request.
        """
        self._endpoint = endpoint
        self._headers = {
            **headers,
            "content-type": "application/x-protobuf",
            "content-encoding": "gzip",
        }
        self._certificate = certificate
        self._timeout_s = timeout_s
        self._client: httpx2.Client | None = None

    def export(self, request: bytes) -> ReceiverAnswer:
        import httpx2  # takes long to import

        try:
            if self._client is None:
                verify = (
                    ssl.create_default_context(cafile=self._certificate)
                    if self._certificate
                    else True
                )
                self._client = httpx2.Client(
                    timeout=self._timeout_s, mounts=direct_mounts(self._endpoint), verify=verify
                )
            with self._client.stream(
                "POST", self._endpoint, content=gzip.compress(request, 1), headers=self._headers
            ) as answer:
                status = answer.status_code
                content = next(answer.iter_bytes(), b"") if status == 200 else b""
                retry_after = answer.headers.get("retry-after", "")
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            return ReceiverAnswer("unreachable", f"{type(error).__name__}: {error}"[:200])
        if status == 200:
            return ReceiverAnswer("taken", content=content)
        wait_s = float(retry_after) if retry_after.isdecimal() else 0.0
        if status == _TOO_LARGE:
            return ReceiverAnswer("too_large", f"status {status}")
        outcome: Literal["unreachable", "refused"] = (
            "unreachable" if status in _RETRIED_STATUSES else "refused"
        )
        return ReceiverAnswer(outcome, f"status {status}", wait_s)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class GrpcReceiver:
    """Receiver of OTLP over gRPC."""

    def __init__(
        self, endpoint: str, headers: Mapping[str, str], certificate: str, timeout_s: float
    ) -> None:
        """Connect at the first request. Arguments are as for `HttpReceiver`; of the endpoint its origin is used."""
        self._endpoint = urlsplit(endpoint)
        self._metadata = [(name.lower(), value) for name, value in headers.items()]
        self._certificate = certificate
        self._timeout_s = timeout_s
        self._channel: grpc.Channel | None = None

    def export(self, request: bytes) -> ReceiverAnswer:
        import grpc  # is optional, and takes long to import

        try:
            if self._channel is None:
                self._channel = self._connect()
            call = self._channel.unary_unary(EXPORT_METHOD)
            content = call(
                request,
                timeout=self._timeout_s,
                metadata=self._metadata,
                compression=grpc.Compression.Gzip,
            )
        except grpc.RpcError as error:
            return _read_error(error)
        except (OSError, TypeError, ValueError) as error:
            return ReceiverAnswer("refused", f"{type(error).__name__}: {error}"[:200])
        return ReceiverAnswer("taken", content=content)

    def _connect(self) -> grpc.Channel:
        import grpc

        host = self._endpoint.hostname or ""
        port = self._endpoint.port or GRPC_PORT
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self._endpoint.scheme == "http":
            return grpc.insecure_channel(target)
        authorities = Path(self._certificate).read_bytes() if self._certificate else None
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(authorities))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def _read_error(error: grpc.RpcError) -> ReceiverAnswer:
    code, details = error.code().name, error.details() or ""
    problem = f"{code}: {details}"[:200]
    if _LARGE_MESSAGE.search(details):
        return ReceiverAnswer("too_large", problem)
    metadata = dict(error.trailing_metadata() or ())
    found = _RETRY_INFO.search(metadata.get("grpc-status-details-bin", b""))
    if found is None and code not in _RETRIED_CODES:
        return ReceiverAnswer("refused", problem)
    wait_s = (
        0
        if found is None
        else sum((byte & 127) << 7 * place for place, byte in enumerate(found[1]))
    )
    return ReceiverAnswer("unreachable", problem, float(wait_s))
