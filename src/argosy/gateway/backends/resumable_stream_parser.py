"""Reads the stream of a server that keeps no journal, so that another server can go on where it stops.

Each event is taken in before it is passed on: what text it told, and with which token ids if the server gives
them. What was asked for only for that is taken out again, so the client gets what it would have got from the server.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import msgspec

from argosy.gateway.backends.backend_adapter import CHAT_PATH
from argosy.gateway.backends.emitted_choice import EmittedChoice, encode_event
from argosy.gateway.backends.native_stream_parser import DeliveredOutput
from argosy.gateway.backends.passthrough import ReportedUsage, TokenCount, estimate_tokens
from argosy.gateway.backends.stream_events import (
    DONE_DATA,
    EVENT_END,
    MALFORMED_EVENT_ERRORS,
    describe_error_chunk,
    error_chunk_status,
    event_data,
    is_error_chunk,
    split_events,
)
from argosy.gateway.backends.stream_parser import StreamParser
from argosy.protocol import SSE_DONE, LineBuffer

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_PLAIN_DELTA_FIELDS = frozenset({"role", "content"})


@dataclass(frozen=True, slots=True)
class StreamParserOptions:
    """What the client sees of what was asked for, and how the server tells it."""

    include_usage: bool
    """The usage at the end: the client asked for it."""
    include_continuous_usage: bool
    """The usage that events carry: the client asked for it, or nobody did."""
    include_token_ids: bool
    """Token ids: the client asked for them."""
    incomplete_finish_reasons: frozenset[str]
    """Finish reasons of answers that are none."""
    include_timings: bool
    """Timings with each event: the same."""
    from_completion: bool
    """It comes as a completion although the answer is a chat."""
    trailing_whitespace: str
    """White space at the end of what was told, which may be told again."""
    min_output_tokens: int
    """Tokens before which no stop string counts."""
    repeated_text: str
    """All that was told, where it may come again, with what stood before it: see `Told.ends_whole`."""


class ResumableStreamParser(StreamParser):
    """One attempt's stream."""

    def __init__(
        self, emitted: EmittedChoice, delivered: DeliveredOutput, options: StreamParserOptions
    ) -> None:
        self._emitted = emitted
        self._delivered = delivered
        self._options = options
        self._trailing_whitespace = options.trailing_whitespace
        self._repeated_text = options.repeated_text
        self._is_resuming = emitted.first_chunk is not None
        self._tokens_before = emitted.output_tokens
        self._common_fields = emitted.common_fields()
        self._buffer = LineBuffer()

    def feed(self, body: bytes) -> bytes:
        """See `StreamReader`."""
        if self.is_done or self.failure:
            return b""
        whole = split_events(self._buffer, body)
        passed = b"".join(self._process_event(event) for event in whole.split(EVENT_END)[:-1])
        told, delivered = self._emitted, self._delivered
        delivered.output_tokens = told.output_tokens
        delivered.prompt_tokens = told.prompt_tokens or delivered.prompt_tokens
        delivered.cached_tokens = min(told.cached_tokens, delivered.prompt_tokens)
        return passed

    def flush(self) -> bytes:
        """See `StreamReader`."""
        told = self._emitted
        if not self.stopped_early or told.is_usage_delivered or not self._options.include_usage:
            return SSE_DONE
        told.prompt_tokens = self._delivered.prompt_tokens  # about so many, where no server told
        return told.build_usage_event() + SSE_DONE

    def _process_event(self, event: bytes) -> bytes:
        if self.is_done or self.failure:
            return b""
        data = event_data(event)
        if data is None:
            return event + EVENT_END
        if data == DONE_DATA:
            self.is_done = True
            return b""
        try:
            chunk = _decode(data)
            if is_error_chunk(chunk):
                self.failure, self.failure_status = (
                    describe_error_chunk(chunk),
                    error_chunk_status(chunk),
                )
                return b""
            changed = self._process_chunk(chunk)
        except MALFORMED_EVENT_ERRORS as error:
            self.failure = f"an event of its stream cannot be read ({error})"
            return b""
        if changed is None:
            return b""
        return encode_event(chunk) if changed or self._is_resuming else event + EVENT_END

    def _process_chunk(self, chunk: dict[str, Any]) -> bool | None:
        """Note what a chunk tells, and make it what the client gets: was it changed? None: it gets nothing."""
        told, usage = self._emitted, msgspec.convert(chunk.get("usage"), ReportedUsage | None)
        choices = chunk.get("choices")
        if not choices:
            if usage is None:
                return False
            self._record_usage(chunk, usage)
            told.is_usage_delivered = True
            chunk.update(self._common_fields)
            return False if self._options.include_usage else None
        choice = choices[0]
        if choice.get("finish_reason") in self._options.incomplete_finish_reasons:
            self.failure = "it broke the answer off"
            return None
        if self._options.from_completion:
            choice["delta"] = {"content": choice.pop("text")}
            choice.pop("prompt_token_ids", None)
        said, brought = self._choice_text(choice), len(choice.get("token_ids") or ())
        made = self._process_timings(chunk, choice)
        counted = made or (usage is not None and usage.completion_tokens is not None)
        changed = (
            self._process_token_ids(chunk, choice, is_counted=counted)
            or made
            or bool(told.stop_filter)
        )
        if usage is not None:
            self._record_usage(chunk, usage)
            if not self._options.include_continuous_usage:
                chunk["usage"] = None
                changed = True
        if said:
            told.record_text(brought)
        text, more = self._process_text(choice)
        finishes = bool(choice.get("finish_reason"))  # some send "" until then
        shown = (
            text
            or more
            or finishes
            or (self._options.include_token_ids and choice.get("token_ids"))
        )
        if self._is_resuming and not shown:
            return None  # the role, or an empty beginning: it was told before
        if finishes:
            told.is_finished = True
            told.is_usage_delivered = chunk.get("usage") is not None
            self._delivered.finish_reasons[0] = str(choice["finish_reason"])
        if told.first_chunk is None:
            told.first_chunk = chunk
        chunk.update(self._common_fields)
        return changed

    def _choice_text(self, choice: dict[str, Any]) -> str | None:
        """The text of a choice. Raises TypeError when it is none: before it counts as something that was told."""
        text = (
            choice["delta"].get("content")
            if self._emitted.path == CHAT_PATH
            else choice.get("text")
        )
        if not isinstance(text, str | None):
            raise TypeError("its text is none")
        return text

    def _process_text(self, choice: dict[str, Any]) -> tuple[str, bool]:
        """Note the text of a choice. What is new of it, and whether there is more than text."""
        told, holder, name, more = self._emitted, choice, "text", False
        if told.path == CHAT_PATH:
            holder, name = choice["delta"], "content"
            more = any(holder[said] for said in holder.keys() - _PLAIN_DELTA_FIELDS)
        came = holder.get(name) or ""
        text = self._apply_stop_filter(self._strip_repeated(came), choice)
        if text != came:
            holder[name] = text
        if text:
            told.text_pieces.append(text)
        told.is_text_only = told.is_text_only and not more
        return text, more

    def _apply_stop_filter(self, text: str, choice: dict[str, Any]) -> str:
        """What the client gets of the text where the gateway keeps the stop strings."""
        gate = self._emitted.stop_filter
        if gate is None:
            return text
        if self._is_resuming and self._tokens_before >= self._options.min_output_tokens:
            ended = gate.match_across_resume(text)
            if ended is not None:
                self.is_done = self.stopped_early = True
                text, choice["stop_reason"] = ended
                choice["finish_reason"] = "stop"
                return text
        if choice.get("finish_reason"):
            return gate.finish(text, choice.get("stop_reason"))
        return gate.feed(text)

    def _strip_repeated(self, text: str) -> str:
        """The text without what it tells again."""
        if text and self._repeated_text:
            _, _, text = text.rpartition(self._repeated_text)
            self._repeated_text = ""
        while self._trailing_whitespace and text:
            if text[0] != self._trailing_whitespace[0]:
                self._trailing_whitespace = ""
                break
            text, self._trailing_whitespace = text[1:], self._trailing_whitespace[1:]
        return text

    def _process_token_ids(
        self, chunk: dict[str, Any], choice: dict[str, Any], *, is_counted: bool
    ) -> bool:
        """Note the token ids that came, and take them out unless the client asked for them."""
        told = self._emitted
        prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt and told.prompt_token_ids is None:
            told.prompt_token_ids = self._delivered.prompt_token_ids = array("I", prompt)
            told.prompt_tokens = len(prompt)
        ids = choice.get("token_ids")
        if ids is not None:
            told.token_ids += ids
            told.output_tokens += len(ids)
            choice["token_ids"] = (
                told.take_undelivered_ids(len(ids)) if self._options.include_token_ids else None
            )
        elif self._has_content(choice):
            told.has_token_ids = False
            said = choice["delta"].values() if told.path == CHAT_PATH else (choice["text"],)
            told.output_tokens += 0 if is_counted else estimate_tokens(*said)
        if (self._options.include_token_ids and not self._is_resuming) or (
            ids is None and not prompt
        ):
            return False
        for holder in (chunk, choice):  # the prompt's were told before, or nobody asked
            if "prompt_token_ids" in holder:
                holder["prompt_token_ids"] = None
        return True

    def _process_timings(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Whether it tells how many tokens were made. At its end a server tells that unasked."""
        timings = chunk.get("timings")
        if not isinstance(timings, dict) or "predicted_n" not in timings:
            return False
        if not (self._options.include_timings or choice.get("finish_reason")):
            del chunk["timings"]
        self._emitted.output_tokens = self._tokens_before + msgspec.convert(
            timings["predicted_n"], TokenCount
        )
        return True

    def _has_content(self, choice: dict[str, Any]) -> bool:
        """Whether it tells more than whose turn it is."""
        if self._emitted.path == CHAT_PATH:
            return any(said for name, said in choice["delta"].items() if name != "role")
        return bool(choice["text"])

    def _record_usage(self, chunk: dict[str, Any], usage: ReportedUsage) -> None:
        """Believe the server's count; after another server, for its own part."""
        told, prompt = self._emitted, usage.prompt_tokens or 0
        if usage.completion_tokens is not None:
            told.output_tokens = self._tokens_before + usage.completion_tokens
        if not self._tokens_before:
            told.prompt_tokens = prompt or told.prompt_tokens
            told.cached_tokens = usage.cached_tokens
            return
        told.prompt_tokens = told.prompt_tokens or max(0, prompt - self._tokens_before)
        chunk["usage"] |= told.build_usage()
        if chunk["usage"].get("prompt_tokens_details") is not None:  # of a longer prompt
            chunk["usage"]["prompt_tokens_details"] = {"cached_tokens": told.cached_tokens}
