"""Answers queries for time series from this gateway and the others of its store."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import Sequence
from urllib.parse import quote, unquote

import msgspec
import structlog

from argosy.gateway.http_route import HttpRoute
from argosy.gateway.peer_connection import check_peer_token
from argosy.gateway.peer_gateways import PeerGateways
from argosy.gateway.principal import Principal
from argosy.gateway.series_collector import SeriesCollector
from argosy.http_server import HttpExchange
from argosy.process import run_in_daemon_thread
from argosy.protocol import parse_body
from argosy.series import (
    SCHEMAS,
    SeriesFrame,
    check_metrics,
    choose_step,
    compute_metrics,
    fill_from_archive,
    merge_gateways,
    metric_names,
    needed_histograms,
    read_series,
    scope_kind,
)
from argosy.store import GatewayRecord, StoreError

PEER_SERIES_PATH = "/peer/series"
DEFAULT_RANGE_S = 900
MAX_RANGE_S = 10 * 366 * 86400
PEER_DELAY_S = 2
"""Seconds that other gateways get to close a second before it is part of an answer."""
PEERS_REFRESH_S = 5.0
"""How long a list of the other gateways is used, and a gateway that does not answer is not asked again."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class SeriesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Values of metrics at equal steps."""

    scope: str
    step_s: int
    """Seconds per step."""
    start: int
    """Time of the first step, in seconds since the epoch."""
    metrics: dict[str, list[float | None]]
    """Values by metric, one per step. A gap is null."""
    partial: list[str]
    """Gateways that did not answer. Their requests are missing in the values."""


class _Range(msgspec.Struct, frozen=True):
    """Range of a scope that a gateway reads."""

    scope: str
    start: int
    step_s: int
    steps: int
    histograms: Sequence[str]

    def to_query(self) -> str:
        return quote(msgspec.json.encode(self), safe="")


