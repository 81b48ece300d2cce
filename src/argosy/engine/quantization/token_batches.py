"""Batches of whole documents for a decoder, each with blocks of its own in a small KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch

BLOCK_SIZE = 16
MAX_BATCH_TOKENS = 2048


class DocumentBatches:
    """Documents, concatenated to batches of at most `max_tokens` tokens, or of one document."""

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        decoder: Decoder,
        max_tokens: int = MAX_BATCH_TOKENS,
    ) -> None:
        groups = list(_divide(documents, max_tokens))
        self._num_groups = len(decoder.architecture.kv_layout.windows)
        blocks = max(sum(-(-len(each) // BLOCK_SIZE) for each in group) for group in groups)
        num_blocks = self._num_groups * blocks
        self.attention: Attention = decoder.create_attention(num_blocks, BLOCK_SIZE)
        """Attention over the KV cache of one batch."""
        self.attention.ensure_block(num_blocks - 1)
        self._states = decoder.create_states(max(map(len, groups)), 0)
        self._batches = [self._build(group) for group in groups]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all batches."""
        return sum(len(batch.token_ids) for batch in self._batches)

    def __iter__(self) -> Iterator[tuple[slice, Batch]]:
        """Yield the batches, each with the range of its tokens among all."""
        start = 0
        for batch in self._batches:
            end = start + len(batch.token_ids)
            yield slice(start, end), batch
            start = end

    def _build(self, documents: Sequence[Sequence[int]]) -> Batch:
        lengths = torch.tensor([len(document) for document in documents])
        positions = torch.cat([torch.arange(int(length)) for length in lengths])
        pages = (lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
        first_pages = pages.cumsum(0) - pages
        table = first_pages[:, None] + torch.arange(int(pages.max()))
        total = int(pages.sum())
        offsets = total * torch.arange(self._num_groups)
        tables = torch.clamp(table, max=total - 1) + offsets[:, None, None]
        slots = first_pages.repeat_interleave(lengths) * BLOCK_SIZE + positions
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        batch = Batch(
            token_ids=torch.tensor([token for document in documents for token in document]),
            positions=positions,
            query_start_loc=ends.int(),
            seq_lens=lengths.int(),
            block_tables=tables.int(),
            slot_mappings=slots + (offsets * BLOCK_SIZE)[:, None],
            rows=torch.arange(len(documents)),
            logit_index=torch.arange(len(positions)),
        )
        return batch if self._states is None else self._states.attach(batch)


def _divide(documents: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[Sequence[int]]]:
    group: list[Sequence[int]] = []
    size = 0
    for document in documents:
        if group and size + len(document) > max_tokens:
            yield group
            group, size = [], 0
        group.append(document)
        size += len(document)
    if group:
        yield group
