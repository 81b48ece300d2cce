"""Permanent rows: what is known of each running sequence, gathered into one batch each step.

The host packs what a step needs into one buffer. The device, which holds the tokens (those sampled a
moment ago, too) and the pages of every row, takes its news from the buffer and gathers the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from argosy.engine.execution.array_packing import Layout, pack, unpack
from argosy.engine.execution.batch import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argosy.engine.scheduling import Admission, Plan


NO_BLOCK = -1


class Shape(NamedTuple):
    """What all steps have in common that one recording of the device's work can serve."""

    layout: Layout
    width: int
    """Pages of the longest sequence."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A step as the host hands it over."""

    data: Tensor
    """[words] int64, in host memory."""
    shape: Shape
    logit_index: NDArray[np.int64]
    """[L]: flat tokens whose logits are wanted, in rising order."""
    sampled: NDArray[np.int64]
    """[C]: those of them that a token is sampled from."""
    sample_rows: NDArray[np.int64]
    """[C]: the rows that it is sampled for."""
    sample_positions: NDArray[np.int64]
    """[C]: the positions of these tokens."""


class Inputs:
    """A step as the device reads it: views of the buffer that was handed over."""

    def __init__(self, data: Tensor, shape: Shape) -> None:
        (
            (
                self.token_at,
                self.positions,
                self.slots,
                self.rows,
                self.logit_index,
                self.sample_at,
                self.new_token_at,
                self.new_tokens,
                self.new_page_at,
                self.new_pages,
            ),
            (self.cu_q, self.seq_lens),
        ) = unpack(data, shape.layout)
        self.width = shape.width


