"""Settings of one server that answers for a model."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.protocol import Endpoint
from argosy.proxies import Proxy, find_proxy, is_inside
from argosy.store import ReplicaWeight

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_RESERVED_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
"""Headers that the gateway writes itself. A second one would let a request end at another byte (request smuggling)."""
BackendKind = Literal[
    "auto",
    "argosy",
    "vllm",
    "sglang",
    "tensorrt-llm",
    "tgi",
    "lmdeploy",
    "llama.cpp",
    "openai",
]
"""Kind of server behind a replica.

`auto` is a kind that is not known yet and is detected. `openai` is any other server or hosted API with an
OpenAI-compatible API.
"""

ResumeMode = Literal["exact", "prefill", "none"]
"""Best way in which a broken stream may be resumed.

`exact` resumes from token ids, `prefill` from the text, `none` not at all.
"""

DiscoveryMode = Literal["dns", "dns4", "dns6"]
"""Addresses to use: all of a name, or only those of IPv4 or IPv6."""

ZmqAddress = Annotated[
    str, Meta(pattern=r"^(tcp://.+:[0-9]+|ipc://.+)$(?!\n)", examples=["tcp://10.0.0.5:5557"])
]
"""Address in the notation of ZeroMQ."""
_WILDCARD_PREFIX = "tcp://*:"


class KvEventAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address at which to subscribe to a server's KV cache events."""

    endpoint: ZmqAddress
    """`tcp://HOST:PORT` or `ipc://PATH`. The host `*` stands for the host of the server."""
    replay: ZmqAddress | None = None
    """Address that replays missed events; None if the server replays none."""

    @property
    def has_wildcard_host(self) -> bool:
        """Whether the addresses have the host `*`, so that they suit any server."""
        return all(
            address is None or address.startswith(_WILDCARD_PREFIX)
            for address in (self.endpoint, self.replay)
        )

    def resolve_host(self, server: Endpoint) -> KvEventAddress:
        """Return the address with the host `*` replaced by the host of `server`."""
        prefix = f"tcp://{_server_host(server)}:"
        replay = None if self.replay is None else self.replay.replace(_WILDCARD_PREFIX, prefix)
        return KvEventAddress(
            endpoint=self.endpoint.replace(_WILDCARD_PREFIX, prefix), replay=replay
        )


class UpstreamTls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setting `tls` of a replica with an `https` URL. Files are PEM. The replica's certificate is always verified."""

    ca: str | None = None
    """File of the authority that signs the replica's certificate; by default the system's trusted authorities apply."""
    certificate: str | None = None
    """File of the gateway's client certificate, for replicas that require one."""
    key: str | None = None
    """File of the private key for `certificate`."""
    server_name: str | None = None
    """Host name to send (SNI) and to verify, if it differs from the host in the URL."""

    def digest(self) -> bytes:
        """Return a digest of the files' contents, by which a change is noticed. Raises OSError."""
        paths = (self.ca, self.certificate, self.key)
        contents = [Path(path).read_bytes() for path in paths if path is not None]
        return hashlib.blake2b(b"\0".join(contents)).digest()


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one server that answers for a model."""

    url: str
    """Address of the server, such as `http://10.0.0.5:8000` or `unix:///run/replica.sock`."""
    discover: DiscoveryMode | None = None
    """Create one replica per address of the URL's host name, and look the name up regularly."""
    name: str | None = None
    """Name in metrics, explanations and the ledger. Defaults to the URL. Discovered replicas are named NAME@ADDRESS."""
    kind: BackendKind = "auto"
    """Server program. `auto` detects it from the server's responses."""
    model: str | None = None
    """Name of the model at this server. Defaults to the public name."""
    max_requests: Annotated[int, Meta(ge=1)] | None = None
    """Concurrency slots, of which a request takes one for each choice or input. None means as many sequences as the
    server reports to run, or 256 if it reports none."""
    api_key_env: str | None = None
    """Environment variable that holds the server's API key."""
    key_header: str = "authorization"
    """Header that carries the backend's key."""
    key_prefix: str = "Bearer "
    """Text before the key in that header."""
    headers: dict[str, str] = {}
    """Headers of every request to this server, for example an organisation, a project or an API version."""
    resume_mode: ResumeMode = "exact"
    """The most exact way in which an interrupted stream may be resumed on this server."""
    arithmetic: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """Name of the arithmetic of a server that does not report it, such as `bf16-h100`. An interrupted stream is
    resumed only on servers with the same name. Native replicas report their arithmetic."""
    weight: ReplicaWeight = 1.0
    """Share of the requests relative to the model's other replicas. `argosy replicas weight` overrides it."""
    cordoned: bool = False
    """Whether the replica gets no requests until `argosy replicas undrain`."""
    stream_usage: bool = True
    """Request usage in streams. Switch it off for servers that reject `stream_options`."""
    priority_scheduling: bool = False
    """Send a priority with each request. The server must have been started with priority scheduling (vLLM:
    --scheduling-policy priority, SGLang: --enable-priority-scheduling)."""
    adapter_root: (
        Annotated[
            str, Meta(pattern=r"^/[^\x00\n]*$(?!\n)", max_length=1000, examples=["/adapters"])
        ]
        | None
    ) = None
    """Folder of the server's machine in which vLLM or SGLang finds adapters, each in a folder named by the digits of
    its digest. By default that of the gateway's own model store."""
    kv_events: KvEventAddress | None = None
    """Address at which vLLM or SGLang publishes KV cache events. None: the gateway queries the server for it."""
    tls: UpstreamTls = UpstreamTls()
    """Certificates for connections to the server."""
    proxy: bool | None = None
    """Whether to use the proxy of the environment (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY). None: only for a server of kind
    `auto` or `openai` that is outside, and that NO_PROXY does not except."""


