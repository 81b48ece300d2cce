"""Prefixes that recent prompts share, as a radix tree over the keys of their blocks.

The key of a block covers all blocks before it. So two prompts share their first n blocks exactly if their n-th keys are
equal, and a binary search finds where they part. The tree knows hashes, no texts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_PROMPTS = 1024
"""Maximum number of recent prompts."""
MAX_KEYS = 1 << 16
"""Maximum number of keys of recent prompts, in some 4 MB."""


class RecentPrompt(NamedTuple):
    """Prompt that was sent to a replica."""

    keys: Sequence[bytes]
    """Keys of its whole blocks."""
    tenant: str
    sent_at: float


class RecentPrompts:
    """The latest prompts of a pool that have at least one whole block, oldest first."""

    def __init__(self) -> None:
        self._prompts: deque[RecentPrompt] = deque()
        self._num_keys = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[RecentPrompt]:
        return iter(self._prompts)

    def add(self, prompt: RecentPrompt) -> None:
        """Add a prompt, and forget the oldest ones beyond the limits."""
        self._prompts.append(prompt)
        self._num_keys += len(prompt.keys)
        while len(self._prompts) > MAX_PROMPTS or self._num_keys > MAX_KEYS:
            self._num_keys -= len(self._prompts.popleft().keys)


class PrefixNode:
    """Part of a prefix that the same prompts have: its blocks from `start` to `end`."""

    __slots__ = ("children", "end", "keys", "last_sent_at", "parent", "prompts", "start", "tenants")

    def __init__(
        self, parent: PrefixNode | None, keys: Sequence[bytes], start: int, end: int
    ) -> None:
        self.parent = parent
        self.keys = keys
        """Keys of one of these prompts, from its beginning."""
        self.start = start
        """Blocks before this part."""
        self.end = end
        self.prompts = 0
        """Number of prompts with this prefix."""
        self.tenants: Counter[str] = Counter()
        """Number of these prompts by tenant."""
        self.last_sent_at = 0.0
        """When the latest of them was sent."""
        self.children: dict[bytes, PrefixNode] = {}
        """Nodes that continue the prefix, by their first keys."""

    @property
    def blocks(self) -> int:
        """Number of blocks of this part."""
        return self.end - self.start

    @property
    def saved_blocks(self) -> int:
        """Blocks that need not be computed if the prompts share a cache."""
        return (self.prompts - 1) * self.blocks

    def record(self, prompt: RecentPrompt) -> None:
        """Count a prompt with this prefix."""
        self.prompts += 1
        self.tenants[prompt.tenant] += 1
        self.last_sent_at = max(self.last_sent_at, prompt.sent_at)


class PrefixTree:
    """Radix tree of prompts."""

    def __init__(self) -> None:
        self._root = PrefixNode(None, (), 0, 0)

    def add(self, prompt: RecentPrompt) -> None:
        """Add a prompt, in a time that grows with the depth of the tree and not with the prompt."""
        keys, node = prompt.keys, self._root
        while node.end < len(keys):
            child = node.children.get(keys[node.end])
            if child is None:
                child = PrefixNode(node, keys, node.end, len(keys))
                node.children[keys[node.end]] = child
            else:
                end = _count_common(child, keys)
                if end < child.end:
                    child = _split(child, end)
            child.record(prompt)
            node = child

    def find_heaviest(self, count: int) -> list[PrefixNode]:
        """Return the nodes whose caching saves most, with the nodes above them, each before its children.

        Args:
            count: Maximum number of nodes.
        """
        selected: set[PrefixNode] = set()
        for node in sorted(self._nodes(), key=_importance, reverse=True):
            if len(selected) == count:
                break
            path = {each for each in _path(node) if each not in selected}
            if len(selected) + len(path) <= count:
                selected |= path
        return list(self._in_order(selected))

    def _nodes(self) -> Iterator[PrefixNode]:
        """Yield all nodes."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _in_order(self, selected: set[PrefixNode]) -> Iterator[PrefixNode]:
        """Yield the selected nodes, each before its children, and the most important children first."""
        stack = [self._root]
        while stack:
            node = stack.pop()
            if node is not self._root:
                yield node
            stack += sorted(selected.intersection(node.children.values()), key=_importance)


def _importance(node: PrefixNode) -> tuple[int, int, float]:
    return node.saved_blocks, node.blocks, node.last_sent_at


def _path(node: PrefixNode) -> Iterator[PrefixNode]:
    """Yield a node and the nodes above it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _count_common(node: PrefixNode, keys: Sequence[bytes]) -> int:
    """Return how many first blocks a prompt shares with a node, whose first key it has."""
    limit = min(node.end, len(keys))
    return bisect_left(
        range(limit), 1, node.start + 1, key=lambda index: keys[index] != node.keys[index]
    )


def _split(node: PrefixNode, end: int) -> PrefixNode:
    """Let a node begin at block `end`, and return a new node above it with the blocks before."""
    assert node.parent is not None
    upper = PrefixNode(node.parent, node.keys, node.start, end)
    upper.prompts, upper.tenants, upper.last_sent_at = (
        node.prompts,
        Counter(node.tenants),
        node.last_sent_at,
    )
    node.parent.children[node.keys[node.start]] = upper
    upper.children[node.keys[end]] = node
    node.parent, node.start = upper, end
    return upper
