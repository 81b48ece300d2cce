"""Lessons of the console: short, deterministic simulations that run the product's own policy code.

Each module has one lesson: its parameters, the frame that describes one moment, and a function that runs it. Time is
simulated, so equal parameters give equal frames. `kv_blocks` and `batching` run the engine's `Scheduler` through
`engine_simulation`. `fair_queue`, `limits` and `circuit_breaker` run the classes of `argosy.policy`. Only what the
product does not have is written here, to compare with: a queue in the order of arrival, and a token bucket.
"""

from argosy.gateway import Lesson
from argosy.lessons.batching import BatchingFrame, BatchingParameters, run_batching
from argosy.lessons.circuit_breaker import (
    CircuitBreakerFrame,
    CircuitBreakerParameters,
    run_circuit_breaker,
)
from argosy.lessons.fair_queue import FairQueueFrame, FairQueueParameters, run_fair_queue
from argosy.lessons.kv_blocks import KvBlocksFrame, KvBlocksParameters, run_kv_blocks
from argosy.lessons.lesson import LessonRun
from argosy.lessons.limits import LimitsFrame, LimitsParameters, run_limits

LESSONS = (
    Lesson(
        "kv-blocks",
        "Run the lesson on the paged KV cache and prefix sharing.",
        KvBlocksParameters,
        LessonRun[KvBlocksFrame],
        run_kv_blocks,
    ),
    Lesson(
        "batching",
        "Run the lesson on continuous and static batching.",
        BatchingParameters,
        LessonRun[BatchingFrame],
        run_batching,
    ),
    Lesson(
        "fair-queue",
        "Run the lesson on fair queueing.",
        FairQueueParameters,
        LessonRun[FairQueueFrame],
        run_fair_queue,
    ),
    Lesson(
        "limits",
        "Run the lesson on limits and budgets.",
        LimitsParameters,
        LessonRun[LimitsFrame],
        run_limits,
    ),
    Lesson(
        "circuit-breaker",
        "Run the lesson on the circuit breaker.",
        CircuitBreakerParameters,
        LessonRun[CircuitBreakerFrame],
        run_circuit_breaker,
    ),
)
"""All lessons, in the order of the documentation."""

__all__ = ["LESSONS"]
