"""Where a server publishes its KV cache events: as its configuration says, or as it says itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.protocol import Endpoint

Address = Annotated[str, Meta(pattern=r"^(tcp://.+:[0-9]+|ipc://.+)$")]
"""As ZeroMQ writes them."""
_OWN = "tcp://*:"


class KvAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to subscribe to a server's KV cache events."""

    endpoint: Address
    """`tcp://HOST:PORT`, or `ipc://PATH`. A HOST `*` is the server's own, as where it listens."""
    replay: Address | None = None
    """Where it gives again what was missed, if it does."""

    @property
    def everywhere(self) -> bool:
        """Whether it says so of any server."""
        return all(one is None or one.startswith(_OWN) for one in (self.endpoint, self.replay))

    def at(self, server: Endpoint) -> KvAddress:
        """The addresses of this server, as seen from here."""
        own = f"tcp://{_host(server)}:"
        replay = None if self.replay is None else self.replay.replace(_OWN, own)
        return KvAddress(endpoint=self.endpoint.replace(_OWN, own), replay=replay)


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where a server says that it publishes them, and how that is read."""

    path: bytes
    read: Callable[[bytes], KvPorts | None]
    """None: none that can be followed. Raises ValueError or msgspec.DecodeError when it is not what was expected."""


@dataclass(frozen=True, slots=True)
class KvPorts:
    """Of the server's own host: an address elsewhere is not taken from it."""

    events: int
    replay: int | None = None

    def at(self, server: Endpoint) -> KvAddress:
        """The addresses, as seen from here."""
        replay = None if self.replay is None else f"{_OWN}{self.replay}"
        return KvAddress(endpoint=f"{_OWN}{self.events}", replay=replay).at(server)


def _host(server: Endpoint) -> str:
    """Where it is, as addresses have it."""
    host = server.address or (server.host if server.unix is None else "127.0.0.1")
    return f"[{host}]" if ":" in host else host


class _Publisher(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None


def vllm_sources(body: bytes) -> KvPorts | None:
    """`/kv_event_sources` of vLLM: one for each data-parallel rank. Which rank a request gets cannot be chosen."""
    sources = list(msgspec.json.decode(body, type=dict[str, _Publisher]).values())
    if len(sources) != 1 or not sources[0].endpoint.startswith("tcp://"):
        return None
    replay = sources[0].replay_endpoint
    return KvPorts(_port(sources[0].endpoint), None if replay is None else _port(replay))


class _KvEvents(msgspec.Struct):
    endpoint_port_base: int
    dp_size: int = 1


class _ServerInfo(msgspec.Struct):
    kv_events: _KvEvents | None = None


def sglang_info(body: bytes) -> KvPorts | None:
    """SGLang's `/server_info`; it does not say where it replays."""
    told = msgspec.json.decode(body, type=_ServerInfo).kv_events
    return None if told is None or told.dp_size != 1 else KvPorts(told.endpoint_port_base)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
