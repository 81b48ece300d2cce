"""Packed training batches: token ids, the ids to predict and the weight of each prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.corpus.chat import documents
from models.network import ASSISTANT_ID, BEGIN_ID, SYSTEM_ID, USER_ID
from models.tokenizer import render

QUESTION_WEIGHT = 0.05
TAIL_WEIGHT = 0.4
HEAD_TOKENS = 40
_SHELF = 512


@dataclass(frozen=True, slots=True)
class Batch:
    """ids and targets are [rows, time] int64; weights are [rows, time] float32."""

    ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def prediction_weights(ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the weight with which each token counts as a prediction.

    The first HEAD_TOKENS of an answer or of prose count in full: they decide what is said. The rest
    counts TAIL_WEIGHT, so that stories do not drown the short answers, and what others say counts
    QUESTION_WEIGHT.
    """
    speakers = np.isin(ids, (BEGIN_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID))
    at = np.arange(len(ids))
    last = np.maximum.accumulate(np.where(speakers, at, 0))
    asked = np.isin(ids[last], (SYSTEM_ID, USER_ID))
    told = np.where(at - last <= HEAD_TOKENS, 1.0, TAIL_WEIGHT)
    return np.where(asked, QUESTION_WEIGHT, told).astype(np.float32)


def stream(tokenizer: Tokenizer, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield the token ids of many documents at a time, without end."""
    source = documents(seed)
    while True:
        texts = [render(document) for document in islice(source, _SHELF)]
        found = tokenizer.encode_batch(texts, add_special_tokens=False)
        yield np.concatenate([np.asarray(one.ids, dtype=np.int64) for one in found])


class Batches:
    """Cuts the endless stream of a seed into batches of any size."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._stream = stream(tokenizer, seed)
        self._rest = np.empty(0, dtype=np.int64)

    def take(self, rows: int, time: int) -> Batch:
        """Return the next batch; consecutive rows continue the same stream."""
        need = rows * time + 1
        while len(self._rest) < need:
            self._rest = np.concatenate((self._rest, next(self._stream)))
        ids, self._rest = self._rest[:need], self._rest[need - 1 :]
        weights = prediction_weights(ids)

        def shaped(values: NDArray[np.int64] | NDArray[np.float32]) -> torch.Tensor:
            return torch.from_numpy(values.reshape(rows, time).copy())

        return Batch(shaped(ids[:-1]), shaped(ids[1:]), shaped(weights[1:]))
