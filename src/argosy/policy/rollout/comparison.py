"""Comparison of the two versions of a pool by a gateway, during one step of a rollout."""

from __future__ import annotations

import msgspec

from argosy.policy.rollout.baseline import Baseline
from argosy.policy.rollout.gate_settings import GateSettings
from argosy.policy.rollout.user_history import UserRates


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the versions of a pool, which a rollout publishes with the route of the pool."""

    rollout: str
    """Id of the rollout."""
    candidate: str
    """Digest of the version that is compared with the stable one."""
    step: int
    """Step for which requests count that are sent from now on."""
    share: float
    """Share of the step, as for `RolloutGate.open_step`."""
    num_gate_starts: int
    """As for `RolloutGate.start`."""
    settings: GateSettings = GateSettings()
    baseline: Baseline = Baseline()
    rates: UserRates = UserRates()
    max_ttft_s: float | None = None
    """Declared objective: a request whose first token is later misses it. None if none is declared."""
    max_time_per_token_s: float | None = None
