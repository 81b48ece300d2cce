"""Python's garbage collector in a process that serves: out of the way of those who wait."""

from __future__ import annotations

import gc

YOUNG = 20_000
"""Objects that are made before the collector looks through them; Python's own default is 700."""


def calm_collector() -> None:
    """Leave what has been made so far to itself, and look for cycles less often: requests leave hardly any.

    Call it once a server is ready. Without it, looking through all that a process has imported stops every
    stream for tens of milliseconds now and then.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
