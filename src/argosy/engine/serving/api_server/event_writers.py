"""Writers of the events of a stream: chunks with the output of its choices, and comments for a gateway."""

from __future__ import annotations

from binascii import b2a_base64
from collections import Counter
from typing import Protocol

import msgspec

from argosy.engine.scheduling import Logprob
from argosy.engine.serving.api_server.responses import has_visible_output, render_deltas
from argosy.engine.serving.preprocessing.response_spec import ResponseSpec
from argosy.engine.serving.text.choice import Choice, ParsedChoice
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    MAX_REPORTED_CHARS,
    ChatLogprobs,
    RequestReport,
    format_comment,
    format_event,
)

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
    """Constant parts of every chunk around its choice, encoded once: response identity before, usage after."""

    def __init__(self, spec: ResponseSpec, kind: str) -> None:
        identity = {
            "id": spec.id,
            "object": kind,
            "created": spec.created_at,
            "model": spec.model,
            **spec.described,
        }
        self.prefix = b"data: " + _encode(identity)[:-1] + b',"choices":[{"index":'
        self._spec = spec
        self._suffix = b',"usage":null}\n\n' if spec.include_usage else b"}\n\n"
        self._identity_prefix = _encode(identity)[:-1]

    def suffix(self, unsent_tokens: int = 0) -> bytes:
        """Return the end of a chunk, after its choices, with output tokens that later chunks contain."""
        if self._spec.continuous_usage:
            return b',"usage":' + _encode(self._spec.usage(unsent_tokens)) + b"}\n\n"
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
        return self._chunk(choice, delta, None, ending, len(choice.new_tokens))

    def _chunk(
        self,
        choice: Choice,
        delta: bytes,
        logprobs: ChatLogprobs | None,
        ending: bytes,
        unsent_tokens: int = 0,
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
                envelope.suffix(unsent_tokens),
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


class ResumeMetadataWriter:
    """An `EventWriter` that adds resume metadata, token ids in comments, to the events of another writer.

    A gateway enables it with the header `x-argosy-resume-metadata`, and can then resume the stream on another replica.
    After the events of each output follows one comment:

        : argosy <choice> <ids, comma-separated>[ <finish reason>[ <early stop reason>]]

    Another comment precedes the first output. With several prompts it is repeated when more cached tokens are known:

        : argosy prompt <tokens> <cached tokens>[ <names of its KV blocks, in base64>]

    Events count only together with the comment that follows them. An interrupted stream is resumed after its last
    complete comment. The ids go into the body's `resume`, the cached tokens into the header `x-argosy-cached-tokens`.
    Nothing is then missing or sent twice.

    The header `x-argosy-resume-given` contains, comma-separated, how many ids of each choice the client itself
    supplied. No stream has delivered those. The header `x-argosy-arithmetic-id` identifies the arithmetic. A request
    that sends it back gets 409 from a replica of another model.
    """

    def __init__(self, spec: ResponseSpec, writer: EventWriter) -> None:
        self._spec = spec
        self._writer = writer
        self._reported_cached_tokens: int | None = None
        """Number of cached tokens in the last prompt comment."""

    def encode_output(self, choice: Choice) -> bytes:
        tokens = choice.new_tokens
        events = self._writer.encode_output(choice)
        if choice.new_tokens:
            return events  # the writer holds the output back
        comment = b"argosy %d %s" % (choice.index, ",".join(map(str, tokens)).encode())
        if choice.finish_reason is not None:
            comment += b" " + choice.finish_reason.encode()
            if choice.early_stop is not None:
                comment += b" " + choice.early_stop.encode()
        return self._encode_prompt_metadata() + events + format_comment(comment)

    def encode_usage(self) -> bytes:
        return self._writer.encode_usage()

    def _encode_prompt_metadata(self) -> bytes:
        cached_tokens = self._spec.cached_tokens
        if cached_tokens == self._reported_cached_tokens:
            return b""
        self._reported_cached_tokens = cached_tokens
        prompts = self._spec.prompts
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        comment = b"argosy prompt %d %d" % (tokens, cached_tokens)
        if len(prompts) == 1 and prompts[0].block_names:
            comment += b" " + b2a_base64(prompts[0].block_names, newline=False)
        return format_comment(comment)


class ReportWriter:
    """An `EventWriter` that adds a `protocol.RequestReport`, as a comment, once all choices of another writer ended."""

    def __init__(
        self,
        spec: ResponseSpec,
        writer: EventWriter,
        tokenizer: Tokenizer,
        *,
        includes_content: bool,
        no_drafts_reason: str = "",
    ) -> None:
        """Create the writer.

        Args:
            spec: The response.
            writer: Writes its events.
            tokenizer: Decodes what the report has of prompts and outputs.
            includes_content: Whether it has rendered prompts and raw outputs.
            no_drafts_reason: Why no output of the replica is drafted; empty if they may be.
        """
        self._spec = spec
        self._no_drafts_reason = no_drafts_reason
        if not spec.choices[0].request.speculation:
            self._no_drafts_reason = (
                "the request, or a flag of its project or key, switches drafts off"
            )
        self._writer = writer
        self._tokenizer = tokenizer
        self._is_reported = False
        self._outputs: list[list[int]] | None = (
            [list(choice.request.resumed_tokens) for choice in spec.choices]
            if includes_content
            else None
        )

    def encode_output(self, choice: Choice) -> bytes:
        tokens = choice.new_tokens
        events = self._writer.encode_output(choice)
        if self._outputs is not None and not choice.new_tokens:  # else the writer holds it back
            self._outputs[choice.index] += tokens
        if self._is_reported or any(other.finish_reason is None for other in self._spec.choices):
            return events
        self._is_reported = True
        return events + format_comment(b"argosy report " + _encode(self._build_report()))

    def encode_usage(self) -> bytes:
        return self._writer.encode_usage()

    def _build_report(self) -> RequestReport:
        spec, compile_s = self._spec, self._spec.plan.compile_s
        parsed = [choice for choice in spec.choices if isinstance(choice, ParsedChoice)]
        events: Counter[str] = Counter()
        for choice in parsed:
            events.update(choice.event_counts)
        has_grammar = bool(spec.choices[0].request.params.grammar)
        output_tokens = sum(choice.output_tokens for choice in spec.choices)
        generated_tokens = sum(choice.generated_tokens for choice in spec.choices)
        accepted_drafts = sum(choice.accepted_drafts for choice in spec.choices)
        return RequestReport(
            queue_ms=1000 * max(choice.queue_s for choice in spec.choices),
            steps=generated_tokens - accepted_drafts,
            accepted_drafts=accepted_drafts,
            no_drafts_reason=self._no_drafts_reason,
            draft_saved_s=sum(choice.draft_saved_s for choice in spec.choices),
            grammar_compile_ms=None if compile_s is None else 1000 * compile_s,
            masked_steps=output_tokens - (spec.reasoning_tokens or 0) if has_grammar else 0,
            reasoning_tokens=spec.reasoning_tokens,
            prediction=spec.prediction_usage,
            tool_calls=sum(choice.ended_calls for choice in parsed),
            malformed_calls=sum(choice.started_calls - choice.ended_calls for choice in parsed),
            parser_events=dict(events),
            warnings=[w.code for choice in spec.choices for w in spec.warnings(choice)],
            prompts=self._prompts(),
            outputs=[self._decode(tokens) for tokens in self._outputs or ()],
        )

    def _prompts(self) -> list[str]:
        if self._outputs is None:
            return []
        return [self._decode(prompt.token_ids) for prompt in self._spec.prompts]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)[:MAX_REPORTED_CHARS]
