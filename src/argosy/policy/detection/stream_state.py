"""Knowledge of the traffic of a model or a tenant, and its deviations. Storable as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from argosy.policy.detection.baseline import SeasonalBaseline
from argosy.policy.detection.detector import ChangeDetector
from argosy.policy.detection.traffic_cell import CellKey, Threshold

DeviationKind = Literal["fast", "slow", "sibling", "volume"]


class StreamDeviation(msgspec.Struct, kw_only=True):
    """Share of an event that has risen. Storable as JSON."""

    kind: DeviationKind
    """Whether it was found in steps of 5 minutes, in hours, by comparing replicas, or by the tokens of a tenant."""
    event: str
    onset: float
    """Most likely time of the change, in seconds since the epoch."""
    found_at: float
    share: float = 0.0
    """Share in the latest window. Of a volume, its part of the tokens of the model."""
    expected: float = 0.0
    tokens_per_s: float = 0.0
    """Tokens of a volume. The next two are known of volumes only as well."""
    usual_tokens_per_s: float = 0.0
    """Tokens in the busiest hour before; 0 if less than an hour is known."""
    others_wait_s: float = 0.0
    """Mean time in the queue of the other tenants' requests."""


class StreamState(msgspec.Struct, kw_only=True):
    """Knowledge of the traffic of a model or of one of its tenants. Storable as JSON."""

    key: CellKey
    since: float
    requests: float = 0.0
    """Requests of the last days, of which old ones count less."""
    histograms: dict[str, dict[int, int]] = {}
    """Values of the first days, from which the thresholds come. Later those of categories, halved each week."""
    thresholds: dict[str, Threshold | None] | None = None
    """Bucket beyond which each event is, or its usual categories; None while the stream learns."""
    week: int = -1
    """Week in which it was last looked for other usual categories."""
    tokens: dict[int, float] = {}
    """Tokens by hour of the week. Those of a week before count half."""
    baselines: dict[str, SeasonalBaseline] = {}
    fast: dict[str, ChangeDetector] = {}
    slow: dict[str, ChangeDetector] = {}
    deviations: dict[str, StreamDeviation] = {}
    hours: dict[str, list[tuple[int, int, float]]] = {}
    """Events, opportunities and expected events of the last hours, by event."""


class AcceptedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Version whose rollout has passed its gate, with what is expected since. Storable as JSON."""

    model: str
    version: str
    """Digest, of which the versions of cells are beginnings."""
    at: float
    """When the gate had passed, in seconds since the epoch."""
    ratios: dict[str, float] = {}
    """By event, the share of the version relative to that of the versions before, if it differs."""


class MonitorState(msgspec.Struct, kw_only=True):
    """Memory for the next controller. Storable as JSON."""

    streams: list[StreamState] = []
    accepted: list[AcceptedVersion] = []
