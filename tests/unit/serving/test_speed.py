"""The engine's speed: prefill from steps that compute prompts, decodes from steps that do nothing else."""

from __future__ import annotations

import pytest

from argosy.engine.scheduling import Durations, Plan
from argosy.engine.serving.engine_core.speed_estimator import Speed


def step(*counts: int) -> Plan:
    return Plan(1, counts=list(counts))


def test_prompts_and_decodes_are_told_apart() -> None:
    speed = Speed()
    assert speed.prefill_tokens_per_s == speed.decode_s(1) == 0.0
    for running in (1, 4, 16, 4, 1) * 20:
        speed.add(step(*[1] * running), Durations(compute=0.01 + 0.001 * running))
        speed.add(step(*[1] * running, 500), Durations(launch=0.05, compute=0.15, sample=0.05))
        speed.add(step(*[1] * running, 10), Durations(compute=9.0))
    assert speed.prefill_tokens_per_s == pytest.approx(2000)
    assert speed.decode_s(1) == pytest.approx(0.011)
    assert speed.decode_s(17) == pytest.approx(0.027)
