"""How long prompts and answers are: distributions as people write them on a command line."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from argosy.bench.errors import BenchError

MAX_LENGTH_TOKENS = 10_000_000
LENGTH_SYNTAX = "128, uniform:32-512, normal:256,64 or lognormal:200,0.8"


class LengthDistribution(msgspec.Struct, frozen=True):
    """A distribution of token counts, of at least 1."""

    kind: Literal["fixed", "uniform", "normal", "lognormal"]
    a: float
    """Fixed: the length. Uniform: the least. Normal: the mean. Lognormal: the median."""
    b: float = 0.0
    """Uniform: the most (included). Normal: the standard deviation. Lognormal: that of the logarithm."""

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
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
    """`128`, `uniform:32-512`, `normal:256,64`, `lognormal:200,0.8`. Raises BenchError for the rest."""
    kind, colon, numbers = text.strip().partition(":")
    if not colon:
        kind, numbers = "uniform" if "-" in kind.strip("-") else "fixed", kind
    try:
        parts = [float(part) for part in numbers.replace("-", ",").split(",")]
    except ValueError:
        parts = []
    fits = parts and all(math.isfinite(part) and 0 <= part <= MAX_LENGTH_TOKENS for part in parts)
    if fits and parts[0] >= 1:
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
    raise BenchError(f"{text!r} is no length: write {LENGTH_SYNTAX}.")
