"""Contents of the series of each kind of scope: counters, gauges and latency histograms."""

from __future__ import annotations

from typing import Literal

import msgspec

ScopeKind = Literal["fleet", "model", "replica", "tenant"]
GatewayMerge = Literal["sum", "mean"]

FLEET_SCOPE = "fleet"


class Gauge(msgspec.Struct, frozen=True):
    """Sampled value."""

    name: str
    merge: GatewayMerge
    """How the samples of several gateways are merged: `sum` for a gateway's own requests, `mean` for what all of them
    see of the same replicas."""


class Schema(msgspec.Struct, frozen=True):
    """Contents of one kind of scope. A row has the counters first and then the gauges."""

    counters: tuple[str, ...]
    gauges: tuple[Gauge, ...]
    histograms: tuple[str, ...]
    is_compact: bool = False
    """Whether rings keep 32-bit floats, because there may be thousands of such scopes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the values of a row."""
        return (*self.counters, *(gauge.name for gauge in self.gauges))


REQUEST_COUNTERS = (
    "requests",
    "refused",
    "limited",
    "failed",
    "cancelled",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "cost_nano_dollars",
)
GRADE_COUNTERS = ("passed_grades", "failed_grades")
"""Sampled answers by whether their grade passes."""
_REQUEST_GAUGES = (Gauge("running", "sum"), Gauge("queued", "sum"))
STEP_PHASES = ("plan", "launch", "compute", "sample", "commit")
"""Phases of a step of the engine, in their order."""
_MODEL = Schema(
    (*REQUEST_COUNTERS, *GRADE_COUNTERS),
    (
        *_REQUEST_GAUGES,
        Gauge("kv_usage_ratio", "mean"),
        Gauge("replicas_ready", "mean"),
        Gauge("replicas_desired", "mean"),
    ),
    ("ttft", "itl", "e2e", "queue"),
)
SCHEMAS: dict[ScopeKind, Schema] = {
    "fleet": _MODEL,
    "model": _MODEL,
    "replica": Schema(
        ("requests", "failed", "cancelled", "input_tokens", "cached_tokens", "output_tokens"),
        (
            Gauge("running", "sum"),
            Gauge("batch_size", "mean"),
            Gauge("waiting", "mean"),
            Gauge("kv_usage_ratio", "mean"),
            Gauge("kv_blocks_used", "mean"),
            Gauge("kv_blocks_cached", "mean"),
            Gauge("preemptions_per_s", "mean"),
            Gauge("tokens_per_step", "mean"),
            Gauge("draft_acceptance_ratio", "mean"),
            Gauge("draft_saved_s_per_s", "mean"),
            *(Gauge(f"step_{phase}_s", "mean") for phase in STEP_PHASES),
        ),
        (),
        is_compact=True,
    ),
    "tenant": Schema(REQUEST_COUNTERS, _REQUEST_GAUGES, ("ttft",)),
}


def scope_kind(scope: str) -> ScopeKind:
    """Return the kind of a scope like `fleet`, `model:NAME`, `replica:NAME` or `tenant:ID`.

    Raises:
        ValueError: No scope has this form.
    """
    if scope == FLEET_SCOPE:
        return "fleet"
    prefix, colon, _ = scope.partition(":")
    match prefix:
        case "model" | "replica" | "tenant" if colon:
            return prefix
        case _:
            message = (
                f"scope: {scope[:100]!r} is none of fleet, model:NAME, replica:NAME and tenant:ID."
            )
            raise ValueError(message)
