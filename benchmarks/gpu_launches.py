"""Count launches, copies and waits of decode steps, and estimate the time of a token of an 8B model from them.

    python -m benchmarks.gpu_launches

Prints JSON lines. Steps run in Triton's interpreter, on a device that records what a GPU would have to do. Counts do
not depend on sizes, apart from the number of layers. No row is measured on a GPU: each says `counted` or `estimated`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import structlog

from argosy.protocol import SamplingParams
from benchmarks.checkpoints import SHAPES, make_checkpoint
from benchmarks.roofline import Demand

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
    "top-k and top-p": {"top_k": 20, "top_p": 0.9},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {5: 1.0}},
    "banned tokens": {"banned_token_ids": (7,)},
    "log-probabilities": {"logprobs": 2},
}
SEQUENCES = 2
WARM_UP_STEPS = 3
MODEL, CONTEXT = "llama-8b", 1024
KV_BYTES_PER_TOKEN = 2 * 2 * 8 * 128 * 32
"""Keys and values in bfloat16, of 8 heads of 128 in 32 layers."""
BANDWIDTH = 3.35e12, "bytes/s, data sheet of the H100 SXM"
SHARES = (0.8, 0.6), "decode speed of batch-invariant kernels against others, vllm#27433"
NODE_S = 0.5e-6, "time between kernels of a graph, NVIDIA: Getting Started with CUDA Graphs (2019)"
LAUNCH_S = (
    (8.7e-6, 13.2e-6),
    "launch of a Triton kernel by the host, vllm PR 34838 and tritonbench PR 669",
)


def emit(**row: object) -> None:
    """Print a row."""
    print(json.dumps(row), flush=True)


def count_step(layers: int, sampling: dict[str, Any], *, captures: bool) -> dict[str, Any]:
    """Decode on the recording device, and count what a step does that admits no sequence and needs no block.

    A captured graph is one launch.
    """
    from tests.engine.gpu.host_device import HostDevice, record_work

    from argosy.engine.engine_config import EngineConfig
    from argosy.engine.engine_request import EngineRequest
    from argosy.engine.execution.loading import executor_loader
    from argosy.engine.serving.engine_core.core import EngineCore

    gpu = HostDevice()
    nodes: list[int] = []

    def capture(work: Callable[[], object]) -> Callable[[], object]:
        nodes.append(len(record_work(work).launches))
        return work

    gpu.capture_graph = capture if captures else None
    shape = SHAPES["toy"] | {"num_hidden_layers": layers}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, XDG_CACHE_HOME=folder),
        mock.patch.dict(SHAPES, toy=shape),
        mock.patch.object(executor_loader, "choose_device", return_value=gpu),
    ):
        config = EngineConfig(
            model=str(make_checkpoint("toy", Path(folder))),
            warmup=False,
            num_blocks=16,
            max_seqs=SEQUENCES,
            max_step_tokens=64,
        )
        core = EngineCore(config, time.monotonic, lambda _activity, _done: None)
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=1, **sampling)
    for number in range(SEQUENCES):
        core.add(EngineRequest(id=str(number), prompt=[5, 6, 7], params=params))
    for _ in range(WARM_UP_STEPS):
        core.step()
    recorder = record_work(core.step)
    core.close()
    replayed = max(nodes, default=1)  # that of all sequences is the largest
    return {
        "launches": len(recorder.launches) - replayed + 1,
        "nodes": replayed if captures else 0,
        "copies": len(recorder.copies),
        "waits": dict(Counter(recorder.waits)),
        "kernels": dict(Counter(recorder.launches)),
    }


def estimate(per_layer: int, captured: dict[str, Any], eager: dict[str, Any]) -> None:
    """Print the bytes that a token of the model reads, and the milliseconds of it, with the source of each term."""
    size = {name: int(str(SHAPES[MODEL][name])) for name in ("num_hidden_layers", "vocab_size")}
    more_layers = size["num_hidden_layers"] - 1
    weights = Demand.of(SHAPES[MODEL]).token_bytes("bf16")
    kv = KV_BYTES_PER_TOKEN * CONTEXT
    logits = 4 * size["vocab_size"] * 5  # written, copied, and read by three kernels that sample
    emit(
        estimated="bytes per token",
        model=MODEL,
        floor=weights + kv,
        weights=weights,
        kv=kv,
        logits=logits,
    )
    floor_s = (weights + kv) / BANDWIDTH[0]
    nodes = captured["nodes"] + captured["launches"] - 1 + more_layers * per_layer
    launches = eager["launches"] + more_layers * per_layer
    device_s = [floor_s / share + nodes * NODE_S[0] for share in SHARES[0]]
    host_s = [launches * each for each in LAUNCH_S[0]]
    terms = {"bandwidth": BANDWIDTH, "share": SHARES, "node_s": NODE_S, "launch_s": LAUNCH_S}
    for mode, low_high in (
        ("graph", device_s),
        ("eager", [max(pair) for pair in zip(device_s, host_s, strict=True)]),
    ):
        emit(
            estimated="ms per token",
            model=MODEL,
            mode=mode,
            sequences=1,
            context=CONTEXT,
            floor_ms=1000 * floor_s,
            kernels=nodes if mode == "graph" else launches,
            ms=[1000 * each for each in low_high],
            terms=terms,
        )


def main() -> None:
    """Count steps by kind of sampling, and estimate a token."""
    os.environ["TRITON_INTERPRET"] = "1"
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    from tests.engine.gpu import interpreter

    interpreter.install()
    two_layers = count_step(2, SAMPLING["greedy"], captures=False)
    counts: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, sampling in SAMPLING.items():
        for captures in (True, False):
            counts[name, captures] = count = count_step(1, sampling, captures=captures)
            mode = "graph" if captures else "eager"
            emit(counted="step with one layer", sampling=name, mode=mode, **count)
    captured, eager = counts["greedy", True], counts["greedy", False]
    per_layer = two_layers["launches"] - eager["launches"]
    emit(counted="layer", launches=per_layer)
    estimate(per_layer, captured, eager)


if __name__ == "__main__":
    main()
