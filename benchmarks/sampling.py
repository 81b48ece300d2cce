"""Compare native sampling with torch's by option, vocabulary and number of rows. Prints a JSON line per case.

    GOMP_SPINCOUNT=10000 python -m benchmarks.sampling [--rows 64 --vocabularies 151936]

The variable sets the threads' waiting to that of the engine (argosy.engine.engine_config).
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from argosy.engine.execution.executor.sampler import Sampler
from argosy.engine.execution.kernels.cpu.native_kernels import load_kernels
from argosy.engine.execution.kernels.cpu.sampling_ops import NativeSamplingOps
from argosy.engine.execution.kernels.torch.logit_edits import TorchLogitSampler
from argosy.engine.execution.kernels.torch.sampling_ops import SamplingOps, TorchSamplingOps
from argosy.engine.scheduling import AdmittedSequence
from argosy.protocol import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

OPTIONS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(seed=1),
    "top_k 50": SamplingParams(seed=1, top_k=50),
    "top_p 0.9": SamplingParams(seed=1, top_p=0.9),
    "top_k 50, top_p 0.95": SamplingParams(seed=1, top_k=50, top_p=0.95),
    "min_p 0.05": SamplingParams(seed=1, min_p=0.05),
    "penalties": SamplingParams(seed=1, repetition_penalty=1.1, frequency_penalty=0.1),
    "bias of 20": SamplingParams(seed=1, logit_bias=dict.fromkeys(range(20), 1.0)),
    "greedy, logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
}
MIXED = "mixed"


def milliseconds(
    ops: SamplingOps, params: list[SamplingParams], logits: Tensor, seconds: float
) -> float:
    """Return the minimum time of the calls during `seconds`. Each row has 256 tokens."""
    size = (len(params), logits.shape[1])
    sampler = Sampler(*size, TorchLogitSampler(ops, *size))
    for row, row_params in enumerate(params):
        sampler.admit(AdmittedSequence(row, list(range(256)), 200, row_params, []), [0])
    rows, positions = np.arange(len(params)), np.full(len(params), 256)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        begin = time.perf_counter()
        sampler(logits, rows, positions)
        best = min(best, time.perf_counter() - begin)
    return best * 1e3


def main() -> None:
    """Print a line for each case. `gb_s` is the size of the logits divided by the native time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 16, 64, 256))
    parser.add_argument("--vocabularies", type=int, nargs="+", default=(32000, 151936))
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of logits")
    parser.add_argument("--seconds", type=float, default=0.3, help="minimum time of each case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--torch-rows", type=int, default=16, help="maximum number of rows for torch"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native_ops = NativeSamplingOps(load_kernels(), options.threads)
    for vocab in options.vocabularies:
        for rows in options.rows:
            logits = torch.randn(rows, vocab).mul_(options.spread)
            all_params = list(OPTIONS.values())
            cases = {name: [params] * rows for name, params in OPTIONS.items()}
            cases[MIXED] = [all_params[row % len(all_params)] for row in range(rows)]
            for name, params in cases.items():
                native_ms = milliseconds(native_ops, params, logits, options.seconds)
                line = {"option": name, "vocabulary": vocab, "rows": rows}
                line |= {"native_ms": round(native_ms, 3)}
                line |= {"gb_s": round(logits.nbytes / native_ms / 1e6, 1)}
                if rows <= options.torch_rows:
                    torch_ms = milliseconds(TorchSamplingOps(), params, logits, options.seconds)
                    line |= {"torch_ms": round(torch_ms, 3)}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
