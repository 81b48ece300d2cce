"""Writers that encode choices as server-sent events. Constant parts of the chunks are encoded once."""

from __future__ import annotations

from typing import Protocol

import msgspec

from argosy.engine.scheduling import Logprob
from argosy.engine.serving.api_server.chat_output import has_visible_output, render_deltas
from argosy.engine.serving.preprocessing.response_spec import ResponseSpec
from argosy.engine.serving.text.choice import Choice
from argosy.engine.serving.text.parsed_choice import ParsedChoice
from argosy.protocol import ChatLogprobs, format_event

_encode = msgspec.json.Encoder().encode


class EventWriter(Protocol):
    """Encoder of one stream's events."""

    def encode_output(self, choice: Choice) -> bytes:
        """Encode the new output of `choice`. Returns empty bytes if nothing can be sent yet."""
        ...

    def encode_usage(self) -> bytes:
        """Encode the usage event that precedes the end. Returns empty bytes if usage is not wanted."""
        ...


class _ChunkEnvelope:
    """Constant parts of every chunk around its choice: response identity before, usage after."""

    def __init__(self, spec: ResponseSpec, kind: str) -> None:
        identity = {
            "id": spec.id,
            "object": kind,
            "created": spec.created_at,
            "model": spec.model,
        }
        self.prefix = b"data: " + _encode(identity)[:-1] + b',"choices":[{"index":'
        self._spec = spec
        self._suffix = b',"usage":null}\n\n' if spec.include_usage else b"}\n\n"
        self._identity_prefix = _encode(identity)[:-1]

    def suffix(self) -> bytes:
        """Return the end of a chunk, after its choices."""
        if self._spec.continuous_usage:
            return b',"usage":' + _encode(self._spec.usage()) + b"}\n\n"
        return self._suffix

    def usage_event(self) -> bytes:
        """Return the chunk that contains only the usage."""
        if not self._spec.include_usage:
            return b""
        return format_event(
            self._identity_prefix + b',"choices":[],"usage":' + _encode(self._spec.usage()) + b"}"
        )


class ChatEventWriter:
    """Writer of `chat.completion.chunk` events.

    Each choice starts with its role, continues with reasoning, text and tool calls, and ends with an empty delta that
    has the finish reason.
    """

    def __init__(self, spec: ResponseSpec) -> None:
        self._spec = spec
        self._envelope = _ChunkEnvelope(spec, "chat.completion.chunk")
        self._started_choices = {choice.index for choice in spec.choices if spec.is_resumed(choice)}

    def encode_output(self, choice: Choice) -> bytes:
        events = []
        deltas = self._deltas(choice)
        if choice.index not in self._started_choices:
            self._started_choices.add(choice.index)
            events.append(self._role_chunk(choice, deltas))
        if deltas or (
            choice.new_tokens and (self._spec.include_token_ids or self._spec.logprob_formatter)
        ):
            logprobs = (
                self._spec.logprob_formatter.format_chat(choice.new_logprobs)
                if self._spec.logprob_formatter
                else None
            )
            ids = (
                b',"token_ids":' + _encode(choice.new_tokens)
                if self._spec.include_token_ids
                else b""
            )
            no_output = b"{}" if isinstance(choice, ParsedChoice) else b'{"content":""}'
            first, *others = deltas or [no_output]
            events.append(self._chunk(choice, first, logprobs, ids + b"}]"))
            events += [self._chunk(choice, delta, None, b"}]") for delta in others]
        if choice.finish_reason is not None:
            events.append(self._final_chunk(choice))
        choice.clear_output()
        return b"".join(events)

    def encode_usage(self) -> bytes:
        return self._envelope.usage_event()

    def _deltas(self, choice: Choice) -> list[bytes]:
        """Encode the `delta` objects of the new output. The tokens belong to all of them together."""
        if isinstance(choice, ParsedChoice):
            deltas = render_deltas(choice, choice.new_events, self._spec.id)
            if choice.finish_reason is not None and not has_visible_output(choice):
                deltas.append({"content": ""})
            return list(map(_encode, deltas))
        text = choice.new_text
        return [b'{"content":' + _encode(text) + b"}"] if text else []

    def _role_chunk(self, choice: Choice, deltas: list[bytes]) -> bytes:
        """Encode the first chunk. The content is null until there is some, as in a whole message of tool calls."""
        is_text = not isinstance(choice, ParsedChoice) or (
            bool(deltas) and deltas[0].startswith(b'{"content":')
        )
        delta = b'{"role":"assistant","content":%s}' % (b'""' if is_text else b"null")
        ending = b"}]"
        if self._spec.include_token_ids and len(self._started_choices) == 1:
            ending += b',"prompt_token_ids":' + _encode(choice.prompt.token_ids)
        return self._chunk(choice, delta, None, ending)

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
        warnings = self._spec.warnings(choice)
        return b"".join(
            (
                envelope.prefix,
                b"%d" % choice.index,
                b',"delta":{},"logprobs":null,',
                _encode(ending)[1:],
                b"]",
                b',"warnings":' + _encode(warnings) if warnings else b"",
                envelope.suffix(),
            )
        )


