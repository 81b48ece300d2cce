"""Continuous-batching scheduler, in pure Python without torch, clock or randomness.

A `Sequence` enters the `RequestRegistry` and the `WaitingQueue`, and joins the `RunningBatch` when the batching policy
and the free KV blocks allow it. The `KvCacheManager` allocates its blocks from the `BlockPool`. Sequences of one cache
domain share the blocks of a common prefix. Layers with a sliding window form a group of `KvCacheGroups`, in which a
sequence releases the blocks that have left the window. With `PendingBlocks`, a sequence waits for a prefix that is
being computed. The `TtftGuard` keeps lower tiers out of some steps, so that a higher tier's first token is not delayed.
For each step, the `DraftLengthPolicy` chooses how many drafts of a sequence are verified. The `Scheduler` makes a
`StepPlan` for the executor and commits the `StepResult`.
"""

from argosy.engine.scheduling.batching_policy import (
    BatchingPolicy,
    ContinuousBatching,
    StaticBatching,
)
from argosy.engine.scheduling.block_pool import BlockPool, HostCacheIndex, KvCacheGroups
from argosy.engine.scheduling.draft_length import (
    MAX_DRAFT_TOKENS,
    DraftCandidate,
    DraftHistory,
    DraftLengthPolicy,
    DraftSource,
)
from argosy.engine.scheduling.scheduler import (
    MAX_DRAFTED_STEP_TOKENS,
    NO_DRAFTS,
    Scheduler,
    SchedulerLimits,
    SequenceUpdate,
)
from argosy.engine.scheduling.sequence import Sequence
from argosy.engine.scheduling.step_plan import (
    NO_BLOCK,
    AdmittedSequence,
    BlockRestore,
    Logprob,
    SequenceFailure,
    StepDurations,
    StepPlan,
    StepRecord,
    StepResult,
)
