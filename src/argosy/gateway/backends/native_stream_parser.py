"""Reads a replica's journaled stream: what may be passed on, and where it can be carried on elsewhere.

The replica's side, with the format, is `argosy.engine.serving.api_server.resume_metadata`.
"""

from __future__ import annotations

import re
from array import array

import msgspec

from argosy.gateway.backends.stream_parser import StreamReader
from argosy.protocol import Unended

_END = b"\n\n"
_MARK = b": argosy "
_SEAL = _END + _MARK
_SEAL_BYTES = len(_SEAL)
_COMMENT = b"\n:"
_EVENT = b"data:"
_DONE = b"data: [DONE]"
_IDS = re.compile(rb"[0-9]{0,10}(?:,[0-9]{0,10})*")
_COUNTS = re.compile(rb"prompt [0-9]{1,9} [0-9]{1,9}(?: .*)?")
MOST_HELD_BYTES = 64 * 1024 * 1024
"""Of events whose block has not come."""


class Delivered(msgspec.Struct, eq=False):
    """What the client has been given of each choice; survives the replicas that gave it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_blocks: bytes = b""
    """Names of the prompt's KV blocks, in base64; empty where they are not told."""
    prompt_ids: array[int] | None = None
    """The prompt's tokens, where another server than ours tells them."""
    tokens: dict[int, list[bytes]] = msgspec.field(default_factory=dict)
    """Choice -> ids, as comma-separated pieces."""
    finished: dict[int, str] = msgspec.field(default_factory=dict)
    output_tokens: int = 0
    digest: bytes = b""
    """Of the model that gave it; empty: it did not say."""

    def forget(self) -> None:
        """It was not given to the client after all."""
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.digest = b""
        self.tokens.clear()
        self.finished.clear()

    def ids(self, choice: int) -> list[int]:
        """The token ids that a choice has."""
        return [int(i) for i in b",".join(self.tokens.get(choice, ())).split(b",") if i]


class JournalReader(StreamReader):
    """One attempt's stream. Events are held until the block that makes them count has come."""

    def __init__(self, delivered: Delivered, resumed: int = 0) -> None:
        """`resumed`: tokens that the client gave itself to go on after, which are read as its prompt is."""
        self._delivered = delivered
        self._resumed = resumed
        self._told = delivered.finished.keys() - delivered.tokens.keys()
        """Choices that ended without a token: no ids say so, and the replica tells them again."""
        self._rest = Unended()
        self._held: list[bytes] = []
        self._held_bytes = 0

    def feed(self, body: bytes) -> bytes:
        """See `StreamReader`. What cannot be read ends it where it was: what counts before that is passed on."""
        if self.failure:
            return b""
        if not self._rest and not self._held and body.startswith(_EVENT) and body.endswith(_END):
            # One token's piece comes like this: events, and the block that makes them count.
            end = body.rfind(_SEAL)
            entry = end + _SEAL_BYTES
            if (
                end > 0
                and body.find(b"\n", entry) == len(body) - 2
                and body.find(_COMMENT, 0, end) < 0
            ):
                return body[: end + 2] if self._counts(body[entry:-2]) else b""
        whole, mark, rest = self._rest.join(body).rpartition(_END)
        if mark:
            self._rest.keep(rest)
        passed: list[bytes] = []
        for block in whole.split(b"\n\n") if mark else ():
            if block.startswith(_MARK):
                if self._counts(block[len(_MARK) :]):
                    passed += self._held
                self._held.clear()
                self._held_bytes = 0
                if self.failure:
                    break
            elif not block.startswith(b":"):
                self.done = self.done or block == _DONE
                self._held += (block, mark)
                self._held_bytes += len(block) + len(mark)
        if len(self._rest) + self._held_bytes > MOST_HELD_BYTES:
            self.failure = f"more than {MOST_HELD_BYTES} bytes wait for what makes them count"
        return b"".join(passed)

    @property
    def steady(self) -> bool:
        """See `StreamReader`."""
        return not (self._rest or self._held or self.done or self.failure)

    def take_held(self) -> bytes:
        """The events that no block followed: the usage and `[DONE]`, or an error."""
        held = b"".join(self._held)
        self._held.clear()
        return held

    def _counts(self, entry: bytes) -> bool:
        """Take in a block; whether the events before it are for the client."""
        try:
            return self._take_in(entry)
        except (ValueError, LookupError) as error:
            self.failure = f"the replica's stream cannot be read ({error})"
            return False

    def _take_in(self, entry: bytes) -> bool:
        """The same. Raises ValueError or LookupError, and then nothing of it was taken in."""
        delivered = self._delivered
        words = entry.split(b" ")
        if words[0] == b"prompt":
            if not _COUNTS.fullmatch(entry):
                raise ValueError("its counts of the prompt are none")
            delivered.prompt_tokens = int(words[1]) + self._resumed
            delivered.cached_tokens = min(int(words[2]), delivered.prompt_tokens)
            delivered.prompt_blocks = words[3] if len(words) > 3 else b""
            return True
        choice, ids = int(words[0]), words[1]
        finish = words[2].decode() if len(words) > 2 else None
        if choice in self._told:
            return False
        if ids:
            if not _IDS.fullmatch(ids):
                raise ValueError("its token ids are none")
            told = delivered.tokens.get(choice)
            if told is None:
                told = delivered.tokens[choice] = []
            told.append(ids)
            delivered.output_tokens += ids.count(b",") + 1
        if finish is not None:
            delivered.finished[choice] = finish
        return True
