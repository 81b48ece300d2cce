"""Training batches of whole documents: token ids, the ids to predict and the weight of each prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.chat_format import (
    ASSISTANT,
    BEGIN,
    CALL,
    PAD,
    SYSTEM,
    THINK,
    THINK_END,
    TOOL,
    TOOLS,
    USER,
    render,
    token_id,
)
from models.corpus.chat import generate_documents

QUESTION_WEIGHT = 0.05
TAIL_WEIGHT = 0.4
HEAD_TOKENS = 40
_DOCUMENTS_PER_CHUNK = 128
_BUFFERED_DOCUMENTS = 24
_QUESTIONS = [token_id(text) for text in (SYSTEM, USER, TOOLS, TOOL)]
_SECTIONS = [*_QUESTIONS, *(token_id(text) for text in (BEGIN, ASSISTANT, CALL, THINK, THINK_END))]
_UNPREDICTED = [token_id(text) for text in (THINK, PAD)]


@dataclass(frozen=True, slots=True)
class Batch:
    """Training batch. `ids` and `targets` are [rows, time] int64, `weights` are [rows, time] float32."""

    ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def prediction_weights(ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the weight with which each token counts as a prediction.

    The first `HEAD_TOKENS` of a section count in full, because they decide its content. Sections are answers, calls,
    reasoning and prose. The rest counts `TAIL_WEIGHT`, so that long stories do not dominate short answers. System and
    user turns, tools and results count `QUESTION_WEIGHT`. The start of reasoning is never predicted: the chat template
    writes it.
    """
    index = np.arange(len(ids))
    start = np.maximum.accumulate(np.where(np.isin(ids, _SECTIONS), index, 0))
    answer_weights = np.where(index - start <= HEAD_TOKENS, 1.0, TAIL_WEIGHT)
    weights = np.where(np.isin(ids[start], _QUESTIONS), QUESTION_WEIGHT, answer_weights)
    return np.where(np.isin(ids, _UNPREDICTED), 0.0, weights).astype(np.float32)


def stream_token_ids(tokenizer: Tokenizer, seed: int, time: int) -> Iterator[NDArray[np.int64]]:
    """Yield arrays with the token ids of documents for sequences of `time` tokens, without end."""
    source = generate_documents(seed, time)
    while True:
        texts = [render(document) for document in islice(source, _DOCUMENTS_PER_CHUNK)]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            yield np.asarray(encoding.ids, dtype=np.int64)


class Rows:
    """Endless rows of a fixed number of token ids. Every row starts with the start of a document.

    The documents of a row are the first ones of a small buffer that fit. A row ends with a document that is cut.
    """

    def __init__(self, documents: Iterator[NDArray[np.int64]], size: int) -> None:
        self._documents = documents
        self._size = size
        self._buffer = list(islice(documents, _BUFFERED_DOCUMENTS))

    def next_row(self) -> NDArray[np.int64]:
        """Return the next row."""
        parts = [self._pop(0)[: self._size]]
        missing = self._size - len(parts[0])
        while missing > 0:
            lengths = [len(document) for document in self._buffer]
            fitting = (index for index, length in enumerate(lengths) if length <= missing)
            index = next(fitting, lengths.index(min(lengths)))
            parts.append(self._pop(index)[:missing])
            missing -= len(parts[-1])
        return np.concatenate(parts)

    def _pop(self, index: int) -> NDArray[np.int64]:
        document = self._buffer.pop(index)
        self._buffer.append(next(self._documents))
        return document


class Batches:
    """Packs the endless streams of a seed, one per sequence length, into batches."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._rows: dict[int, Rows] = {}

    def next_batch(self, rows: int, time: int) -> Batch:
        """Return the next batch of sequences of `time` tokens."""
        if time not in self._rows:
            self._rows[time] = Rows(stream_token_ids(self._tokenizer, self._seed, time), time + 1)
        ids = np.stack([self._rows[time].next_row() for _ in range(rows)])
        weights = np.stack([prediction_weights(row) for row in ids])
        return Batch(
            torch.from_numpy(ids[:, :-1].copy()),
            torch.from_numpy(ids[:, 1:].copy()),
            torch.from_numpy(weights[:, 1:].copy()),
        )
