"""Which tokens are computed next: pure Python, no torch, no clock, no randomness of its own."""

from argosy.engine.scheduling.blocks import BlockPool, HostIndex
from argosy.engine.scheduling.plan import Admission, Durations, Logprob, Plan, Restore, StepResult
from argosy.engine.scheduling.scheduler import Limits, Progress, Scheduler
from argosy.engine.scheduling.sequence import Sequence

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
