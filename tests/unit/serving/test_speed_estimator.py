"""Speed estimator: prefill speed comes from steps with prompts, decode speed from steps with decodes only."""

from __future__ import annotations

import pytest

from argosy.engine.scheduling import StepDurations, StepPlan
from argosy.engine.serving.engine_core.step_stats import SpeedEstimator


def step(*counts: int) -> StepPlan:
    return StepPlan(1, counts=list(counts))


def test_prefill_and_decode_speeds_are_estimated_separately() -> None:
    speed = SpeedEstimator()
    assert speed.prefill_tokens_per_s == speed.inter_token_s(1) == 0.0
    for running in (1, 4, 16, 4, 1) * 20:
        speed.record_step(step(*[1] * running), StepDurations(compute_s=0.01 + 0.001 * running))
        speed.record_step(
            step(*[1] * running, 500), StepDurations(launch_s=0.05, compute_s=0.15, sample_s=0.05)
        )
        speed.record_step(step(*[1] * running, 10), StepDurations(compute_s=9.0))
    assert speed.prefill_tokens_per_s == pytest.approx(2000)
    assert speed.inter_token_s(1) == pytest.approx(0.011)
    assert speed.inter_token_s(17) == pytest.approx(0.027)
