"""Lines of batches: how they are checked, their ids, and the request that each one becomes."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Raw

from argosy.store import Batch, ClaimedLine

CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
)
MESSAGES_PATH = "/v1/messages"
BATCH_PATHS = (
    *(CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH),
    *("/v1/embeddings", "/v1/rerank", "/v1/score"),
)
"""Paths of the APIs to which the lines of a batch may be requests."""
MAX_CUSTOM_ID_CHARS = 64
_SEEDED_PATHS = frozenset({CHAT_PATH, COMPLETION_PATH})


class LineFields(msgspec.Struct, frozen=True):
    """Fields of a request by which a line is checked."""

    model: str
    stream: bool | None = False
    background: bool | None = False


def derive_line_id(batch_id: str, line: int) -> str:
    """Return the id of a line's request, which identifies its row in the ledger."""
    return "batch_req_" + hashlib.sha256(f"{batch_id}\0{line}".encode()).hexdigest()[:32]


def prepare_line(batch: Batch, claimed: ClaimedLine) -> bytes:
    """Return the body of a line's request.

    A seed that follows from batch and line lets a repeated line sample the same tokens. A response is only stored
    beside the batch if the line says so.
    """
    path = batch.details.path
    if path not in _SEEDED_PATHS and path != RESPONSES_PATH:
        return claimed.body
    fields: dict[str, Any] = msgspec.json.decode(claimed.body, type=dict[str, Raw])
    if path == RESPONSES_PATH:
        fields.setdefault("store", False)
    else:
        fields.setdefault("seed", int(derive_line_id(batch.id, claimed.line)[-8:], 16) >> 1)
    return msgspec.json.encode(fields)
