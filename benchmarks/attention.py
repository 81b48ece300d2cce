"""Compare paged attention with torch's SDPA over contiguous keys and values, and with an int8 cache. Prints JSON lines.

Calls alternate. `int8_ratio` is the time with the model's data type divided by that with an int8 cache.

python -m benchmarks.attention [--only decode|prefill|mixed] [--threads N] [--seconds S] [--block-size N]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from argosy.engine.engine_config import DEFAULT_BLOCK_SIZE
from argosy.engine.execution.architectures.architecture import AttentionParams
from argosy.engine.execution.architectures.rope import RopeParams
from argosy.engine.execution.kernels.batch import Batch, KvCacheShape
from argosy.engine.execution.kernels.cpu.attention import create_cpu_attention
from argosy.engine.execution.kernels.rope import build_rope_table, gather_rope_rotation

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LAYERS = 4  # used in turns, so that the KV cache comes from memory as in a model

Chunk = tuple[int, int]
"""New tokens of a sequence, and its length with them."""
DECODE = {
    f"decode {n} at {length}": [(1, length)] * n
    for n in (1, 16, 64)
    for length in (256, 1024, 4096)
}
PREFILL: dict[str, list[Chunk]] = {
    "prefill 512": [(512, 512)],
    "prefill 2048": [(2048, 2048)],
    "prefill 4 x 128": [(128, 128)] * 4,
}
MIXED: dict[str, list[Chunk]] = {"16 at 1024 and 512 new": [*[(1, 1024)] * 16, (512, 512)]}
WORK = {"decode": DECODE, "prefill": PREFILL, "mixed": MIXED}


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention heads of a layer."""

    heads: int
    kv_heads: int
    head_dim: int


SHAPES = (Shape(14, 2, 64), Shape(16, 8, 128))


def make_batch(chunks: list[Chunk], block_size: int) -> Batch:
    """Return a batch in which every sequence computes its last tokens, on shuffled pages."""
    blocks = -(-max(length for _, length in chunks) // block_size)
    pages = torch.randperm(len(chunks) * blocks).view(len(chunks), blocks).int()
    positions = [torch.arange(length - count, length) for count, length in chunks]
    slots = [
        page[position // block_size].long() * block_size + position % block_size
        for page, position in zip(pages, positions, strict=True)
    ]
    counts = torch.tensor([0, *(count for count, _ in chunks)])
    flat = torch.cat(positions)
    return Batch(
        token_ids=torch.zeros_like(flat),
        positions=flat,
        query_start_loc=counts.cumsum(0).int(),
        seq_lens=torch.tensor([length for _, length in chunks], dtype=torch.int32),
        block_tables=pages[None],
        slot_mappings=torch.cat(slots)[None],
        rows=torch.arange(len(chunks)),
        logit_index=torch.zeros(0, dtype=torch.long),
    )


def paged(
    shape: Shape,
    chunks: list[Chunk],
    dtype: torch.dtype,
    threads: int,
    block_size: int,
    cache_dtype: torch.dtype | None = None,
) -> Callable[[], object]:
    """Return paged attention of all layers, including rotation and storing of the new tokens."""
    batch = make_batch(chunks, block_size)
    cache = KvCacheShape(
        num_layers=LAYERS,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_blocks=batch.block_tables.numel(),
        block_size=block_size,
        dtype=cache_dtype or dtype,
        query_dtype=dtype,
    )
    attention = create_cpu_attention(cache, threads=threads, backend="native")
    tokens = len(batch.positions)
    q = torch.randn(tokens, shape.heads, shape.head_dim, dtype=dtype)
    k, v = (torch.randn(tokens, shape.kv_heads, shape.head_dim, dtype=dtype) for _ in range(2))
    longest = int(batch.seq_lens.max())
    rope = gather_rope_rotation(
        build_rope_table(RopeParams("default", 1e4, shape.head_dim, longest), longest),
        batch.positions,
    )
    specs = [AttentionParams(layer, shape.head_dim**-0.5) for layer in range(LAYERS)]
    return lambda: [attention(q, k, v, batch, spec, rope) for spec in specs]


def sdpa(shape: Shape, chunks: list[Chunk], dtype: torch.dtype) -> Callable[[], object]:
    """Return SDPA on contiguous [sequence, head, position, dim], without pages, rotation or storing."""
    kinds: dict[Chunk, int] = {}
    for chunk in chunks:
        kinds[chunk] = kinds.get(chunk, 0) + 1
    calls: list[tuple[Tensor, Tensor, bool]] = []
    for (count, length), sequences in kinds.items():
        q = torch.randn(sequences, shape.heads, count, shape.head_dim, dtype=dtype)
        kv = torch.randn(LAYERS, 2, sequences, shape.kv_heads, length, shape.head_dim, dtype=dtype)
        calls.append((q, kv, count == length))

    def run() -> None:
        for layer in range(LAYERS):
            for q, kv, causal in calls:
                k, v = kv[layer]
                F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return run


def milliseconds(run: Callable[[], object]) -> float:
    """Return the wall time of one layer in milliseconds."""
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e6 / LAYERS


def measure(
    shape: Shape,
    chunks: list[Chunk],
    dtype: torch.dtype,
    *,
    threads: int,
    seconds: float,
    block_size: int,
) -> dict[str, float]:
    """Return the minimum time of a layer in milliseconds, and the rates of KV bytes read and of multiply-adds."""
    runs = (
        paged(shape, chunks, dtype, threads, block_size),
        sdpa(shape, chunks, dtype),
        paged(shape, chunks, dtype, threads, block_size, torch.int8),
    )
    for run in runs:
        run()
    rounds: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < 5 or time.perf_counter() < end:
        rounds.append([milliseconds(run) for run in runs])
    best_ms, sdpa_ms, int8_ms = (min(column) for column in zip(*rounds, strict=True))
    kv_bytes = sum(n for _, n in chunks) * 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    attended_positions = sum(count * (2 * length - count + 1) / 2 for count, length in chunks)
    return {
        "native_ms": round(best_ms, 4),
        "sdpa_ms": round(sdpa_ms, 4),
        "int8_ms": round(int8_ms, 4),
        "ratio": round(median(native / other for native, other, _ in rounds), 3),
        "int8_ratio": round(median(native / int8 for native, _, int8 in rounds), 3),
        "kv_gb_s": round(kv_bytes / best_ms / 1e6, 1),
        "gflop_s": round(4 * attended_positions * shape.heads * shape.head_dim / best_ms / 1e6, 1),
    }


def main() -> None:
    """Print a JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="minimum time of each case")
    parser.add_argument("--block-size", type=int, default=DEFAULT_BLOCK_SIZE)
    parser.add_argument("--only", choices=WORK)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    for kind in [options.only] if options.only else WORK:
        for name, chunks in WORK[kind].items():
            for shape in SHAPES:
                result = measure(
                    shape,
                    chunks,
                    dtype,
                    threads=options.threads,
                    seconds=options.seconds,
                    block_size=options.block_size,
                )
                heads = f"{shape.heads}/{shape.kv_heads} d {shape.head_dim}"
                print(json.dumps({"work": name, "heads": heads} | result), flush=True)


if __name__ == "__main__":
    main()
