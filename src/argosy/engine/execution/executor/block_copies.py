"""Host memory for KV blocks, and the copies between it and the device, for which the host never waits in a step."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import cycle

import torch
from torch import Tensor

from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.device import Device, DeviceEvent

MAX_STAGED_BLOCKS = 64
MAX_STAGING_BYTES = 32 << 20
"""Maximum bytes of a staging buffer, unless one block is larger."""
NUM_STAGING_BUFFERS = 2
"""While one is copied to or from the host, blocks are gathered into or scattered from the other."""
CHECKSUM_THREADS = 4
"""Threads for checksums, of which one has about 1 GB/s."""


def staging_bytes(slots: int, block_bytes: int) -> int:
    """Return the bytes on the device of all staging buffers of a store."""
    return NUM_STAGING_BUFFERS * _staged_blocks(slots, block_bytes) * block_bytes


def _staged_blocks(slots: int, block_bytes: int) -> int:
    affordable = MAX_STAGING_BYTES // max(1, block_bytes)
    return min(slots, MAX_STAGED_BLOCKS, max(1, affordable))


class HostBlockStore:
    """Host slots for KV blocks, all layers of a block together.

    Saved blocks are gathered into a staging buffer in the stream of the steps, before a step overwrites them, and
    copied to their slots in the copy stream. Restored blocks take the opposite way: they are copied into a staging
    buffer while an earlier step may still run, and scattered before the step that reads them. Threads compute the
    checksums.
    """

    def __init__(self, slots: int, attention: Attention, device: Device) -> None:
        self._device = device
        size = attention.block_bytes if slots else 0
        self.data = device.allocate_host_memory((slots, size))
        """[slots, bytes of a block] uint8, in pinned memory."""
        self._num_staged = _staged_blocks(slots, size)
        self._staging = cycle(range(NUM_STAGING_BUFFERS))
        self._threads = ThreadPoolExecutor(CHECKSUM_THREADS, "kv-checksums")
        self._checksums: dict[int, Future[int]] = {}
        """Slot -> checksum of its block."""
        self.attach(attention)

    def attach(self, attention: Attention) -> None:
        """Copy blocks of this KV cache from now on."""
        self._attention = attention
        shape = (NUM_STAGING_BUFFERS, self._num_staged, self.data.shape[1])
        staging = torch.empty(shape, dtype=torch.uint8, device=self._device.torch_device)
        self._buffers = list(staging)
        self._last_uses: list[DeviceEvent] = [self._device.record_event() for _ in self._buffers]

    def detach(self) -> None:
        """Free everything but the saved blocks. Only `attach` may be called next, and no copy is in progress."""
        del self._attention, self._buffers, self._last_uses

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to slots, given as (block, slot). Later steps may overwrite the blocks."""
        for part in self._divide(sorted(pairs, key=_slot)):
            blocks, slots = zip(*part, strict=True)
            number = next(self._staging)
            staged = self._buffers[number][: len(part)]
            self._last_uses[number].wait()
            self._attention.read_blocks(self._upload(blocks), staged)
            gathered = self._device.record_event()
            with self._device.copy_stream():
                gathered.wait()
                for first, slot, count in _runs(slots):
                    source = staged[first : first + count]
                    self.data[slot : slot + count].copy_(source, non_blocking=True)
                copied = self._last_uses[number] = self._device.record_event()
            for slot in slots:
                self._checksums[slot] = self._threads.submit(self._compute_checksum, slot, copied)

    def restore(self, pairs: Sequence[tuple[int, int]]) -> dict[int, Future[bool]]:
        """Copy slots to blocks, given as (slot, block).

        Returns:
            For each block whether its data is that which was saved. Data of other slots and damaged data is copied too.
        """
        intact: dict[int, Future[bool]] = {}
        for part in self._divide(sorted(pairs)):
            slots, blocks = zip(*part, strict=True)
            number = next(self._staging)
            staged = self._buffers[number][: len(part)]
            with self._device.copy_stream():
                self._last_uses[number].wait()
                for first, slot, count in _runs(slots):
                    source = self.data[slot : slot + count]
                    staged[first : first + count].copy_(source, non_blocking=True)
                copied = self._device.record_event()
            copied.wait()
            self._attention.write_blocks(self._upload(blocks), staged)
            self._last_uses[number] = self._device.record_event()
            for slot, block in part:
                saved = self._checksums.pop(slot, None)
                intact[block] = self._threads.submit(self._is_intact, slot, saved)
        return intact

    def drain(self) -> None:
        """Wait for all copies and checksums of saved blocks."""
        wait(self._checksums.values())

    def _divide(self, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Yield parts that fit into a staging buffer."""
        for first in range(0, len(pairs), max(1, self._num_staged)):
            yield pairs[first : first + self._num_staged]

    def _upload(self, blocks: Sequence[int]) -> Tensor:
        return self._device.to_device(torch.tensor(blocks))

    def _compute_checksum(self, slot: int, copied: DeviceEvent) -> int:
        copied.synchronize()
        return zlib.crc32(self.data[slot].numpy().data)

    def _is_intact(self, slot: int, saved: Future[int] | None) -> bool:
        return saved is not None and zlib.crc32(self.data[slot].numpy().data) == saved.result()


def _slot(pair: tuple[int, int]) -> int:
    return pair[1]


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the index, the slot and the length of each run of neighbouring slots."""
    first = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1:
            yield first, slots[first], end - first
            first = end
