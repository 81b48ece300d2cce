"""Reads a replica's journaled stream: what may be passed on, and where it can be carried on elsewhere.

The replica's side, with the format, is `argosy.engine.serving.api_server.resume_metadata`.
"""

from __future__ import annotations

import re
from array import array

import msgspec

from argosy.gateway.backends.stream_parser import StreamParser
from argosy.protocol import LineBuffer

_EVENT_END = b"\n\n"
_METADATA_PREFIX = b": argosy "
_METADATA_START = _EVENT_END + _METADATA_PREFIX
_METADATA_START_BYTES = len(_METADATA_START)
_COMMENT_START = b"\n:"
_DATA_PREFIX = b"data:"
_DONE_EVENT = b"data: [DONE]"
_TOKEN_IDS_PATTERN = re.compile(rb"[0-9]{0,10}(?:,[0-9]{0,10})*")
_PROMPT_COUNTS_PATTERN = re.compile(rb"prompt [0-9]{1,9} [0-9]{1,9}(?: .*)?")
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Of events whose block has not come."""


class DeliveredOutput(msgspec.Struct, eq=False):
    """What the client has been given of each choice; survives the replicas that gave it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_blocks: bytes = b""
    """Names of the prompt's KV blocks, in base64; empty where they are not told."""
    prompt_token_ids: array[int] | None = None
    """The prompt's tokens, where another server than ours tells them."""
    token_id_pieces: dict[int, list[bytes]] = msgspec.field(default_factory=dict)
    """Choice -> ids, as comma-separated pieces."""
    finish_reasons: dict[int, str] = msgspec.field(default_factory=dict)
    output_tokens: int = 0
    model_digest: bytes = b""
    """Of the model that gave it; empty: it did not say."""

    def reset(self) -> None:
        """It was not given to the client after all."""
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.model_digest = b""
        self.token_id_pieces.clear()
        self.finish_reasons.clear()

    def token_ids(self, choice: int) -> list[int]:
        """The token ids that a choice has."""
        return [int(i) for i in b",".join(self.token_id_pieces.get(choice, ())).split(b",") if i]


class NativeStreamParser(StreamParser):
    """One attempt's stream. Events are held until the block that makes them count has come."""

    def __init__(self, delivered: DeliveredOutput, resume_tokens: int = 0) -> None:
        """`resumed`: tokens that the client gave itself to go on after, which are read as its prompt is."""
        self._delivered = delivered
        self._resume_tokens = resume_tokens
        self._completed_choices = delivered.finish_reasons.keys() - delivered.token_id_pieces.keys()
        """Choices that ended without a token: no ids say so, and the replica tells them again."""
        self._buffer = LineBuffer()
        self._held_events: list[bytes] = []
        self._held_bytes = 0

    def feed(self, body: bytes) -> bytes:
        """See `StreamReader`. What cannot be read ends it where it was: what counts before that is passed on."""
        if self.failure:
            return b""
        if (
            not self._buffer
            and not self._held_events
            and body.startswith(_DATA_PREFIX)
            and body.endswith(_EVENT_END)
        ):
            # One token's piece comes like this: events, and the block that makes them count.
            end = body.rfind(_METADATA_START)
            entry = end + _METADATA_START_BYTES
            if (
                end > 0
                and body.find(b"\n", entry) == len(body) - 2
                and body.find(_COMMENT_START, 0, end) < 0
            ):
                return body[: end + 2] if self._accept_metadata(body[entry:-2]) else b""
        whole, mark, rest = self._buffer.feed(body).rpartition(_EVENT_END)
        if mark:
            self._buffer.set_remainder(rest)
        passed: list[bytes] = []
        for block in whole.split(b"\n\n") if mark else ():
            if block.startswith(_METADATA_PREFIX):
                if self._accept_metadata(block[len(_METADATA_PREFIX) :]):
                    passed += self._held_events
                self._held_events.clear()
                self._held_bytes = 0
                if self.failure:
                    break
            elif not block.startswith(b":"):
                self.is_done = self.is_done or block == _DONE_EVENT
                self._held_events += (block, mark)
                self._held_bytes += len(block) + len(mark)
        if len(self._buffer) + self._held_bytes > MAX_HELD_BYTES:
            self.failure = f"more than {MAX_HELD_BYTES} bytes wait for what makes them count"
        return b"".join(passed)

    @property
    def can_use_fast_path(self) -> bool:
        """See `StreamReader`."""
        return not (self._buffer or self._held_events or self.is_done or self.failure)

    def flush(self) -> bytes:
        """The events that no block followed: the usage and `[DONE]`, or an error."""
        held = b"".join(self._held_events)
        self._held_events.clear()
        return held

    def _accept_metadata(self, metadata: bytes) -> bool:
        """Take in a block; whether the events before it are for the client."""
        try:
            return self._apply_metadata(metadata)
        except (ValueError, LookupError) as error:
            self.failure = f"the replica's stream cannot be read ({error})"
            return False

    def _apply_metadata(self, metadata: bytes) -> bool:
        """The same. Raises ValueError or LookupError, and then nothing of it was taken in."""
        delivered = self._delivered
        words = metadata.split(b" ")
        if words[0] == b"prompt":
            if not _PROMPT_COUNTS_PATTERN.fullmatch(metadata):
                raise ValueError("its counts of the prompt are none")
            delivered.prompt_tokens = int(words[1]) + self._resume_tokens
            delivered.cached_tokens = min(int(words[2]), delivered.prompt_tokens)
            delivered.prompt_blocks = words[3] if len(words) > 3 else b""
            return True
        choice, ids = int(words[0]), words[1]
        finish = words[2].decode() if len(words) > 2 else None
        if choice in self._completed_choices:
            return False
        if ids:
            if not _TOKEN_IDS_PATTERN.fullmatch(ids):
                raise ValueError("its token ids are none")
            told = delivered.token_id_pieces.get(choice)
            if told is None:
                told = delivered.token_id_pieces[choice] = []
            told.append(ids)
            delivered.output_tokens += ids.count(b",") + 1
        if finish is not None:
            delivered.finish_reasons[choice] = finish
        return True