class CompletionEventWriter:
    """Writer of `text_completion` events.

    Each choice starts with the echoed prompt if `echo` is set. Its last text has the finish reason.
    """

    def __init__(self, spec: ResponseSpec) -> None:
        self._spec = spec
        self._envelope = _ChunkEnvelope(spec, "text_completion")
        self._text_offsets = {
            c.index: self._delivered_chars(c) for c in spec.choices if spec.is_resumed(c)
        }
        """Offset of the next token's text in characters, for each choice that has begun."""

    def encode_output(self, choice: Choice) -> bytes:
        is_first = choice.index not in self._text_offsets
        if is_first and self._awaits_prompt_logprobs(choice):
            return b""
        new_tokens, token_logprobs = choice.new_tokens, choice.new_logprobs
        text, tokens = choice.new_text, new_tokens
        choice.clear_output()
        if is_first and choice.prompt.is_echoed:
            text = choice.prompt.text + text
            tokens = choice.prompt.token_ids + tokens
            token_logprobs = choice.prompt.logprobs + token_logprobs
        has_token_fields = self._spec.include_token_ids or self._spec.logprob_formatter is not None
        if not (text or choice.finish_reason is not None or (tokens and has_token_fields)):
            return b""
        ids = b""
        if self._spec.include_token_ids:
            ids = b',"token_ids":' + _encode(new_tokens)
            if is_first:
                ids += b',"prompt_token_ids":' + _encode(choice.prompt.token_ids)
        logprobs = self._encode_logprobs(choice, tokens, token_logprobs)
        ending = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
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
        return self._envelope.usage_event()

    def _encode_logprobs(
        self, choice: Choice, tokens: list[int], token_logprobs: list[Logprob]
    ) -> bytes:
        offset = self._text_offsets.setdefault(choice.index, 0)
        formatter = self._spec.logprob_formatter
        if formatter is None:
            return b"null"
        self._text_offsets[choice.index] = offset + formatter.text_width(tokens)
        return _encode(formatter.format_completion(tokens, token_logprobs, offset))

    def _delivered_chars(self, choice: Choice) -> int:
        """Return the number of characters that the resumed stream delivered of the choice."""
        formatter = self._spec.logprob_formatter
        echoed = choice.prompt.token_ids if choice.prompt.is_echoed else []
        delivered = choice.request.resumed_tokens[-self._spec.delivered_tokens[choice.index] :]
        return 0 if formatter is None else formatter.text_width(echoed + delivered)

    def _awaits_prompt_logprobs(self, choice: Choice) -> bool:
        """Return whether prompt log-probabilities, which must be sent first, are still incomplete."""
        prompt = choice.prompt
        if (
            not prompt.is_echoed
            or self._spec.logprob_formatter is None
            or choice.finish_reason is not None
        ):
            return False
        return len(prompt.logprobs) < len(prompt.token_ids) - 1