def find_contradiction(replica: ReplicaConfig) -> str | None:
    """Return what contradicts itself in the settings of a replica, with the remedy; None if nothing does."""
    if replica.discover is not None:
        if not replica.url.startswith(("http:", "https:")):
            return "discover needs a URL with a host name. Write http://HOST:PORT."
        if replica.kv_events is not None and not replica.kv_events.has_wildcard_host:
            return "kv_events names one server, but discover finds several. Write tcp://*:PORT."
        if replica.proxy:
            return "discover finds addresses, but a proxy is sent names. Remove proxy or discover."
    if replica.tls != UpstreamTls() and not replica.url.startswith("https:"):
        return "tls needs an https URL. Write https, or remove tls."
    if replica.kv_events is not None and replica.kind not in {"auto", "vllm", "sglang"}:
        return "kv_events is only supported for kind vllm or sglang. Remove it."
    if replica.arithmetic is not None and replica.kind == "argosy":
        return "a replica of kind argosy reports its arithmetic. Remove `arithmetic`."
    if replica.priority_scheduling and replica.kind not in {"auto", "vllm", "sglang"}:
        return "priority_scheduling is only supported for kind vllm or sglang. Remove it."
    return None


def build_configured_headers(replica: ReplicaConfig) -> tuple[tuple[bytes, bytes], ...]:
    """Build the headers that every request to a replica carries.

    Raises:
        ValueError: The environment variable of the key is not set, or a configured header is invalid.
    """
    headers = dict(replica.headers)
    if replica.api_key_env is not None:
        key = os.environ.get(replica.api_key_env)
        if not key:
            raise ValueError(
                f"{replica.url}: the environment variable {replica.api_key_env} is not set. Set it to the API key."
            )
        headers[replica.key_header] = replica.key_prefix + key
    for name, value in headers.items():
        if name.lower() in _RESERVED_HEADERS:
            raise ValueError(
                f"{replica.url}: the gateway sets the header {name!r} itself. Remove it."
            )
        if not (_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
            raise ValueError(f"{replica.url}: {name!r} is not a valid header. Use plain ASCII.")
    return tuple((name.lower().encode(), value.encode()) for name, value in headers.items())


def _server_host(server: Endpoint) -> str:
    """Return the host of a server in the notation of URLs."""
    host = server.address or (server.host if server.socket_path is None else "127.0.0.1")
    return f"[{host}]" if ":" in host else host


def find_replica_proxy(replica: ReplicaConfig, server: Endpoint) -> Proxy | None:
    """Return the proxy by which a server is reached; None for a direct connection.

    Servers of the fleet are reached directly: engines that one runs oneself, and hosts inside.

    Raises:
        ValueError: The environment's proxy cannot be used, or there is none although the setting `proxy` demands one.
    """
    if replica.proxy is False or server.socket_path is not None:
        return None
    is_hosted = replica.kind in {"auto", "openai"} and replica.discover is None
    if replica.proxy is None and (not is_hosted or is_inside(server.host)):
        return None
    proxy = find_proxy("https" if server.tls else "http", server.host, server.port)
    if proxy is None and replica.proxy:
        variable = "HTTPS_PROXY" if server.tls else "HTTP_PROXY"
        raise ValueError(
            f"{replica.url}: `proxy` needs one. Set {variable}, and remove the host from NO_PROXY."
        )
    return proxy
