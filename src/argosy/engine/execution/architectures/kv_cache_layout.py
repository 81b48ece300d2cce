"""Division of a model's layers into KV cache groups, so that those with a sliding window need less memory.

A block holds the keys and values of as many layers as a group has. All groups take their blocks from one pool.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

MAX_GROUPS = 8
"""Maximum number of groups. Each has a block table, which takes time in every step."""


class LayerPlace(NamedTuple):
    """Place of a layer's keys and values."""

    group: int
    layer: int
    """Index of the layer within a block."""


@dataclass(frozen=True, slots=True)
class KvCacheLayout:
    """KV cache groups of a model."""

    windows: tuple[int | None, ...]
    """Sliding window of each group in tokens, longest first. None is all tokens."""
    layers_per_block: int
    """Number of layers of a group. The last group of a window may have fewer, and leaves their memory unused."""
    places: tuple[LayerPlace, ...]
    """Place of each layer."""

    def block_bytes(self, kv_bytes_per_token: int, block_size: int) -> int:
        """Return the bytes of a block of `block_size` tokens, given those of a token in all layers."""
        return kv_bytes_per_token // len(self.places) * self.layers_per_block * block_size


def without_kv_cache(num_layers: int) -> KvCacheLayout:
    """Return the layout of a model that computes every sequence in one step, and so keeps no keys and values."""
    return KvCacheLayout((), num_layers, tuple(LayerPlace(0, i) for i in range(num_layers)))


@cache
def arrange_layers(windows: tuple[int | None, ...], max_model_len: int) -> KvCacheLayout:
    """Return the layout that needs the least memory for a sequence of `max_model_len` tokens.

    Args:
        windows: Sliding window of each layer in tokens. None is all tokens.
        max_model_len: Maximum tokens of one sequence. Windows that hold all of them do not count as windows.
    """
    windows = tuple(
        None if window is None or window >= max_model_len else window for window in windows
    )
    candidates = [_arrange((None,) * len(windows), len(windows))]
    candidates += [_arrange(windows, size) for size in range(1, len(windows) + 1)]

    def cost(layout: KvCacheLayout) -> tuple[int, int]:
        tokens = sum(window or max_model_len for window in layout.windows)
        return tokens * layout.layers_per_block, len(layout.windows)

    return min((each for each in candidates if len(each.windows) <= MAX_GROUPS), key=cost)


def _arrange(windows: tuple[int | None, ...], layers_per_block: int) -> KvCacheLayout:
    """Divide the layers of each window into groups of `layers_per_block`."""
    group_windows: list[int | None] = []
    first_group: dict[int | None, int] = {}
    counts = Counter(windows)
    for window in sorted(counts, key=lambda each: -(each or 1 << 62)):
        first_group[window] = len(group_windows)
        group_windows += [window] * -(-counts[window] // layers_per_block)
    seen: Counter[int | None] = Counter()
    places = []
    for window in windows:
        group, layer = divmod(seen[window], layers_per_block)
        places.append(LayerPlace(first_group[window] + group, layer))
        seen[window] += 1
    return KvCacheLayout(tuple(group_windows), layers_per_block, tuple(places))
