"""Carries one answer over servers of any kind: what each is asked, and who reads what it gives.

Our own replicas go on exactly, from their journal. Others go on from the token ids that they gave (vLLM,
SGLang), which is exact for greedy answers, or from the text, as an assistant's last message or a longer prompt. What is
more than text (tools, schemas, log-probabilities, several choices) is not carried on over other servers: then
there is no `Leg`, and the client is told.
"""

from __future__ import annotations

import msgspec

from argosy.gateway.backends.backend_adapter import COMPLETION_PATH, Dialect
from argosy.gateway.backends.emitted_choice import CARRIED_ON, Told
from argosy.gateway.backends.native_stream_parser import Delivered, JournalReader
from argosy.gateway.backends.passthrough import Identity, PassReader, Usages
from argosy.gateway.backends.request_builder import (
    asked,
    echoes,
    has_stop_strings,
    is_known_by_ids,
    is_plain_text,
    journaled,
    kept_stops,
    least_tokens,
    output_limit,
    resumed_tokens,
    shows_ids,
    shows_timings,
    shows_usage,
    shows_usage_with_each,
    with_ids,
    with_text,
)
from argosy.gateway.backends.resumable_stream_parser import ChunkReader, View
from argosy.gateway.backends.stop_string_filter import StopGate
from argosy.gateway.backends.stream_parser import StreamReader
from argosy.gateway.request_fields import Ask
from argosy.protocol import SSE_DONE

KNOWN_AGAIN = 16
"""Characters of what was told by which it is known when it comes again: no event has as many by chance."""


class Outgoing(msgspec.Struct, frozen=True):
    """A request as one server gets it."""

    path: bytes
    body: bytes

    def with_priority(self, priority: int) -> Outgoing:
        """The same, saying how urgent it is: of what clients say of that, nothing is sent to others."""
        return Outgoing(self.path, b'{"priority":%d,%b' % (priority, self.body[1:]))


class Leg(msgspec.Struct, frozen=True):
    """One server's part of a streamed answer."""

    outgoing: Outgoing
    reader: StreamReader


def whole_request(ask: Ask, path: bytes, dialect: Dialect, model: str) -> Outgoing:
    """The request for an answer in one piece."""
    if dialect.journal:
        return Outgoing(path, journaled(ask, model))
    return Outgoing(path, asked(ask, path, dialect, model, carriable=False))


