"""Where a server publishes its KV cache events: as its configuration says, or as it says itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.protocol import Endpoint

ZmqAddress = Annotated[str, Meta(pattern=r"^(tcp://.+:[0-9]+|ipc://.+)$")]
"""As ZeroMQ writes them."""
_WILDCARD_PREFIX = "tcp://*:"


class KvEventAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to subscribe to a server's KV cache events."""

    endpoint: ZmqAddress
    """`tcp://HOST:PORT`, or `ipc://PATH`. A HOST `*` is the server's own, as where it listens."""
    replay: ZmqAddress | None = None
    """Where it gives again what was missed, if it does."""

    @property
    def has_wildcard_host(self) -> bool:
        """Whether it says so of any server."""
        return all(
            one is None or one.startswith(_WILDCARD_PREFIX) for one in (self.endpoint, self.replay)
        )

    def resolve_host(self, server: Endpoint) -> KvEventAddress:
        """The addresses of this server, as seen from here."""
        own = f"tcp://{_server_host(server)}:"
        replay = None if self.replay is None else self.replay.replace(_WILDCARD_PREFIX, own)
        return KvEventAddress(endpoint=self.endpoint.replace(_WILDCARD_PREFIX, own), replay=replay)


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Where a server says that it publishes them, and how that is read."""

    path: bytes
    parse: Callable[[bytes], KvEventPorts | None]
    """None: none that can be followed. Raises ValueError or msgspec.DecodeError when it is not what was expected."""


@dataclass(frozen=True, slots=True)
class KvEventPorts:
    """Of the server's own host: an address elsewhere is not taken from it."""

    events_port: int
    replay_port: int | None = None

    def to_address(self, server: Endpoint) -> KvEventAddress:
        """The addresses, as seen from here."""
        replay = None if self.replay_port is None else f"{_WILDCARD_PREFIX}{self.replay_port}"
        return KvEventAddress(
            endpoint=f"{_WILDCARD_PREFIX}{self.events_port}", replay=replay
        ).resolve_host(server)


def _server_host(server: Endpoint) -> str:
    """Where it is, as addresses have it."""
    host = server.address or (server.host if server.socket_path is None else "127.0.0.1")
    return f"[{host}]" if ":" in host else host


class _VllmPublisher(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None


def parse_vllm_sources(body: bytes) -> KvEventPorts | None:
    """`/kv_event_sources` of vLLM: one for each data-parallel rank. Which rank a request gets cannot be chosen."""
    sources = list(msgspec.json.decode(body, type=dict[str, _VllmPublisher]).values())
    if len(sources) != 1 or not sources[0].endpoint.startswith("tcp://"):
        return None
    replay = sources[0].replay_endpoint
    return KvEventPorts(
        _parse_port(sources[0].endpoint), None if replay is None else _parse_port(replay)
    )


class _SglangKvEvents(msgspec.Struct):
    endpoint_port_base: int
    dp_size: int = 1


class _SglangServerInfo(msgspec.Struct):
    kv_events: _SglangKvEvents | None = None


def parse_sglang_info(body: bytes) -> KvEventPorts | None:
    """SGLang's `/server_info`; it does not say where it replays."""
    told = msgspec.json.decode(body, type=_SglangServerInfo).kv_events
    return None if told is None or told.dp_size != 1 else KvEventPorts(told.endpoint_port_base)


def _parse_port(address: str) -> int:
    return int(address.rpartition(":")[2])
