"""Tenants that send far more tokens than before, or that crowd out others before anything is known of them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

import msgspec

from argosy.policy.detection.baseline import HOUR_S, WEEK_HOURS, hour_of_week
from argosy.policy.detection.stream_state import StreamDeviation, StreamState
from argosy.policy.detection.traffic_cell import CellKey, TrafficCell

STEP_S = 300
VOLUME = "volume"
"""Name of the deviation of a tenant that sends far more tokens than before."""
SURGE_STEPS = 2
"""Latest steps whose tokens are compared with those before."""
MIN_SURGE_REQUESTS, MIN_SURGE_TOKENS = 50, 10_000
SURGE_RATIO, SURGE_END_RATIO = 5.0, 2.5
"""Tokens beside those of the busiest hour from which a tenant deviates, and below which it does so no more."""
SURGE_SHARE = 0.5
"""Part of the tokens of its model that a tenant takes at least, unless others wait."""
SURGE_WAIT_S = 1.0
"""Mean time from which others wait."""
MIN_WAITING_REQUESTS = 20
HOUR_STEPS = HOUR_S // STEP_S
DAY_S = 24 * HOUR_S


class _Volume(msgspec.Struct):
    """Traffic of a tenant or model in one step."""

    requests: int = 0
    tokens: int = 0
    queued_ms: int = 0

    def add(self, other: _Volume | TrafficCell) -> None:
        self.requests += other.requests
        self.tokens += other.tokens
        self.queued_ms += other.queued_ms


class TenantVolumes:
    """Counts of the last day by tenant and model, in steps of `STEP_S`."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, dict[CellKey, _Volume]]] = deque(maxlen=DAY_S // STEP_S)

    def count(
        self, at: int, cells: Mapping[CellKey, TrafficCell], streams: Mapping[CellKey, StreamState]
    ) -> None:
        """Compare the tokens of each tenant with those of its busiest hour before, and with those of the model.

        Args:
            at: Begin of a step, in seconds since the epoch.
            cells: Counts of the step by model, and by model and tenant.
            streams: What is known of them, whose deviations are updated.
        """
        volumes = defaultdict[CellKey, _Volume](_Volume)
        for key, cell in cells.items():
            volumes[key].add(cell)
        self._steps.append((at, volumes))
        steps = {start: of_step for start, of_step in self._steps if start > at - DAY_S}
        first = at - (SURGE_STEPS - 1) * STEP_S
        latest = defaultdict[CellKey, _Volume](_Volume)
        for start in range(first, at + 1, STEP_S):
            for key, volume in steps.get(start, {}).items():
                latest[key].add(volume)
        for key, stream in streams.items():
            if key.is_of_tenant and (VOLUME in stream.deviations or key in volumes):
                usual = _find_busiest_hour(stream, steps, first)
                _judge(stream, latest[key], latest[CellKey(model=key.model)], usual, first, at)


def _find_busiest_hour(
    stream: StreamState, steps: Mapping[int, Mapping[CellKey, _Volume]], until: int
) -> float:
    """Return the tokens per second of a tenant in its busiest hour of the last day, or at this hour of weeks before.

    Returns 0 if less than an hour is known.
    """
    _, hour = hour_of_week(until)
    season = max(stream.tokens.get((hour + offset) % WEEK_HOURS, 0.0) for offset in (-1, 0, 1))
    first = max(min(steps), int(stream.since))
    if until - first < HOUR_S:
        return season / HOUR_S
    of_steps = [
        volume.tokens if (volume := steps.get(start, {}).get(stream.key)) else 0
        for start in range(first, until, STEP_S)
    ]
    total = busiest = sum(of_steps[:HOUR_STEPS])
    for left, entered in zip(of_steps, of_steps[HOUR_STEPS:], strict=False):
        total += entered - left
        busiest = max(busiest, total)
    return max(busiest, season, 1.0) / HOUR_S


def _judge(
    stream: StreamState,
    own: _Volume,
    model: _Volume,
    usual: float,
    onset: int,
    at: int,
) -> None:
    """Begin, update or end the deviation of a tenant's tokens.

    Args:
        stream: The tenant's stream.
        own: Its traffic in the latest steps.
        model: That of its model.
        usual: Its tokens per second before; 0 if they are not known.
        onset: Begin of the latest steps, in seconds since the epoch.
        at: Begin of the last one.
    """
    others = _Volume(-own.requests, -own.tokens, -own.queued_ms)
    others.add(model)
    share = own.tokens / max(1, model.tokens)
    rate = own.tokens / (SURGE_STEPS * STEP_S)
    wait_s = others.queued_ms / 1000.0 / max(1, others.requests)
    others_wait = others.requests >= MIN_WAITING_REQUESTS and wait_s >= SURGE_WAIT_S
    deviation = stream.deviations.get(VOLUME)
    if deviation is None:
        is_large = own.requests >= MIN_SURGE_REQUESTS and own.tokens >= MIN_SURGE_TOKENS
        takes_much = share >= SURGE_SHARE
        has_grown = usual > 0.0 and rate >= SURGE_RATIO * usual and (takes_much or others_wait)
        crowds_out = usual == 0.0 and takes_much and others_wait
        if not is_large or not (has_grown or crowds_out):
            return
        deviation = stream.deviations[VOLUME] = StreamDeviation(
            kind="volume", event=VOLUME, onset=onset, found_at=at + STEP_S, usual_tokens_per_s=usual
        )
    deviation.share, deviation.tokens_per_s, deviation.others_wait_s = share, rate, wait_s
    usual = deviation.usual_tokens_per_s
    is_over = (
        rate < SURGE_END_RATIO * usual if usual else not (share >= SURGE_SHARE and others_wait)
    )
    if is_over or at >= deviation.onset + DAY_S:
        del stream.deviations[VOLUME]
