"""Waiting for a model that starts: how long a client can, and what its stream receives meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping

import msgspec

from argosy.deployment import ColdStartConfig
from argosy.gateway.proxy.response_writers import ResponseWriter
from argosy.gateway.request_context import RequestContext
from argosy.http_server import HttpExchange
from argosy.policy.placement import RequestState
from argosy.protocol import format_comment, format_event

DEADLINE_HEADER = b"x-argosy-deadline"
"""Seconds for which the client waits for the response."""
READ_TIMEOUT_HEADER = b"x-stainless-read-timeout"
"""Seconds without data after which an SDK gives up."""
TIMEOUT_HEADERS = (DEADLINE_HEADER, READ_TIMEOUT_HEADER, b"x-stainless-timeout")
"""Headers with the seconds for which a client waits for a response in one piece."""
ANSWER_MARGIN_S = 5.0
"""Time before the client gives up at which it is refused, so that it learns how far the start is."""
MAX_SILENT_FRACTION = 0.5
"""Part of the client's read timeout after which its stream receives a comment."""


def find_start_wait_s(
    headers: Mapping[bytes, bytes], config: ColdStartConfig, *, is_stream: bool
) -> float:
    """Return how long a request may wait for the start of its model.

    A read timeout does not limit a stream, because its comments are data.
    """
    hold_s = config.hold_s if is_stream else config.non_streaming_hold_s
    if headers.keys().isdisjoint(TIMEOUT_HEADERS):  # as in nearly all requests
        return hold_s
    names = (DEADLINE_HEADER,) if is_stream else TIMEOUT_HEADERS
    return max(0.0, min(hold_s, _find_shortest_s(headers, names) - ANSWER_MARGIN_S))


def find_comment_interval_s(exchange: HttpExchange, config: ColdStartConfig) -> float:
    """Return the interval of the comments in a stream that waits."""
    read_timeout_s = _find_shortest_s(exchange.headers, (READ_TIMEOUT_HEADER,))
    return min(config.comment_interval_s, MAX_SILENT_FRACTION * read_timeout_s)


def waits_for_start(context: RequestContext) -> bool:
    """Whether the request waits for the start of its model, and its response has begun with headers."""
    return (
        context.pool.is_starting
        and context.exchange.status is not None
        and context.placement is not None
        and context.placement.state is RequestState.WAITING
    )


class StartNotifier:
    """Reports the progress of a start to the client of one stream. Times are monotonic seconds."""

    def __init__(
        self, context: RequestContext, writer: ResponseWriter, config: ColdStartConfig
    ) -> None:
        self._context = context
        self._writer = writer
        self._config = config
        self._interval_s = 0.0
        """Interval of the comments, from the first one on."""
        self._notified_at = -math.inf
        self._event_at = 0.0

    def notify(self, now: float) -> None:
        """Send what is due: a comment, and now and then an event that clients with timeouts for events count."""
        if now - self._notified_at < self._interval_s:
            return
        self._notified_at = now
        config, event = self._config, None
        if not self._event_at:
            self._event_at = now
            self._interval_s = min(
                find_comment_interval_s(self._context.exchange, config), config.event_interval_s
            )
        elif now - self._event_at >= config.event_interval_s:
            self._event_at, event = now, self._build_event()
        self._writer.send_progress(self._build_comment(), event)

    def _build_comment(self) -> bytes:
        """Return a comment such as `: argosy starting 41 % eta 38s`."""
        startup, wall_now, text = self._context.pool.startup, time.time(), "argosy starting"
        if startup is not None:
            progress, eta_s = startup.progress(wall_now), startup.eta_s(wall_now)
            text += "" if progress is None else f" {100 * progress:.0f} %"
            text += "" if eta_s is None else f" eta {eta_s:.0f}s"
        return format_comment(text.encode())

    def _build_event(self) -> bytes:
        """Return a chunk without choices, as the API has them for the usage."""
        context = self._context
        chunk = {
            "id": context.response_id,
            "object": context.api.chunk_object_type,
            "created": int(context.started_at),
            "model": context.fields.model,
            "choices": [],
        }
        return format_event(msgspec.json.encode(chunk))


def _find_shortest_s(headers: Mapping[bytes, bytes], names: Iterable[bytes]) -> float:
    """Return the shortest of the times in the headers with these names; infinite if none has one."""
    return min((_parse_seconds(headers.get(name, b"")) for name in names), default=math.inf)


def _parse_seconds(text: bytes) -> float:
    """Return a positive number of seconds; infinite if the text is none, such as `None` of an SDK without timeout."""
    try:
        seconds = float(text)
    except ValueError:
        return math.inf
    return seconds if seconds > 0.0 else math.inf
