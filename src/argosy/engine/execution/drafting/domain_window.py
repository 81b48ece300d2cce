"""Drafter that continues a sequence as finished outputs of its cache domain went on.

Source: suffix decoding (Oliaro et al. 2024), which has one tree for all requests. Here no text is used in another cache
domain, because the time of an answer would show which texts others have got.
"""

from __future__ import annotations

import collections.abc
from collections import OrderedDict

from argosy.engine.execution.drafting.drafter import NO_DRAFT, Draft
from argosy.engine.execution.drafting.token_index import (
    MAX_MATCH,
    SEPARATOR,
    TokenIndex,
    load_token_index,
)
from argosy.engine.scheduling import Sequence

MAX_DOMAIN_TOKENS = 1 << 20
"""Number of latest tokens that are kept of a domain, about 12 MB."""
MIN_COUNTED_TOKENS = 1024
"""Number of tokens that a domain counts for at least, because its index has memory for them."""
MAX_TOKENS = 4 * MAX_DOMAIN_TOKENS
"""Number of tokens of all domains. Beyond it, those of the domain that was least recently used are dropped."""


class DomainWindowDrafter:
    """Index of finished outputs for each cache domain, of requests that may share them."""

    name = "domain_window"

    def __init__(self) -> None:
        """Create a drafter without outputs.

        Raises:
            NativeUnavailableError: The native code cannot be built or loaded.
        """
        load_token_index()
        self._indexes: OrderedDict[bytes, TokenIndex] = OrderedDict()
        """Salt of a cache domain -> its outputs, least recently used first."""
        self._sequences: dict[str, Sequence] = {}
        """Unfinished sequences by request id."""

    def propose(
        self, sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[Draft]:
        return [
            self._propose_one(seq, limit) if seq.shares_outputs else NO_DRAFT
            for seq, limit in zip(sequences, limits, strict=True)
        ]

    def _propose_one(self, seq: Sequence, limit: int) -> Draft:
        self._sequences[seq.id] = seq
        index = self._indexes.get(seq.cache_salt)
        found = None if index is None else index.find(limit, seq.tokens[-MAX_MATCH:])
        if found is None:
            return NO_DRAFT
        return Draft(found.tokens[: found.match_size], found.match_size)

    def release(self, request_id: str) -> None:
        seq = self._sequences.pop(request_id, None)
        if seq is None:
            return
        domain, indexes = seq.cache_salt, self._indexes
        index = indexes.get(domain)
        if index is None:
            index = indexes[domain] = TokenIndex(MAX_DOMAIN_TOKENS)
        index.append([SEPARATOR, *seq.tokens[seq.prompt_len :]])
        indexes.move_to_end(domain)
        while sum(map(_count_tokens, indexes.values())) > MAX_TOKENS:
            indexes.popitem(last=False)


def _count_tokens(index: TokenIndex) -> int:
    return max(MIN_COUNTED_TOKENS, min(index.length, MAX_DOMAIN_TOKENS))