class SequenceTable:
    """Tokens and KV pages of R rows of at most `max_len` tokens, and of one row more, for padding.

    The padding row has no blocks: its token goes to a negative slot, and its sequence's length is 0.
    """

    def __init__(self, rows: int, max_len: int, block_size: int, device: torch.device) -> None:
        self.prompt_lens = np.zeros(rows + 1, dtype=np.int64)
        self._block_size = block_size
        self._padding = rows
        # One token more than a sequence may have: the last one sampled is recorded, never computed.
        self._stride = max_len + 1
        self._width = -(-max_len // block_size)
        self._blocks = np.zeros((rows + 1, self._width), dtype=np.int64)
        self._blocks[rows] = NO_BLOCK
        self._counting = np.arange(rows + 1)
        self._token_news: dict[int, list[int]] = {}
        """Row -> its tokens, where the device does not know them yet."""
        self._page_news: dict[int, int] = {}
        """Place among all rows' pages -> the block that is there now."""
        self.tokens = torch.zeros(rows + 1, self._stride, dtype=torch.int64, device=device)
        self._pages = torch.from_numpy(self._blocks.astype(np.int32)).to(device)
        self._flat_tokens, self._flat_pages = self.tokens.view(-1), self._pages.view(-1)

    def admit(self, admission: Admission) -> None:
        """Fill a row for a sequence that joins the batch."""
        row, blocks = admission.row, admission.blocks
        self._token_news[row] = admission.tokens
        self._page_news.update(enumerate(blocks, row * self._width))
        self._blocks[row, : len(blocks)] = blocks
        self.prompt_lens[row] = admission.prompt_len

    def place(self, placed: list[tuple[int, int, int]]) -> None:
        """Append blocks: (row, index, block)."""
        for row, index, block in placed:
            self._page_news[row * self._width + index] = block
            self._blocks[row, index] = block

    def forget(self) -> None:
        """All rows are free again; news that the device was not told are dropped."""
        self._token_news, self._page_news = {}, {}

    def uniform(self, plan: Plan) -> bool:
        """Whether `pack_padded` can do it: a single token for each, and at most a page for each."""
        sequences = len(plan.rows)
        return (
            plan.tokens == sequences
            and not self._token_news
            and len(self._page_news) <= sequences
            and all(plan.samples)
        )

    def pack(self, plan: Plan, wanted: NDArray[np.int64] | None = None) -> Packed:
        """What the device needs for `plan`; logits are wanted where it samples, and at `wanted`."""
        size = len(plan.rows)
        rows = np.fromiter(plan.rows, np.int64, size)
        starts = np.fromiter(plan.starts, np.int64, size)
        if wanted is None and plan.tokens == size and all(plan.samples):
            seq_lens = starts + 1
            return self._pack_singles(rows, starts, seq_lens, size, self._pages_of(seq_lens))
        counts = np.fromiter(plan.counts, np.int64, size)
        samples = np.fromiter(plan.samples, np.bool_, size)
        ends, seq_lens = counts.cumsum(), starts + counts
        row_of = rows.repeat(counts)
        positions = np.arange(len(row_of)) + (seq_lens - ends).repeat(counts)
        sampled = ends[samples] - 1
        logit_index = sampled if wanted is None else np.union1d(sampled, wanted)
        data, layout = pack(
            (
                *self._places(row_of, positions),
                rows,
                logit_index,
                (rows * self._stride + seq_lens)[samples],
                *self._news(),
            ),
            (np.concatenate(((0,), ends)), seq_lens),
        )
        shape = Shape(layout, self._pages_of(seq_lens))
        return Packed(
            torch.from_numpy(data), shape, logit_index, sampled, rows[samples], seq_lens[samples]
        )

    def pack_padded(self, plan: Plan, size: int) -> Packed:
        """The same for a `uniform` plan, filled up with the padding row to `size` sequences.

        The shape depends on `size` alone.
        """
        used = len(plan.rows)
        rows, starts = np.full(size, self._padding), np.zeros(size, dtype=np.int64)
        rows[:used], starts[:used] = plan.rows, plan.starts
        seq_lens = starts + 1
        seq_lens[used:] = 0
        return self._pack_singles(rows, starts, seq_lens, used, self._width, pages=size)

    def _pack_singles(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
        used: int,
        width: int,
        pages: int = 0,
    ) -> Packed:
        """One token for each of these rows, of which the first `used` are sampled.

        At least `pages` pages are told.
        """
        at, _, slots = self._places(rows, positions)
        order = self._counting[: len(rows)]
        news = self._news(pages)
        data, layout = pack(
            (at, positions, slots, rows, order, at + 1, *news),
            (self._counting[: len(rows) + 1], seq_lens),
        )
        shape, order = Shape(layout, width), order[:used]
        return Packed(torch.from_numpy(data), shape, order, order, rows[:used], seq_lens[:used])

    def _places(
        self, row_of: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of each flat token: its place in `tokens`, its position, its slot in the KV cache."""
        size = self._block_size
        index = positions // size
        slots = (self._blocks[row_of, index] - index) * size + positions
        return row_of * self._stride + positions, positions, slots

    def _pages_of(self, seq_lens: NDArray[np.int64]) -> int:
        """Pages of the longest."""
        return -(-int(seq_lens.max()) // self._block_size)

    def _news(self, least_pages: int = 0) -> tuple[NDArray[np.int64], ...]:
        """Places and values of the tokens, then of the pages, that the device does not know yet."""
        tokens, pages = self._token_news, self._page_news
        self.forget()
        token_at = token = page_at = page = np.empty(0, dtype=np.int64)
        if tokens:
            starts = [(row * self._stride, len(ids)) for row, ids in tokens.items()]
            token_at = np.concatenate([np.arange(at, at + count) for at, count in starts])
            token = np.concatenate([np.array(ids) for ids in tokens.values()])
        known = max(0, least_pages - len(pages))
        if pages or known:
            place = self._padding * self._width
            page_at = np.array([*pages, *[place] * known])
            page = np.array([*pages.values(), *[NO_BLOCK] * known])
        return token_at, token, page_at, page

    def gather(self, inputs: Inputs) -> Batch:
        """Take the news and gather the batch; work of the device alone."""
        tokens, pages = self._flat_tokens, self._flat_pages
        if len(inputs.new_tokens):
            tokens.index_copy_(0, inputs.new_token_at, inputs.new_tokens)
        if len(inputs.new_pages):
            pages.index_copy_(0, inputs.new_page_at, inputs.new_pages.to(torch.int32))
        return Batch(
            token_ids=tokens.index_select(0, inputs.token_at),
            positions=inputs.positions,
            cu_q=inputs.cu_q,
            seq_lens=inputs.seq_lens,
            page_table=self._pages[:, : inputs.width].index_select(0, inputs.rows),
            slots=inputs.slots,
            rows=inputs.rows,
            logit_index=inputs.logit_index,
        )

    def append(self, inputs: Inputs, tokens: Tensor) -> None:
        """Record sampled tokens, in the order in which they were packed; padding gets none.

        One below 0, of a row that failed while its next token may be under way, becomes token 0.
        """
        self._flat_tokens.index_copy_(0, inputs.sample_at[: len(tokens)], tokens.clamp(min=0))


class RaggedTable:
    """For each row any number of (token id, value) pairs, picked out for a batch without a loop."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._lists: dict[int, tuple[list[int], list[float]]] = {}
        self._index = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._device = device
        self._pack()

    def set(self, row: int, ids: list[int], values: list[float]) -> None:
        """Replace the row's pairs; none at all when `ids` is empty."""
        if ids:
            self._lists[row] = (ids, values)
        elif self._lists.pop(row, None) is None:
            return
        self._pack()

    def pick(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For a batch of rows [S]: (index into the batch [N], token ids [N], values [N])."""
        self._index[rows] = torch.arange(len(rows), device=self._device)
        index = self._index[self._rows]
        self._index[rows] = -1
        here = index >= 0
        return index[here], self._ids[here], self._values[here]

    def _pack(self) -> None:
        rows = [row for row, (ids, _) in self._lists.items() for _ in ids]
        ids = [i for ids, _ in self._lists.values() for i in ids]
        values = [v for _, values in self._lists.values() for v in values]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._ids = torch.tensor(ids, dtype=torch.int64, device=self._device)
        self._values = torch.tensor(values, dtype=torch.float32, device=self._device)
