"""Exponential decay with the same bits on every platform.

`pow` and `exp` differ in their last digit between C libraries. This function uses only operations that IEEE 754 rounds
in one way (multiplication, square root), so that a recorded run replays bit for bit.
"""

from __future__ import annotations

import math

_STEPS_LOG2 = 8
_STEPS = 1 << _STEPS_LOG2
"""Steps of the table per half-life. Linear interpolation between them errs by less than one in a million."""
_MAX_HALVINGS = 1000


def _build_table() -> tuple[float, ...]:
    """Return 0.5 ** (step / _STEPS) for each step, from repeated square roots of one half."""
    roots, root = [], 0.5
    for _ in range(_STEPS_LOG2):
        root = math.sqrt(root)
        roots.append(root)
    table = []
    for step in range(_STEPS):
        value = 1.0
        for bit, factor in enumerate(reversed(roots)):
            if step >> bit & 1:
                value *= factor
        table.append(value)
    return (*table, 0.5)


_TABLE = _build_table()


def decay_factor(half_lives: float) -> float:
    """Return what is left of one unit after this many half-lives, which must not be negative."""
    if half_lives >= _MAX_HALVINGS:
        return 0.0
    halvings = int(half_lives)
    position = (half_lives - halvings) * _STEPS
    step = int(position)
    start = _TABLE[step]
    return math.ldexp(start + (_TABLE[step + 1] - start) * (position - step), -halvings)
