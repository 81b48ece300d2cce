"""Products of very many factors, without logarithms and without overflow.

`log` and `exp` differ in their last digit between C libraries. A mantissa and a binary exponent need only
multiplications and exact shifts, so a verdict is the same on every platform.
"""

from __future__ import annotations

import math

ScaledNumber = tuple[float, int]
"""Mantissa and exponent of `mantissa * 2**exponent`, as returned by `math.frexp`."""
ONE: ScaledNumber = (0.5, 1)
_MAX_EXPONENT = 1000
MAX_VALUE = math.ldexp(1.0, _MAX_EXPONENT)
"""Largest value of `to_float`."""


def multiply(a: ScaledNumber, b: ScaledNumber) -> ScaledNumber:
    """Return the product of two scaled numbers."""
    mantissa, exponent = math.frexp(a[0] * b[0])
    return mantissa, exponent + a[1] + b[1]


def power(base: float, count: int) -> ScaledNumber:
    """Return a positive number to the power of a count."""
    result, square = ONE, math.frexp(base)
    while count:
        if count & 1:
            result = multiply(result, square)
        count >>= 1
        if count:
            square = multiply(square, square)
    return result


def to_float(number: ScaledNumber) -> float:
    """Return a scaled number as a float, at most `MAX_VALUE`."""
    return MAX_VALUE if number[1] > _MAX_EXPONENT else math.ldexp(*number)
