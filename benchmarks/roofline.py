"""Measure the machine's read bandwidth and bfloat16 matrix peak, and compute a model's demand of both.

    python -m benchmarks.roofline [--threads 2]

Prints a JSON line for each figure.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a weight, without scales."""
READ_BYTES = 1 << 30
MATRIX_SIZES = (512, 1024, 2048, 4096)
SECONDS = 1.5
"""Time of each case."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Matrix sizes of a model. Attention and the input embedding are left out, because they are small."""

    layers: int
    """Elements that every token is multiplied with."""
    head: int
    """Elements that only a sampled token is multiplied with."""

    @staticmethod
    def of(config: Mapping[str, object]) -> Demand:
        """Return the demand of a model with this Hugging Face configuration."""
        size = {name: int(value) for name, value in config.items() if isinstance(value, int)}
        hidden = size["hidden_size"]
        keys = size["num_key_value_heads"] * hidden // size["num_attention_heads"]
        layer = hidden * (2 * hidden + 2 * keys + 3 * size["intermediate_size"])
        return Demand(layer * size["num_hidden_layers"], hidden * size["vocab_size"])

    def token_bytes(self, weights: str) -> float:
        """Return the bytes that one decode step of one sequence reads."""
        return (self.layers + self.head) * BYTES[weights]

    def operations(self, tokens: int, sampled: int) -> float:
        """Return the multiplications and additions for `tokens` tokens, of which `sampled` are sampled from."""
        return 2.0 * (tokens * self.layers + sampled * self.head)


def best_s(run: Callable[[], object]) -> float:
    """Return the minimum time of a call, from calls during `SECONDS`."""
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def read_gb_s(threads: int) -> float:
    """Return the best rate in GB/s at which `threads` threads sum an array that exceeds all caches."""
    import torch

    torch.set_num_threads(threads)
    values = torch.ones(READ_BYTES // 4)
    rows = values.view(-1, 4096)
    ones = torch.ones(4096)
    return READ_BYTES / min(best_s(values.sum), best_s(lambda: rows @ ones)) / 1e9


def matrix_tflop_s(threads: int) -> float:
    """Return the best rate of a square bfloat16 product over several sizes, in TFLOP/s."""
    import torch

    torch.set_num_threads(threads)
    rates = []
    for size in MATRIX_SIZES:
        a, b = torch.randn(2, size, size).to(torch.bfloat16)
        rates.append(2 * size**3 / best_s(lambda a=a, b=b: a @ b))  # type: ignore[misc]
    return max(rates) / 1e12


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    threads = parser.parse_args().threads
    limits: dict[str, float] = {f"read_gb_s_{n}": read_gb_s(n) for n in sorted({1, threads})}
    limits["matrix_tflop_s"] = matrix_tflop_s(threads)
    for name, value in limits.items():
        print(json.dumps({"machine": name, "threads": threads, "value": round(value, 3)}))


if __name__ == "__main__":
    main()
