"""Compare the native norm and gate with torch's, with alternating calls. Prints JSON lines."""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import TYPE_CHECKING

import torch

from argosy.engine.execution.kernels.cpu.native_kernels import load_kernels
from argosy.engine.execution.kernels.cpu.operations import NativeElementwiseOps
from argosy.engine.execution.kernels.operations import ElementwiseOps
from argosy.engine.execution.kernels.torch.operations import TorchElementwiseOps

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = (1, 4, 16, 64, 256, 1024)
HIDDEN, INTERMEDIATE = 896, 4864


def operations(ops: ElementwiseOps, rows: int) -> dict[str, Callable[[], object]]:
    """Return the operations between the matrices of a layer, each on its own input."""
    dtype = torch.bfloat16
    x, mixed = torch.randn(2, rows, HIDDEN).to(dtype)
    gate_input = torch.randn(rows, 2 * INTERMEDIATE).to(dtype)
    norm = ops.create_norm("narrow", torch.ones(HIDDEN, dtype=dtype), 1e-6)
    gate = ops.create_gated_activation("silu")
    return {
        "norm": lambda: norm(x),
        "add and norm": lambda: norm.add_and_norm(x, mixed.zero_()),
        "silu gate": lambda: gate(gate_input),
    }


def microseconds(run: Callable[[], object]) -> float:
    """Return the wall time of one call in microseconds."""
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e3


def main() -> None:
    """Print a JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="minimum time of each case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for rows in ROWS:
        native = operations(NativeElementwiseOps(load_kernels(), options.threads), rows)
        plain = operations(TorchElementwiseOps(), rows)
        for name, run in native.items():
            run(), plain[name]()
            pairs: list[tuple[float, float]] = []
            end = time.perf_counter() + options.seconds
            while len(pairs) < 5 or time.perf_counter() < end:
                pairs.append((microseconds(run), microseconds(plain[name])))
            line = {
                "operation": name,
                "rows": rows,
                "native_us": round(median(a for a, _ in pairs), 1),
                "torch_us": round(median(b for _, b in pairs), 1),
                "ratio": round(median(a / b for a, b in pairs), 3),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
