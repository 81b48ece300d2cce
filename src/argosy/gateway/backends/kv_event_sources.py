"""Addresses of a server's KV cache events, from the configuration or from the server's own report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from argosy.deployment import KvEventAddress
from argosy.protocol import Endpoint

_WILDCARD_PREFIX = "tcp://*:"


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Path at which a server reports where it publishes KV cache events, and the parser of the report."""

    path: bytes
    parse: Callable[[bytes], KvEventPorts | None]
    """Parser of the response body. Returns None if the gateway cannot subscribe.

    Raises ValueError or msgspec.DecodeError for an unexpected body.
    """


@dataclass(frozen=True, slots=True)
class KvEventPorts:
    """Ports for KV cache events on the server's own host. A host that the report names is ignored."""

    events_port: int
    replay_port: int | None = None

    def to_address(self, server: Endpoint) -> KvEventAddress:
        """Return the address of the ports on the host of `server`."""
        replay = None if self.replay_port is None else f"{_WILDCARD_PREFIX}{self.replay_port}"
        return KvEventAddress(
            endpoint=f"{_WILDCARD_PREFIX}{self.events_port}", replay=replay
        ).resolve_host(server)


class _VllmPublisher(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None


def parse_vllm_sources(body: bytes) -> KvEventPorts | None:
    """Parse `/kv_event_sources` of vLLM, which has one source per data-parallel rank.

    Returns:
        The ports; None for several ranks, because the gateway cannot choose the rank of a request.
    """
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
    """Parse `/server_info` of SGLang, which does not report a replay port. Returns None for several ranks."""
    config = msgspec.json.decode(body, type=_SglangServerInfo).kv_events
    return (
        None if config is None or config.dp_size != 1 else KvEventPorts(config.endpoint_port_base)
    )


def _parse_port(address: str) -> int:
    return int(address.rpartition(":")[2])
