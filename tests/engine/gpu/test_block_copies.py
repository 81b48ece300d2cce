"""KV blocks in host memory: bytes and checksums survive, although steps go on while blocks are copied."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest
import torch

from argosy.engine.execution.executor import block_copies
from argosy.engine.execution.executor.block_copies import HostBlockStore
from argosy.engine.execution.kernels.batch import KvCacheShape
from argosy.engine.execution.kernels.gpu.device import create_cuda_device
from tests.engine.gpu.device import INTERPRETED
from tests.engine.gpu.host_device import HostDevice, record_work

NUM_BLOCKS, SLOTS = 7, 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_return_with_their_bytes_and_no_call_waits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Each round saves blocks, overwrites them, and restores earlier ones to other places. One slot is damaged."""
    monkeypatch.setattr(block_copies, "MAX_STAGED_BLOCKS", 2)
    device = HostDevice() if INTERPRETED else create_cuda_device()
    attention = device.create_attention(KvCacheShape(3, 2, 1, 20, NUM_BLOCKS, 5, dtype))
    store = HostBlockStore(SLOTS, attention, device)
    rng = random.Random(1)
    blocks = torch.arange(NUM_BLOCKS, device=device.torch_device)
    current = torch.empty(
        NUM_BLOCKS, attention.block_bytes, dtype=torch.uint8, device=device.torch_device
    )
    saved: dict[int, bytes] = {}
    for _ in range(8):
        attention.read_blocks(blocks, current)
        content = [bytes(row.tolist()) for row in current.cpu()]
        pairs = list(
            zip(rng.sample(range(NUM_BLOCKS), 5), rng.sample(range(SLOTS), 5), strict=True)
        )
        saved |= {slot: content[block] for block, slot in pairs}
        restored = rng.sample(sorted(saved), min(3, len(saved)))
        restores = list(zip(restored, rng.sample(range(NUM_BLOCKS), len(restored)), strict=True))
        overwriting = torch.randint_like(current, 256)
        intact: dict[int, Future[bool]] = {}

        def work() -> None:
            store.save(pairs)  # noqa: B023 - runs in this round
            attention.write_blocks(blocks, overwriting)  # noqa: B023
            intact.update(store.restore(restores))  # noqa: B023

        if INTERPRETED:
            assert not record_work(work).waits
        else:
            work()
        attention.read_blocks(blocks, current)
        rows = current.cpu()
        for slot, block in restores:
            assert intact[block].result()
            assert bytes(rows[block].tolist()) == saved.pop(slot)
    device.record_event().synchronize()
    store.drain()
    damaged, *others = sorted(saved)
    store.data[damaged, -1] ^= 1
    found = store.restore([(slot, number) for number, slot in enumerate([damaged, *others])])
    assert [each.result() for each in found.values()] == [False] + [True] * len(others)
    assert not store.restore([(damaged, 0)])[0].result(), "the slot is empty"
