"""Result of a run."""

from __future__ import annotations

import msgspec

from argosy.bench import RunSummary


class TwinResult(msgspec.Struct, kw_only=True):
    """Result of a run."""

    seed: int
    configuration: str
    """Digest of the scenario."""
    trace_hash: str
    """Hash of all that happened. The same seed, configuration and version give the same hash."""
    events: int
    simulated_s: float
    failure: str = ""
    """Invariant that did not hold; empty if all did."""
    summary: RunSummary
    utilisation: float
    """Part of the replicas' time in which they computed steps."""
    replica_hours: float
    cached_fraction: float
    """Part of the prompt tokens that were in a prefix cache."""
    effects: dict[str, int]
    """Attempts and ends of requests by kind."""
    actions: dict[str, int]
    """Actions of the controller by kind."""
    rollout: str
    """State of the last rollout; empty if there was none."""
    intervals: dict[str, float] = {}
    """Half widths of 95 % intervals, from the uncertainty of fitted prices. Empty if the scenario has none.

    Their keys are `ttft.p50` and so on, in ms, and `output_token_rate`."""
