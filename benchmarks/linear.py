"""Compare the bfloat16 linear layer with oneDNN's on this CPU, with alternating calls. Prints a JSON line per case."""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import TYPE_CHECKING

import torch

from argosy.engine.execution.kernels.cpu.linear import native_linear, onednn_linear
from argosy.engine.execution.kernels.cpu.native_kernels import load_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Sizes = tuple[int, ...]
    Compare = Callable[[int, int, Sizes, int, float], None]

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 512, 1024)
SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864), (6144, 2048), (151936, 896))
ROTATED_BYTES = 96 << 20
"""Size of the copies of a weight. They are used in turns, so that weights come from memory as in a model."""


def microseconds(run: Callable[[Tensor], Tensor], x: Tensor, clock: Callable[[], int]) -> float:
    """Return the time of one call in microseconds, by a clock in nanoseconds."""
    start = clock()
    run(x)
    return (clock() - start) / 1e3


def compare(outs: int, cols: int, rows: tuple[int, ...], threads: int, seconds: float) -> None:
    """Print a line for each number of rows, with medians and the median ratio of neighbouring calls.

    With a single thread the times are the thread's processor time, otherwise wall time. On a machine with other load
    the minimum times are the most reliable.
    """
    copies = max(2, min(64, ROTATED_BYTES // (outs * cols * 2)))
    weight = (torch.randn(outs, cols) * cols**-0.5).bfloat16()
    kernels = load_kernels()
    clock = time.thread_time_ns if threads == 1 else time.perf_counter_ns
    native_layers = [native_linear(kernels, weight, None, threads) for _ in range(copies)]
    onednn_layers = [onednn_linear(weight.clone(), None) for _ in range(copies)]
    for count in rows:
        x = torch.randn(count, cols).bfloat16()
        native_layers[0](x), onednn_layers[0](x)
        pairs: list[tuple[float, float]] = []
        end = time.perf_counter() + seconds
        while len(pairs) < 5 or time.perf_counter() < end:
            copy = len(pairs) % copies
            pairs.append(
                (
                    microseconds(native_layers[copy], x, clock),
                    microseconds(onednn_layers[copy], x, clock),
                )
            )
        best_us = min(a for a, _ in pairs)
        line = {
            "outs": outs,
            "cols": cols,
            "rows": count,
            "argosy_us": round(median(a for a, _ in pairs), 1),
            "onednn_us": round(median(b for _, b in pairs), 1),
            "ratio": round(median(a / b for a, b in pairs), 3),
            "argosy_best_us": round(best_us, 1),
            "onednn_best_us": round(min(b for _, b in pairs), 1),
            "best_gflops": round(2e-3 * outs * cols * count / best_us, 1),
            "best_gbs": round(2e-3 * outs * cols / best_us, 1),
            "calls": len(pairs),
        }
        print(json.dumps(line), flush=True)


def over_shapes(
    description: str | None, compare: Compare, rows: Sizes, shapes: tuple[Sizes, ...]
) -> None:
    """Parse the command line, and call `compare` on each shape. `rows` and `shapes` are the defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="minimum time of each case")
    parser.add_argument("--rows", type=int, nargs="+", default=rows)
    parser.add_argument("--shape", type=int, nargs=2, action="append", metavar=("OUTS", "COLS"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for outs, cols in options.shape or shapes:
        compare(outs, cols, tuple(options.rows), options.threads, options.seconds)


if __name__ == "__main__":
    over_shapes(__doc__, compare, ROWS, SHAPES)
