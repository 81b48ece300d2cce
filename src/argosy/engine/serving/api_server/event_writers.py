"""Streamed answers: each piece of a choice as server-sent events, the constant parts encoded once."""

from __future__ import annotations

from typing import Protocol

import msgspec

from argosy.engine.serving.api_server.response_spec import ResponseSpec
from argosy.engine.serving.core_messages import TokenLogprob
from argosy.engine.serving.text.choice import Choice
from argosy.protocol import ChatLogprobs, format_event

_encode = msgspec.json.Encoder().encode


class EventWriter(Protocol):
    """Writes the events of one stream."""

    def encode_output(self, choice: Choice) -> bytes:
        """The events for what is new of `choice`; empty when nothing can be told yet."""
        ...

    def encode_usage(self) -> bytes:
        """The event before the end that carries the usage; empty when it was not asked for."""
        ...


class _ChunkEnvelope:
    """What surrounds the choice in every chunk: the answer's identity before, the usage after."""

    def __init__(self, frame: ResponseSpec, kind: str) -> None:
        identity = {
            "id": frame.id,
            "object": kind,
            "created": frame.created_at,
            "model": frame.model,
        }
        self.prefix = b"data: " + _encode(identity)[:-1] + b',"choices":[{"index":'
        self._spec = frame
        self._suffix = b',"usage":null}\n\n' if frame.include_usage else b"}\n\n"
        self._identity_prefix = _encode(identity)[:-1]

    def suffix(self) -> bytes:
        """The end of a chunk, after its choices."""
        if self._spec.continuous_usage:
            return b',"usage":' + _encode(self._spec.usage()) + b"}\n\n"
        return self._suffix

    def usage_event(self) -> bytes:
        """The chunk that carries only the usage."""
        if not self._spec.include_usage:
            return b""
        return format_event(
            self._identity_prefix + b',"choices":[],"usage":' + _encode(self._spec.usage()) + b"}"
        )


class ChatEventWriter:
    """`chat.completion.chunk`s: the role first, then the text, then an empty delta that says why it ended."""

    def __init__(self, frame: ResponseSpec) -> None:
        self._spec = frame
        self._envelope = _ChunkEnvelope(frame, "chat.completion.chunk")
        self._started_choices = {
            choice.index for choice in frame.choices if frame.is_resumed(choice)
        }

    def encode_output(self, choice: Choice) -> bytes:
        """See `EventWriter`."""
        piece = choice.drain()
        out = []
        if choice.index not in self._started_choices:
            self._started_choices.add(choice.index)
            out.append(self._role_chunk(choice))
        if piece.text or (
            piece.tokens and (self._spec.include_token_ids or self._spec.logprob_formatter)
        ):
            logprobs = (
                self._spec.logprob_formatter.format_chat(piece.logprobs)
                if self._spec.logprob_formatter
                else None
            )
            delta = b'{"content":' + _encode(piece.text) + b"}"
            ids = b',"token_ids":' + _encode(piece.tokens) if self._spec.include_token_ids else b""
            out.append(self._chunk(choice, delta, logprobs, ids + b"}]"))
        if piece.finish_reason is not None:
            out.append(self._final_chunk(choice))
        return b"".join(out)

    def encode_usage(self) -> bytes:
        """See `EventWriter`."""
        return self._envelope.usage_event()

    def _role_chunk(self, choice: Choice) -> bytes:
        ending = b"}]"
        if self._spec.include_token_ids and len(self._started_choices) == 1:
            ending += b',"prompt_token_ids":' + _encode(choice.prompt.token_ids)
        return self._chunk(choice, b'{"role":"assistant","content":""}', None, ending)

    def _chunk(
        self, choice: Choice, delta: bytes, logprobs: ChatLogprobs | None, ending: bytes
    ) -> bytes:
        envelope = self._envelope
        return b"".join(
            (
                envelope.prefix,
                b"%d" % choice.index,
                b',"delta":',
                delta,
                b',"logprobs":',
                b"null" if logprobs is None else _encode(logprobs),
                b',"finish_reason":null',
                ending,
                envelope.suffix(),
            )
        )

    def _final_chunk(self, choice: Choice) -> bytes:
        envelope = self._envelope
        ending = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return b"".join(
            (
                envelope.prefix,
                b"%d" % choice.index,
                b',"delta":{},"logprobs":null,',
                _encode(ending)[1:],
                b"]",
                envelope.suffix(),
            )
        )


class CompletionEventWriter:
    """`text_completion` chunks: the echoed prompt first if asked for; the last text carries the reason."""

    def __init__(self, frame: ResponseSpec) -> None:
        self._spec = frame
        self._envelope = _ChunkEnvelope(frame, "text_completion")
        self._text_offsets = {
            c.index: self._delivered_chars(c) for c in frame.choices if frame.is_resumed(c)
        }
        """Where the next token's text starts, for each choice that has begun."""

    def encode_output(self, choice: Choice) -> bytes:
        """See `EventWriter`."""
        first = choice.index not in self._text_offsets
        if first and self._awaits_prompt_logprobs(choice):
            return b""
        piece = choice.drain()
        text, tokens, records = piece.text, piece.tokens, piece.logprobs
        if first and choice.prompt.echo_text is not None:
            text = choice.prompt.echo_text + text
            tokens = choice.prompt.token_ids + tokens
            records = choice.prompt.logprobs + records
        told = self._spec.include_token_ids or self._spec.logprob_formatter is not None
        if not (text or piece.finish_reason is not None or (tokens and told)):
            return b""
        ids = b""
        if self._spec.include_token_ids:
            ids = b',"token_ids":' + _encode(piece.tokens)
            if first:
                ids += b',"prompt_token_ids":' + _encode(choice.prompt.token_ids)
        logprobs = self._encode_logprobs(choice, tokens, records)
        ending = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        return b"".join(
            (
                self._envelope.prefix,
                b"%d" % choice.index,
                b',"text":',
                _encode(text),
                b',"logprobs":',
                logprobs,
                b",",
                _encode(ending)[1:-1],
                ids,
                b"}]",
                self._envelope.suffix(),
            )
        )

    def encode_usage(self) -> bytes:
        """See `EventWriter`."""
        return self._envelope.usage_event()

    def _encode_logprobs(
        self, choice: Choice, tokens: list[int], records: list[TokenLogprob]
    ) -> bytes:
        offset = self._text_offsets.setdefault(choice.index, 0)
        writer = self._spec.logprob_formatter
        if writer is None:
            return b"null"
        self._text_offsets[choice.index] = offset + writer.text_width(tokens)
        return _encode(writer.format_completion(tokens, records, offset))

    def _delivered_chars(self, choice: Choice) -> int:
        """Characters of the choice that the stream which this one carries on has told."""
        writer = self._spec.logprob_formatter
        prompt = choice.prompt.token_ids if choice.prompt.echo_text is not None else []
        output = choice.request.resumed_tokens[-self._spec.delivered_tokens[choice.index] :]
        return 0 if writer is None else writer.text_width(prompt + output)

    def _awaits_prompt_logprobs(self, choice: Choice) -> bool:
        """Whether the prompt's log-probabilities, which go first, are not all there yet."""
        prompt = choice.prompt
        if (
            prompt.echo_text is None
            or self._spec.logprob_formatter is None
            or choice.finish_reason is not None
        ):
            return False
        return len(prompt.logprobs) < len(prompt.token_ids) - 1