class Carrier:
    """One streamed answer on its way over the servers that give it, one after the other."""

    def __init__(self, ask: Ask, path: bytes, delivered: Delivered) -> None:
        self._ask = ask
        self._path = path
        self._delivered = delivered
        self._told = Told(path)
        self._passing: PassReader | None = None
        self._limit: int | None = None

    def leg(self, dialect: Dialect, model: str, room: int = 0) -> Leg | None:
        """The next server's part. None: this one cannot go on where the last one stopped.

        What is told of the answer goes by the part that was given last.
        `room`: tokens that the model's context has; 0: unknown.
        """
        if dialect.journal:
            return self._journaled(model) if self._told.first is None and not self._passed else None
        if self._passed or self._delivered.tokens:
            return None
        self._limit = output_limit(self._ask, self._path, dialect)
        if self._told.first is None:
            return self._first(dialect, model)
        return self._next(dialect, model, room)

    @property
    def identity(self) -> Identity | None:
        """What its events say of the answer, where a server that is not ours named it."""
        if self._passing is not None:
            return self._passing.identity
        return None if self._told.first is None else msgspec.convert(self._told.head(), Identity)

    @property
    def can_go_on(self) -> bool:
        """Whether there could be a server that goes on."""
        return not self._passed and self._told.only_text

    @property
    def is_finished(self) -> bool:
        """Whether each choice was told to have come to its end."""
        return len(self._delivered.finished) == self._ask.choices

    def held_back(self) -> bytes:
        """What a server has given and the client has not, when the answer ends here."""
        return self._told.held_event()

    def ending(self) -> bytes | None:
        """What still has to be told of an answer that had come to its end when its server failed."""
        told, limit = self._told, self._limit
        if self._passing is not None and (self._passing.done or self.is_finished):
            told_usage = self._passing.done or self._passing.usage_told
            return SSE_DONE if told_usage or not shows_usage(self._ask) else None
        if told.first is None:
            return None
        missing = b""
        if not told.finished:
            if limit is None or told.tokens < limit or not told.only_text:
                return None
            missing = told.finish_event("length")
            self._delivered.finished[0] = "length"
        # Where nobody said: about so many.
        told.prompt_tokens = told.prompt_tokens or self._ask.prompt_tokens
        self._delivered.prompt_tokens = told.prompt_tokens
        if shows_usage(self._ask) and not told.usage_told:
            missing += told.usage_event()
        return missing + SSE_DONE

    @property
    def _passed(self) -> bool:
        return self._passing is not None and self._passing.passed

    def _journaled(self, model: str) -> Leg:
        ask, delivered = self._ask, self._delivered
        self._passing = ids = None
        if delivered.tokens:
            ids = [delivered.ids(choice) for choice in range(ask.choices)]
        body = journaled(ask, model, ids, streams=True)
        return Leg(Outgoing(self._path, body), JournalReader(delivered, resumed_tokens(ask)))

    def _first(self, dialect: Dialect, model: str) -> Leg:
        ask, path = self._ask, self._path
        self._passing = None
        carriable = path in dialect.ids | dialect.prefill and is_plain_text(ask, path)
        body = asked(ask, path, dialect, model, carriable=carriable)
        outgoing = Outgoing(path, body)
        self._told.gate = None
        if carriable:
            return Leg(outgoing, self._reader(dialect))
        shown, echoed = shows_usage(ask), echoes(ask)
        self._passing = PassReader(
            self._delivered,
            dialect.broken_off,
            shows_usage=shown,
            echoes=echoed,
            usages=Usages(ask) if dialect.usage_of_each else None,
        )
        return Leg(outgoing, self._passing)

    def _next(self, dialect: Dialect, model: str, room: int) -> Leg | None:
        """Go on after what was told: from the start while that was no text, else from the ids, else from the text."""
        ask, path, told = self._ask, self._path, self._told
        if not told.only_text or told.finished:
            return None
        beginning = "".join(told.text)
        if not beginning.strip():
            told.begin_again()
            body = asked(ask, path, dialect, model, carriable=True)
            return Leg(Outgoing(path, body), self._reader(dialect, seam=beginning))
        if not ask.drew_seed:
            told.fingerprint = CARRIED_ON
        told.forget_unsaid()
        again = "" if told.ends_whole else told.whole_text()
        known = told.ends_whole or len(again) >= KNOWN_AGAIN
        aligned = known and (told.gate is not None or not has_stop_strings(ask))
        exact = aligned and is_known_by_ids(ask, path)
        if path in dialect.ids and told.has_ids and told.prompt_ids and exact:
            ids = [*told.prompt_ids, *told.ids]
            count = len(told.ids)
            from_ids = with_ids(ask, path, dialect, model, ids, told=count, room=room)
            if from_ids is not None:
                reader = self._reader(dialect, completion=path != COMPLETION_PATH, again=again)
                return Leg(Outgoing(COMPLETION_PATH, from_ids), reader)
        if path not in dialect.prefill:
            return None
        # A text that ends in white space is hard to go on from, and some templates drop it anyway.
        text = told.whole_text()
        stem = text.rstrip()
        from_text = with_text(ask, path, dialect, model, stem, told.tokens)
        if from_text is None:
            return None
        told.has_ids = False  # its tokens are not those that the new server sees
        reader = self._reader(dialect, seam=text[len(stem) :])
        return Leg(Outgoing(path, from_text), reader)

    def _reader(
        self, dialect: Dialect, *, completion: bool = False, seam: str = "", again: str = ""
    ) -> ChunkReader:
        ask = self._ask
        path = COMPLETION_PATH if completion else self._path
        added = dialect.usage_with_each and path not in dialect.ids
        stops = kept_stops(ask, dialect)
        if stops and self._told.gate is None:
            self._told.gate = StopGate(stops)
        view = View(
            usage=shows_usage(ask),
            usage_with_each=shows_usage_with_each(ask) or not added,
            ids=shows_ids(ask),
            broken_off=dialect.broken_off,
            timings=shows_timings(ask),
            completion=completion,
            seam=seam,
            least_tokens=least_tokens(ask),
            again=again,
        )
        return ChunkReader(self._told, self._delivered, view)
