"""Which tokens are computed next: pure Python, no torch, no clock, no randomness of its own."""

from argosy.engine.scheduling.block_pool import BlockPool, HostIndex
from argosy.engine.scheduling.scheduler import Limits, Progress, Scheduler
from argosy.engine.scheduling.sequence import Sequence
from argosy.engine.scheduling.step_plan import (
    Admission,
    Durations,
    Logprob,
    Plan,
    Restore,
    StepResult,
)

__all__ = [
    "Admission",
    "BlockPool",
    "Durations",
    "HostIndex",
    "Limits",
    "Logprob",
    "Plan",
    "Progress",
    "Restore",
    "Scheduler",
    "Sequence",
    "StepResult",
]
