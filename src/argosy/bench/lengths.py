"""Distributions of prompt and output lengths, and their command-line syntax."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from argosy.bench.errors import BenchError

MAX_LENGTH_TOKENS = 10_000_000
LENGTH_SYNTAX = "128, uniform:32-512, normal:256,64 or lognormal:200,0.8"


class LengthDistribution(msgspec.Struct, frozen=True):
    """Distribution of token counts of at least 1."""

    kind: Literal["fixed", "uniform", "normal", "lognormal"]
    a: float
    """Fixed: the length. Uniform: the minimum. Normal: the mean. Lognormal: the median."""
    b: float = 0.0
    """Uniform: the maximum, inclusive. Normal: the standard deviation. Lognormal: the sigma of the logarithm."""

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one length in tokens."""
        match self.kind:
            case "fixed":
                drawn = self.a
            case "uniform":
                drawn = float(rng.integers(int(self.a), int(self.b) + 1))
            case "normal":
                drawn = rng.normal(self.a, self.b)
            case "lognormal":
                drawn = self.a * rng.lognormal(0.0, self.b)
        return int(min(max(round(drawn), 1), MAX_LENGTH_TOKENS))


def parse_length_distribution(text: str) -> LengthDistribution:
    """Parse `128`, `uniform:32-512`, `normal:256,64` or `lognormal:200,0.8`.

    Raises:
        BenchError: `text` is something else.
    """
    kind, colon, numbers = text.strip().partition(":")
    if not colon:
        kind, numbers = "uniform" if "-" in kind.strip("-") else "fixed", kind
    try:
        parts = [float(part) for part in numbers.replace("-", ",").split(",")]
    except ValueError:
        parts = []
    in_range = parts and all(
        math.isfinite(part) and 0 <= part <= MAX_LENGTH_TOKENS for part in parts
    )
    if in_range and parts[0] >= 1:
        match kind, len(parts):
            case "fixed", 1:
                return LengthDistribution("fixed", parts[0])
            case "uniform", 2 if parts[0] <= parts[1]:
                return LengthDistribution("uniform", float(int(parts[0])), float(int(parts[1])))
            case "normal", 2:
                return LengthDistribution("normal", *parts)
            case "lognormal", 2:
                return LengthDistribution("lognormal", *parts)
            case _:
                pass
    raise BenchError(f"{text!r} is not a length: write {LENGTH_SYNTAX}.")
