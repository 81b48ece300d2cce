"""What a replica has cached of a prompt, from what it tells of its KV blocks itself.

A gateway knows prompts as text, a replica its cache as blocks of tokens. What joins them is the first answer to a
text, by any replica of the pool: it names the blocks that its prompt became, or its tokens (`Texts`). Each replica
tells which blocks it holds (`ExactIndex`). So what is evicted, lost in a restart, or came there by way of another
gateway is known.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence

from argosy.policy.engine_block_names import block_names
from argosy.policy.prefix_cache_index import Answered, PrefixIndex, Read

MOST_WEIGHT = 1 << 20
"""Of all texts of a pool: the prompts of some 8 million tokens, in 30 MB."""
KEY_WEIGHT = 4
"""A key takes as much memory as so many names, at least."""
MOST_HELD = 1 << 22
"""Blocks of a replica that can be followed: 67 million tokens in blocks of 16, some 300 MB."""
AWAITED = 64
"""Answered prompts that may still be told of; an answer overtakes that by some milliseconds at most."""


class _Chain:
    """The blocks of one prompt, and how far each of its keys reaches into them."""

    __slots__ = ("_density", "keys", "names", "used")

    def __init__(self, keys: Sequence[bytes], names: array[int], density: float) -> None:
        self.names = names
        self._density = density
        self.keys = [
            key for count, key in enumerate(keys, 1) if 0 < self.reach(count) <= len(names)
        ]
        self.used = 0
        """Keys that go by it."""

    def reach(self, count: int) -> int:
        """How many token blocks the prompt's first `count` text blocks fill, its tokens being spread evenly.

        Rounded down: a block that reaches into other text is not for all who have this one.
        """
        return int(self._density * count)

    @property
    def weight(self) -> int:
        """Memory that it takes."""
        return len(self.names) + KEY_WEIGHT * len(self.keys)


class Texts:
    """Which token blocks texts become, as far as answers have told; for replicas that read alike.

    Each key goes by the latest prompt that had it. The prompts that were answered least recently are forgotten.
    """

    def __init__(self, most_weight: int = MOST_WEIGHT) -> None:
        self._most = most_weight
        self._weight = 0
        self._by_key: dict[bytes, _Chain] = {}
        self._chains: OrderedDict[_Chain, None] = OrderedDict()
        """The least recent first."""

    def __len__(self) -> int:
        return len(self._by_key)

    def learn(self, keys: Sequence[bytes], names: array[int], density: float) -> None:
        """A prompt with these text blocks became these token blocks, `density` of them for each."""
        chain = _Chain(keys, names, density)
        if not chain.keys:
            return
        self._chains[chain] = None
        self._weight += chain.weight
        for key in chain.keys:
            before = self._by_key.get(key)
            if before is not None:
                self._leave(before)
            self._by_key[key] = chain
            chain.used += 1
        while self._weight > self._most:
            self._forget(next(iter(self._chains)))

    def held(self, keys: Sequence[bytes], blocks: Collection[int]) -> int:
        """How many of a prompt's text blocks, from its beginning, are covered by these token blocks.

        Text that nobody has told about is not.
        """
        for count in range(len(keys), 0, -1):
            chain = self._by_key.get(keys[count - 1])
            if chain is not None:
                reach = chain.reach(count)
                return count * _leading(chain.names[:reach], blocks) // reach
        return 0

    def _leave(self, chain: _Chain) -> None:
        chain.used -= 1
        if not chain.used:
            self._drop(chain)

    def _forget(self, chain: _Chain) -> None:
        for key in chain.keys:
            if self._by_key.get(key) is chain:
                del self._by_key[key]
        self._drop(chain)

    def _drop(self, chain: _Chain) -> None:
        del self._chains[chain]
        self._weight -= chain.weight


def _leading(names: array[int], blocks: Collection[int]) -> int:
    """How many of the first names are there without a gap."""
    return next((n for n, name in enumerate(names) if name not in blocks), len(names))


class ExactIndex:
    """One replica's, while it tells; see `Prefixes`.

    A prompt that is on its way is believed to be there until its blocks are known to be: by its answer, a replica that
    names them has told of them all. So is text of which no answer tells the blocks (several prompts in one request).
    """

    def __init__(self, texts: Texts, block_size: int) -> None:
        self._texts = texts
        self._block_size = block_size
        self._believed = PrefixIndex()
        self.blocks: set[int] = set()
        """Names of those that it holds."""
        self._awaited: deque[Sequence[bytes]] = deque(maxlen=AWAITED)
        """Prompts whose answer came before what is told of their blocks."""

    def __len__(self) -> int:
        return len(self._believed)

    def stored(self, names: Iterable[int]) -> None:
        """The replica holds these now."""
        self.blocks.update(names)
        if self._awaited:
            late = [keys for keys in self._awaited if not self._is_told(keys)]
            self._awaited = deque(late, AWAITED)

    def removed(self, names: Iterable[int]) -> None:
        """It no longer does."""
        self.blocks.difference_update(names)

    def resize(self, blocks: int) -> None:
        """See `Prefixes`."""
        self._believed.resize(blocks)

    def clear(self) -> None:
        """See `Prefixes`; what it tells of itself is no belief."""
        self._believed.clear()

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """See `Prefixes`."""
        known = self._texts.held(keys, self.blocks)
        return [0] * known + self._believed.find(keys[known:])

    def sent(self, keys: Sequence[bytes]) -> None:
        """See `Prefixes`."""
        self._believed.sent(keys)

    def answered(self, told: Answered) -> None:
        """See `Prefixes`."""
        if not told.names:
            self._believed.answered(told)
            return
        density = told.tokens / self._block_size / told.blocks
        self._texts.learn(told.keys, told.names, density)
        self._believed.forget(told.keys)

    def read(self, prompt: Read) -> None:
        """See `Prefixes`.

        What the replica has not told of stays believed: it may have been there before, or is told in a moment.
        """
        density = len(prompt.ids) / self._block_size / prompt.blocks
        ids = prompt.ids[: int(density * len(prompt.keys)) * self._block_size]
        self._texts.learn(prompt.keys, block_names(prompt.salt, ids, self._block_size), density)
        if not self._is_told(prompt.keys):
            self._awaited.append(prompt.keys)

    def _is_told(self, keys: Sequence[bytes]) -> bool:
        """Whether the replica has told of all of a prompt; what it has told of is no longer believed."""
        known = self._texts.held(keys, self.blocks)
        self._believed.forget(keys[:known])
        return known == len(keys)
