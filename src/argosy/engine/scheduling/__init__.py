"""Which tokens are computed next: pure Python, no torch, no clock, no randomness of its own."""

from argosy.engine.scheduling.block_pool import BlockPool, HostCacheIndex
from argosy.engine.scheduling.scheduler import Scheduler, SchedulerLimits, SequenceUpdate
from argosy.engine.scheduling.sequence import Sequence
from argosy.engine.scheduling.step_plan import (
    AdmittedSequence,
    BlockRestore,
    Logprob,
    StepDurations,
    StepPlan,
    StepResult,
)

__all__ = [
    "AdmittedSequence",
    "BlockPool",
    "BlockRestore",
    "HostCacheIndex",
    "Logprob",
    "Scheduler",
    "SchedulerLimits",
    "Sequence",
    "SequenceUpdate",
    "StepDurations",
    "StepPlan",
    "StepResult",
]
