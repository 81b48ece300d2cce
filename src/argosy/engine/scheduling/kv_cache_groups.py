"""KV cache groups: layers that share KV blocks, and that leave a sliding window together."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvCacheGroups:
    """Blocks that a sequence needs in each group. Block i of any group holds the sequence's tokens from i * block_size.

    A group without a window keeps all blocks of a sequence. A group with a window keeps those that a token to be
    computed can attend to.
    """

    windows: tuple[int | None, ...]
    """Sliding window of each group in tokens, longest first. None is all tokens. Empty without a KV cache."""
    block_size: int
    """Tokens per block."""

    def first_block(self, group: int, position: int) -> int:
        """Return the first block that the token at `position` attends to."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def max_blocks(self, group: int, tokens: int) -> int:
        """Return the maximum number of blocks of a sequence of `tokens` tokens in a group.

        Beside the window there are two blocks, one that fills and one that has left the window in a step in flight.
        """
        num_blocks = -(-tokens // self.block_size)
        window = self.windows[group]
        return num_blocks if window is None else min(num_blocks, -(-window // self.block_size) + 2)

    def count_blocks(self, tokens: int) -> int:
        """Return the number of blocks of a sequence of `tokens` tokens, all groups together."""
        return sum(self.max_blocks(group, tokens) for group in range(len(self.windows)))

    def max_tokens(self, num_blocks: int, limit: int) -> int:
        """Return the length of the longest sequence that fits into `num_blocks` blocks, up to `limit` tokens."""
        size = self.block_size
        lengths = range(0, limit + size, size)
        return min(limit, lengths[bisect_right(lengths, num_blocks, key=self.count_blocks) - 1])
