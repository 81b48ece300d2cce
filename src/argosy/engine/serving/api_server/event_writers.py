"""Streamed answers: each piece of a choice as server-sent events, the constant parts encoded once."""

from __future__ import annotations

from typing import Protocol

import msgspec

from argosy.engine.serving.api_server.response_spec import Frame
from argosy.engine.serving.core_messages import TokenLogprob
from argosy.engine.serving.text.choice import Choice
from argosy.protocol import ChatLogprobs, event

_encode = msgspec.json.Encoder().encode


class EventWriter(Protocol):
    """Writes the events of one stream."""

    def events(self, choice: Choice) -> bytes:
        """The events for what is new of `choice`; empty when nothing can be told yet."""
        ...

    def usage(self) -> bytes:
        """The event before the end that carries the usage; empty when it was not asked for."""
        ...


class _Envelope:
    """What surrounds the choice in every chunk: the answer's identity before, the usage after."""

    def __init__(self, frame: Frame, kind: str) -> None:
        identity = {"id": frame.id, "object": kind, "created": frame.created, "model": frame.model}
        self.head = b"data: " + _encode(identity)[:-1] + b',"choices":[{"index":'
        self._frame = frame
        self._tail = b',"usage":null}\n\n' if frame.usage_chunk else b"}\n\n"
        self._bare = _encode(identity)[:-1]

    def tail(self) -> bytes:
        """The end of a chunk, after its choices."""
        if self._frame.running_usage:
            return b',"usage":' + _encode(self._frame.usage()) + b"}\n\n"
        return self._tail

    def usage(self) -> bytes:
        """The chunk that carries only the usage."""
        if not self._frame.usage_chunk:
            return b""
        return event(self._bare + b',"choices":[],"usage":' + _encode(self._frame.usage()) + b"}")


class ChatEvents:
    """`chat.completion.chunk`s: the role first, then the text, then an empty delta that says why it ended."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._envelope = _Envelope(frame, "chat.completion.chunk")
        self._begun = {choice.index for choice in frame.choices if frame.carries_on(choice)}

    def events(self, choice: Choice) -> bytes:
        """See `EventWriter`."""
        piece = choice.take()
        out = []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            out.append(self._role(choice))
        if piece.text or (piece.tokens and (self._frame.token_ids or self._frame.logprobs)):
            logprobs = self._frame.logprobs.chat(piece.logprobs) if self._frame.logprobs else None
            delta = b'{"content":' + _encode(piece.text) + b"}"
            ids = b',"token_ids":' + _encode(piece.tokens) if self._frame.token_ids else b""
            out.append(self._chunk(choice, delta, logprobs, ids + b"}]"))
        if piece.finish is not None:
            out.append(self._last(choice))
        return b"".join(out)

    def usage(self) -> bytes:
        """See `EventWriter`."""
        return self._envelope.usage()

    def _role(self, choice: Choice) -> bytes:
        ending = b"}]"
        if self._frame.token_ids and len(self._begun) == 1:
            ending += b',"prompt_token_ids":' + _encode(choice.prompt.token_ids)
        return self._chunk(choice, b'{"role":"assistant","content":""}', None, ending)

    def _chunk(
        self, choice: Choice, delta: bytes, logprobs: ChatLogprobs | None, ending: bytes
    ) -> bytes:
        envelope = self._envelope
        return b"".join(
            (
                envelope.head,
                b"%d" % choice.index,
                b',"delta":',
                delta,
                b',"logprobs":',
                b"null" if logprobs is None else _encode(logprobs),
                b',"finish_reason":null',
                ending,
                envelope.tail(),
            )
        )

    def _last(self, choice: Choice) -> bytes:
        envelope = self._envelope
        ending = {"finish_reason": choice.finish, "stop_reason": choice.stop_reason}
        return b"".join(
            (
                envelope.head,
                b"%d" % choice.index,
                b',"delta":{},"logprobs":null,',
                _encode(ending)[1:],
                b"]",
                envelope.tail(),
            )
        )


class CompletionEvents:
    """`text_completion` chunks: the echoed prompt first if asked for; the last text carries the reason."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._envelope = _Envelope(frame, "text_completion")
        self._offsets = {c.index: self._told(c) for c in frame.choices if frame.carries_on(c)}
        """Where the next token's text starts, for each choice that has begun."""

    def events(self, choice: Choice) -> bytes:
        """See `EventWriter`."""
        first = choice.index not in self._offsets
        if first and self._must_wait(choice):
            return b""
        piece = choice.take()
        text, tokens, records = piece.text, piece.tokens, piece.logprobs
        if first and choice.prompt.echo is not None:
            text = choice.prompt.echo + text
            tokens = choice.prompt.token_ids + tokens
            records = choice.prompt.logprobs + records
        told = self._frame.token_ids or self._frame.logprobs is not None
        if not (text or piece.finish is not None or (tokens and told)):
            return b""
        ids = b""
        if self._frame.token_ids:
            ids = b',"token_ids":' + _encode(piece.tokens)
            if first:
                ids += b',"prompt_token_ids":' + _encode(choice.prompt.token_ids)
        logprobs = self._logprobs(choice, tokens, records)
        ending = {"finish_reason": piece.finish, "stop_reason": piece.stop_reason}
        return b"".join(
            (
                self._envelope.head,
                b"%d" % choice.index,
                b',"text":',
                _encode(text),
                b',"logprobs":',
                logprobs,
                b",",
                _encode(ending)[1:-1],
                ids,
                b"}]",
                self._envelope.tail(),
            )
        )

    def usage(self) -> bytes:
        """See `EventWriter`."""
        return self._envelope.usage()

    def _logprobs(self, choice: Choice, tokens: list[int], records: list[TokenLogprob]) -> bytes:
        offset = self._offsets.setdefault(choice.index, 0)
        writer = self._frame.logprobs
        if writer is None:
            return b"null"
        self._offsets[choice.index] = offset + writer.width(tokens)
        return _encode(writer.completion(tokens, records, offset))

    def _told(self, choice: Choice) -> int:
        """Characters of the choice that the stream which this one carries on has told."""
        writer = self._frame.logprobs
        prompt = choice.prompt.token_ids if choice.prompt.echo is not None else []
        output = choice.request.output[-self._frame.told[choice.index] :]
        return 0 if writer is None else writer.width(prompt + output)

    def _must_wait(self, choice: Choice) -> bool:
        """Whether the prompt's log-probabilities, which go first, are not all there yet."""
        prompt = choice.prompt
        if prompt.echo is None or self._frame.logprobs is None or choice.finish is not None:
            return False
        return len(prompt.logprobs) < len(prompt.token_ids) - 1
