"""Lessons of the console: short, deterministic simulations that run the product's own policy code.

Each module has one lesson: its parameters, the frame that describes one moment, and a function that runs it. Time is
simulated, so equal parameters give equal frames. `kv_blocks` and `batching` run the
engine's `Scheduler` through `engine_simulation`. `fair_queue`, `limits` and `circuit_breaker` run the classes of
`argosy.policy`. Only what the product does not have is written here, to compare with: a queue in the order of arrival,
and a token bucket.
"""

from argosy.gateway.lessons.batching import BatchingFrame, BatchingParameters, run_batching
from argosy.gateway.lessons.circuit_breaker import (
    CircuitBreakerFrame,
    CircuitBreakerParameters,
    run_circuit_breaker,
)
from argosy.gateway.lessons.fair_queue import FairQueueFrame, FairQueueParameters, run_fair_queue
from argosy.gateway.lessons.kv_blocks import KvBlocksFrame, KvBlocksParameters, run_kv_blocks
from argosy.gateway.lessons.lesson import LessonParameter, LessonRun
from argosy.gateway.lessons.limits import LimitsFrame, LimitsParameters, run_limits

__all__ = [
    "BatchingFrame",
    "BatchingParameters",
    "CircuitBreakerFrame",
    "CircuitBreakerParameters",
    "FairQueueFrame",
    "FairQueueParameters",
    "KvBlocksFrame",
    "KvBlocksParameters",
    "LessonParameter",
    "LessonRun",
    "LimitsFrame",
    "LimitsParameters",
    "run_batching",
    "run_circuit_breaker",
    "run_fair_queue",
    "run_kv_blocks",
    "run_limits",
]
