"""Compare linear layers with 8-bit and 4-bit weights, bfloat16 and oneDNN's int8, in turns. Prints JSON lines."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import torch

from argosy.engine.execution.kernels.cpu.linear import (
    native_int_linear,
    native_linear,
    onednn_linear,
)
from argosy.engine.execution.kernels.cpu.native_kernels import load_kernels
from benchmarks.linear import over_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Linear = Callable[[Tensor], Tensor]

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896))
ROTATED_BYTES = 80 << 20
"""Size of the copies of a weight. They are used in turns, so that weights come from memory as in a model."""


class OnednnInt8:
    """oneDNN's int8 product, with quantization of x by rows before it and scaling after it."""

    def __init__(self, weight: Tensor) -> None:
        scales = weight.float().abs().amax(1) / 127
        rounded = (weight.float() / scales.unsqueeze(1)).round().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._scales = scales
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, K] to [T, N]."""
        x_float = x.float()
        scales = x_float.abs().amax(1, keepdim=True) / 127
        rounded = (x_float / scales).round_().add_(128).to(torch.uint8)
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
    """Return the wall time of one call in microseconds."""
    start = time.perf_counter_ns()
    run(x)
    return (time.perf_counter_ns() - start) / 1e3


def compare(outs: int, cols: int, rows: tuple[int, ...], threads: int, seconds: float) -> None:
    """Print a line for each number of rows, with the minimum time of each layer, since the machine may have other load.

    Speeds are relative to bfloat16.
    """
    copies = max(1, min(32, ROTATED_BYTES // (outs * cols)))
    weight = (torch.randn(outs, cols) * cols**-0.5).bfloat16()
    kernels = load_kernels()
    factories: dict[str, Callable[[], Linear]] = {
        "bfloat16": lambda: native_linear(kernels, weight, None, threads),
        "int8": lambda: native_int_linear(kernels, weight, None, "int8", threads),
        "int4": lambda: native_int_linear(kernels, weight, None, "int4", threads),
        "onednn_bfloat16": lambda: onednn_linear(weight.clone(), None),
        "onednn_int8": lambda: OnednnInt8(weight),
    }
    linears = {name: [factory() for _ in range(copies)] for name, factory in factories.items()}
    for count in rows:
        x = torch.randn(count, cols).bfloat16()
        times: dict[str, list[float]] = {name: [] for name in linears}
        end, turn = time.perf_counter() + seconds, 0
        while turn < 5 or time.perf_counter() < end:
            for name, several in linears.items():
                times[name].append(microseconds(several[turn % copies], x))
            turn += 1
        best = {name: min(values) for name, values in times.items()}
        line: dict[str, float] = {"outs": outs, "cols": cols, "rows": count}
        line |= {f"{name}_us": round(value, 1) for name, value in best.items()}
        line |= {
            f"{name}_speed": round(best["bfloat16"] / best[name], 2) for name in ("int8", "int4")
        }
        print(json.dumps(line | {"calls": turn}), flush=True)


if __name__ == "__main__":
    over_shapes(__doc__, compare, ROWS, SHAPES)
