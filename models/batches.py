"""Packed training batches: token ids, the ids to predict and the weight of each prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.corpus.chat import generate_documents
from models.network import ASSISTANT_ID, BEGIN_ID, SYSTEM_ID, USER_ID
from models.tokenizer import render

QUESTION_WEIGHT = 0.05
TAIL_WEIGHT = 0.4
HEAD_TOKENS = 40
_DOCUMENTS_PER_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Batch:
    """Training batch. `ids` and `targets` are [rows, time] int64, `weights` are [rows, time] float32."""

    ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def prediction_weights(ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the weight with which each token counts as a prediction.

    The first `HEAD_TOKENS` of an answer or of prose count in full, because they decide its content. The rest counts
    `TAIL_WEIGHT`, so that long stories do not dominate short answers. System and user turns count `QUESTION_WEIGHT`.
    """
    is_speaker = np.isin(ids, (BEGIN_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID))
    index = np.arange(len(ids))
    turn_start = np.maximum.accumulate(np.where(is_speaker, index, 0))
    is_question = np.isin(ids[turn_start], (SYSTEM_ID, USER_ID))
    answer_weights = np.where(index - turn_start <= HEAD_TOKENS, 1.0, TAIL_WEIGHT)
    return np.where(is_question, QUESTION_WEIGHT, answer_weights).astype(np.float32)


def stream_token_ids(tokenizer: Tokenizer, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield arrays with the token ids of many documents, without end."""
    source = generate_documents(seed)
    while True:
        texts = [render(document) for document in islice(source, _DOCUMENTS_PER_CHUNK)]
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        yield np.concatenate([np.asarray(item.ids, dtype=np.int64) for item in encodings])


class Batches:
    """Packs the endless stream of a seed into batches of any size."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._stream = stream_token_ids(tokenizer, seed)
        self._pending_ids = np.empty(0, dtype=np.int64)

    def next_batch(self, rows: int, time: int) -> Batch:
        """Return the next batch. Consecutive rows continue the same stream."""
        size = rows * time + 1
        while len(self._pending_ids) < size:
            self._pending_ids = np.concatenate((self._pending_ids, next(self._stream)))
        ids, self._pending_ids = self._pending_ids[:size], self._pending_ids[size - 1 :]
        weights = prediction_weights(ids)

        def to_tensor(values: NDArray[np.int64] | NDArray[np.float32]) -> torch.Tensor:
            return torch.from_numpy(values.reshape(rows, time).copy())

        return Batch(to_tensor(ids[:-1]), to_tensor(ids[1:]), to_tensor(weights[1:]))