class SeriesQueries:
    """Reads series, merged over the gateways."""

    def __init__(
        self, collector: SeriesCollector, gateway_id: str, peers: PeerGateways | None
    ) -> None:
        self._collector = collector
        self._gateway_id = gateway_id
        self._peers = peers
        self._others: list[GatewayRecord] = []
        self._others_expire_at = -math.inf
        self._ask_again_at: dict[str, float] = {}
        """Monotonic time from which a gateway that did not answer is asked again."""

    async def query(
        self,
        scope: str,
        metrics: Sequence[str] | None,
        start: float | None,
        end: float | None,
        step_s: int | None,
    ) -> SeriesAnswer:
        """Return metrics of a scope.

        Args:
            scope: `fleet`, `model:NAME`, `replica:NAME` or `tenant:ID`.
            metrics: Names of the metrics. None for all.
            start: Begin of the range in seconds since the epoch. None for 15 minutes before its end.
            end: End of the range. None for now.
            step_s: Smallest step. The answer has this step or a larger one.

        Raises:
            ValueError: The scope, a metric or the range is invalid.
        """
        kind = scope_kind(scope)
        metrics = metric_names(kind) if metrics is None else metrics
        check_metrics(kind, metrics)
        now = time.time()
        end = min(now, now if end is None else end)
        start = end - DEFAULT_RANGE_S if start is None else start
        if not 0 < end - start <= MAX_RANGE_S:
            message = "from must lie before to, in the past and by at most 10 years. Give times in seconds since 1970."
            raise ValueError(message)
        others = await self._list_others()
        step_s = choose_step(kind, start, end, now, step_s)
        last_second = self._collector.recorder.last_second  # 0 before the first
        closed_end = last_second + 1 if last_second else int(now)
        if others:
            closed_end = min(closed_end, int(now) - PEER_DELAY_S)
        first = int(start) // step_s
        last = max(first, min(math.ceil(end / step_s), closed_end // step_s))
        wanted = _Range(
            scope, first * step_s, step_s, last - first, needed_histograms(kind, metrics)
        )
        own, answers = await asyncio.gather(
            self._read(wanted), asyncio.gather(*(self._ask(other, wanted) for other in others))
        )
        frames = [own, *(answer for answer in answers if answer is not None)]
        values = await asyncio.to_thread(_merge_and_compute, scope, metrics, frames)
        return SeriesAnswer(
            scope=scope,
            step_s=step_s,
            start=wanted.start,
            metrics=values,
            partial=[
                other.id for other, answer in zip(others, answers, strict=True) if answer is None
            ],
        )

    def build_route(self, secret: str) -> HttpRoute:
        """Return the route for other gateways, whose requests are signed with `secret`."""

        async def handle(exchange: HttpExchange, principal: Principal) -> None:
            del principal  # the signature authenticates the gateway
            query = exchange.query.decode("latin-1")
            check_peer_token(exchange, secret, _describe_question(query))
            wanted = parse_body(_Range, unquote(query).encode())
            frame = await self._read(wanted)
            body = frame.encode(SCHEMAS[scope_kind(wanted.scope)])
            await exchange.send_response(200, body, b"application/msgpack")

        return HttpRoute("GET", PEER_SERIES_PATH, handle, is_public=True)

    async def _read(self, wanted: _Range) -> SeriesFrame:
        """Read this gateway's series."""
        recorder = self._collector.recorder
        frame = read_series(
            recorder, wanted.scope, wanted.start, wanted.step_s, wanted.steps, wanted.histograms
        )
        archive = self._collector.archive
        end = wanted.start + wanted.steps * wanted.step_s
        if archive is not None and not frame.is_known_until(end):
            try:
                await run_in_daemon_thread(
                    fill_from_archive, frame, wanted.scope, archive.read, recorder.last_second
                )
            except sqlite3.Error as error:
                log.warning("series_file_unreadable", reason=str(error))
        return frame.cut(wanted.start, wanted.steps)

    async def _ask(self, other: GatewayRecord, wanted: _Range) -> SeriesFrame | None:
        """Ask another gateway. Returns None if it does not answer."""
        if self._peers is None or time.monotonic() < self._ask_again_at.get(other.id, 0.0):
            return None
        query = wanted.to_query()
        body = await self._peers.fetch(
            other, f"{PEER_SERIES_PATH}?{query}", _describe_question(query)
        )
        if body is None:
            self._ask_again_at[other.id] = time.monotonic() + PEERS_REFRESH_S
            return None
        schema = SCHEMAS[scope_kind(wanted.scope)]
        like = (wanted.start, wanted.step_s, wanted.steps)
        try:
            return SeriesFrame.decode(body, schema, like, wanted.histograms)
        except ValueError as error:
            log.warning("peer_gateway_unreachable", gateway=other.id, reason=str(error))
            return None

    async def _list_others(self) -> list[GatewayRecord]:
        """Return the other gateways. While the store does not respond, those that were known last."""
        if self._peers is not None and time.monotonic() >= self._others_expire_at:
            self._others_expire_at = time.monotonic() + PEERS_REFRESH_S
            try:
                self._others = await self._peers.list_others()
                known = {other.id for other in self._others}
                self._ask_again_at = {
                    gateway: at for gateway, at in self._ask_again_at.items() if gateway in known
                }
            except (StoreError, TimeoutError) as error:
                log.warning(
                    "series_peers_unknown", reason=str(error) or "the store does not respond"
                )
        return self._others


def _merge_and_compute(
    scope: str, metrics: Sequence[str], frames: Sequence[SeriesFrame]
) -> dict[str, list[float | None]]:
    kind = scope_kind(scope)
    return compute_metrics(kind, metrics, merge_gateways(frames, SCHEMAS[kind]))


def _describe_question(query: str) -> str:
    """Return what the token of a question signs."""
    return f"GET {PEER_SERIES_PATH}\n{query}"
