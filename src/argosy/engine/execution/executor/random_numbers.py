"""Random numbers that depend only on (seed, position), so that a resumed request draws the same tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform_random(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position), by the SplitMix64 finaliser (Steele et al. 2014).

    The seed is mixed before the position is added, so that streams of neighbouring seeds do not overlap.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(state)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
