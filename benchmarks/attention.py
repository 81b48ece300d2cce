"""Times paged attention on this CPU beside torch's SDPA over contiguous keys and values."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional as F

from argosy.engine.execution.attention_cpu import cpu_attention
from argosy.engine.execution.batch import AttentionSpec, Batch
from argosy.engine.execution.device import cpu_device

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 16, 8, 128, 16


def milliseconds(run: Callable[[], object], seconds: float) -> float:
    """Median time of a call, over at least five calls and `seconds`."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e3


def make_batch(sequences: int, count: int, length: int) -> Batch:
    """Every sequence computes its last `count` of `length` tokens, on shuffled pages."""
    blocks = -(-length // BLOCK)
    pages = torch.randperm(sequences * blocks).view(sequences, blocks).int()
    positions = torch.arange(length - count, length)
    slots = pages[:, positions // BLOCK].long() * BLOCK + positions % BLOCK
    return Batch(
        token_ids=torch.zeros(sequences * count, dtype=torch.long),
        positions=positions.repeat(sequences),
        cu_q=torch.arange(sequences + 1, dtype=torch.int32) * count,
        seq_lens=torch.full((sequences,), length, dtype=torch.int32),
        page_table=pages,
        slots=slots.flatten(),
        rows=torch.arange(sequences),
        logit_index=torch.zeros(0, dtype=torch.long),
    )


def paged(
    path: Literal["native", "torch"], batch: Batch, threads: int, dtype: torch.dtype, seconds: float
) -> float:
    """Milliseconds of one layer's paged attention, storing the new keys and values included."""
    layers = 4  # rotated, so that the cache comes from memory as it does in a model
    attention = cpu_attention(
        layers=layers,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_blocks=batch.page_table.numel(),
        block_size=BLOCK,
        dtype=dtype,
        threads=threads,
        path=path,
    )
    tokens = len(batch.positions)
    q = torch.randn(tokens, HEADS, HEAD_DIM, dtype=dtype)
    k, v = (torch.randn(tokens, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
    specs = [AttentionSpec(layer, HEAD_DIM**-0.5) for layer in range(layers)]
    return (
        milliseconds(lambda: [attention(q, k, v, batch, s, None) for s in specs], seconds) / layers
    )


def sdpa(sequences: int, count: int, length: int, dtype: torch.dtype, seconds: float) -> float:
    """Milliseconds of SDPA on contiguous [sequence, head, position, dim]: no pages, no storing."""
    layers = 4
    q = torch.randn(sequences, HEADS, count, HEAD_DIM, dtype=dtype)
    kv = torch.randn(layers, 2, sequences, KV_HEADS, length, HEAD_DIM, dtype=dtype)

    def run() -> None:
        for k, v in kv:
            F.scaled_dot_product_attention(q, k, v, is_causal=count == length, enable_gqa=True)

    return milliseconds(run, seconds) / layers


def main() -> None:
    """Print one line a shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    device = cpu_device(options.threads)
    threads = torch.get_num_threads()
    print(device.name, f"{HEADS}/{KV_HEADS} heads, d {HEAD_DIM}; milliseconds a layer")
    print(f"{'shape':34}{'dtype':10}{'native':>9}{'torch':>9}{'sdpa':>9}")
    shapes = [(16, 1, 1024), (1, 1, 8192), (64, 1, 256), (1, 512, 512), (4, 128, 1024)]
    for sequences, count, length in shapes:
        batch = make_batch(sequences, count, length)
        for dtype in (torch.bfloat16, torch.float32):
            times = [paged(p, batch, threads, dtype, options.seconds) for p in ("native", "torch")]
            times.append(sdpa(sequences, count, length, dtype, options.seconds))
            label = f"{sequences} x {count} tokens at {length}"
            print(f"{label:34}{str(dtype)[6:]:10}" + "".join(f"{x:9.2f}" for x in times))


if __name__ == "__main__":
    main()
