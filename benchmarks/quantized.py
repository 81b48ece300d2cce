"""Times linears with 8-bit and 4-bit weights beside bfloat16 and oneDNN's int8, call by call in turns; JSON lines."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import torch

from argosy.engine.execution.linear_cpu import NativeLinear, OnednnLinear
from argosy.engine.execution.linear_int_cpu import NativeIntLinear
from argosy.engine.execution.native_kernels import load_kernels
from benchmarks.linear import over_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Linear = Callable[[Tensor], Tensor]

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896))
ROTATED_BYTES = 80 << 20
"""Copies of a weight are used in turn, so that it comes from memory as it does in a model."""


class OnednnInt8:
    """oneDNN's int8 product with what a caller needs around it: rounding x by rows, and its scales after."""

    def __init__(self, weight: Tensor) -> None:
        scales = weight.float().abs().amax(1) / 127
        rounded = (weight.float() / scales.unsqueeze(1)).round().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._scales = scales
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        wide = x.float()
        scales = wide.abs().amax(1, keepdim=True) / 127
        rounded = (wide / scales).round_().add_(128).to(torch.uint8)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded,
            1.0,
            128,
            self._packed,
            self._scales,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return (out * scales).bfloat16()


def microseconds(run: Linear, x: Tensor) -> float:
    """Wall time of one call."""
    start = time.perf_counter_ns()
    run(x)
    return (time.perf_counter_ns() - start) / 1e3


def compare(outs: int, cols: int, rows: tuple[int, ...], threads: int, seconds: float) -> None:
    """Print a line for each number of rows: the least of each linear's times, since others may use the machine.

    Speeds are in bfloat16's.
    """
    copies = max(1, min(32, ROTATED_BYTES // (outs * cols)))
    weight = (torch.randn(outs, cols) * cols**-0.5).bfloat16()
    kernels = load_kernels()
    made: dict[str, Callable[[], Linear]] = {
        "bfloat16": lambda: NativeLinear(kernels, weight, None, threads),
        "int8": lambda: NativeIntLinear(kernels, weight, None, "int8", threads),
        "int4": lambda: NativeIntLinear(kernels, weight, None, "int4", threads),
        "onednn_bfloat16": lambda: OnednnLinear(weight.clone(), None),
        "onednn_int8": lambda: OnednnInt8(weight),
    }
    linears = {name: [make() for _ in range(copies)] for name, make in made.items()}
    for count in rows:
        x = torch.randn(count, cols).bfloat16()
        times: dict[str, list[float]] = {name: [] for name in linears}
        end, turn = time.perf_counter() + seconds, 0
        while turn < 5 or time.perf_counter() < end:
            for name, several in linears.items():
                times[name].append(microseconds(several[turn % copies], x))
            turn += 1
        best = {name: min(found) for name, found in times.items()}
        line: dict[str, float] = {"outs": outs, "cols": cols, "rows": count}
        line |= {f"{name}_us": round(value, 1) for name, value in best.items()}
        line |= {
            f"{name}_speed": round(best["bfloat16"] / best[name], 2) for name in ("int8", "int4")
        }
        print(json.dumps(line | {"calls": turn}), flush=True)


if __name__ == "__main__":
    over_shapes(__doc__, compare, ROWS, SHAPES)
