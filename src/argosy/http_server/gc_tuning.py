"""Python's garbage collector in a process that serves: out of the way of those who wait."""

from __future__ import annotations

import gc

GC_GEN0_THRESHOLD = 20_000
"""Objects that are made before the collector looks through them; Python's own default is 700."""


def tune_gc() -> None:
    """Leave what has been made so far to itself, and look for cycles less often: requests leave hardly any.

    Call it once a server is ready. Without it, looking through all that a process has imported stops every
    stream for tens of milliseconds now and then.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_GEN0_THRESHOLD, 10, 10)
