"""Parser for the stream of a server without resume metadata, so that another server can resume it.

The parser records the text of each event, and its token ids if the server sends them, before it forwards the event.
Fields that the gateway requested only for this purpose are removed. The client receives what the server would have
sent for the original request.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from argosy.gateway.backends.backend_adapter import CHAT_PATH, INCOMPLETE_FINISH_REASONS
from argosy.gateway.backends.emitted_choice import EmittedChoice, encode_event
from argosy.gateway.backends.request_builder import (
    is_set,
    is_token_ids_requested,
    min_output_tokens,
    stream_options,
)
from argosy.gateway.backends.stream_events import (
    DONE_DATA,
    MALFORMED_EVENT_ERRORS,
    describe_error_chunk,
    error_chunk_status,
    is_error_chunk,
    split_events,
)
from argosy.gateway.backends.stream_parser import DeliveredOutput, StreamParser
from argosy.gateway.backends.usage import ReportedUsage, TokenCount, estimate_tokens
from argosy.gateway.request_fields import RequestFields
from argosy.protocol import EVENT_END, SSE_DONE, EventSplitter, event_data

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_PLAIN_DELTA_FIELDS = frozenset({"role", "content"})


class ResumableStreamParser(StreamParser):
    """Stream parser for one attempt whose response another server can resume."""

    def __init__(
        self,
        emitted: EmittedChoice,
        delivered: DeliveredOutput,
        fields: RequestFields,
        *,
        is_usage_added: bool,
        from_completion: bool,
        trailing_whitespace: str,
        repeated_text: str,
    ) -> None:
        """Create a parser.

        Args:
            emitted: What the client received.
            delivered: Counts of it.
            fields: The client's request.
            is_usage_added: Whether the server sends usage with each event because the gateway requested it.
            from_completion: Whether the server sends a completion, which the client receives as a chat completion.
            trailing_whitespace: White space at the end of the delivered text, which the server may repeat.
            repeated_text: Delivered text that the server may repeat, after text of the prompt (see
                `EmittedChoice.ends_on_token`).
        """
        self._emitted = emitted
        self._delivered = delivered
        options = stream_options(fields)
        self._include_usage = bool(options.get("include_usage"))
        self._include_continuous_usage = (
            bool(options.get("continuous_usage_stats")) or not is_usage_added
        )
        self._include_token_ids = is_token_ids_requested(fields)
        self._include_timings = is_set(fields, "timings_per_token")
        self._min_output_tokens = min_output_tokens(fields)
        self._from_completion = from_completion
        self._trailing_whitespace = trailing_whitespace
        self._repeated_text = repeated_text
        self._is_resuming = emitted.first_chunk is not None
        self._tokens_before = emitted.output_tokens
        self._common_fields = emitted.common_fields()
        self._splitter = EventSplitter()

    def feed(self, body: bytes) -> bytes:
        """Record the events that `body` completes and return what the client receives of them."""
        if self.is_done or self.failure:
            return b""
        forwarded = b"".join(map(self._process_event, split_events(self._splitter, body)))
        emitted, delivered = self._emitted, self._delivered
        delivered.output_tokens = emitted.output_tokens
        delivered.prompt_tokens = emitted.prompt_tokens or delivered.prompt_tokens
        delivered.cached_tokens = min(emitted.cached_tokens, delivered.prompt_tokens)
        return forwarded

    def flush(self) -> bytes:
        """Return the `[DONE]` event, after the usage event if the response stopped before the server sent it."""
        emitted = self._emitted
        if not self.stopped_early or emitted.is_usage_delivered or not self._include_usage:
            return SSE_DONE
        emitted.prompt_tokens = (
            self._delivered.prompt_tokens
        )  # an estimate if no server reported it
        return emitted.build_usage_event() + SSE_DONE

    def _process_event(self, event: bytes) -> bytes:
        """Record an event and return what the client receives of it."""
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
            is_changed = self._process_chunk(chunk)
        except MALFORMED_EVENT_ERRORS as error:
            self.failure = f"an event of the replica's stream cannot be read ({error})"
            return b""
        if is_changed is None:
            return b""
        return encode_event(chunk) if is_changed or self._is_resuming else event + EVENT_END

    def _process_chunk(self, chunk: dict[str, Any]) -> bool | None:
        """Record a chunk and turn it into what the client receives.

        Returns:
            Whether the chunk was changed; None if the client does not receive it.
        """
        emitted, usage = self._emitted, msgspec.convert(chunk.get("usage"), ReportedUsage | None)
        choices = chunk.get("choices")
        if not choices:
            if usage is None:
                return False
            self._record_usage(chunk, usage)
            emitted.is_usage_delivered = True
            chunk.update(self._common_fields)
            return False if self._include_usage else None
        choice = choices[0]
        if choice.get("finish_reason") in INCOMPLETE_FINISH_REASONS:
            self.failure = "the replica ended the response early"
            return None
        if self._from_completion:
            choice["delta"] = {"content": choice.pop("text")}
            choice.pop("prompt_token_ids", None)
        server_text, id_count = self._choice_text(choice), len(choice.get("token_ids") or ())
        has_timings = self._process_timings(chunk, choice)
        is_counted = has_timings or (usage is not None and bool(usage.completion_tokens))
        is_changed = (
            self._process_token_ids(chunk, choice, is_counted=is_counted)
            or has_timings
            or bool(emitted.stop_filter)
        )
        if usage is not None:
            self._record_usage(chunk, usage)
            if not self._include_continuous_usage:
                chunk["usage"] = None
                is_changed = True
        if server_text:
            emitted.record_text(id_count)
        text, has_more = self._process_text(choice)
        finishes = bool(choice.get("finish_reason"))  # some servers send "" before the end
        is_visible = (
            text or has_more or finishes or (self._include_token_ids and choice.get("token_ids"))
        )
        if self._is_resuming and not is_visible:
            return None  # a role or an empty delta, which the client received before the resume
        if finishes:
            emitted.is_finished = True
            emitted.is_usage_delivered = chunk.get("usage") is not None
            self._delivered.record_finish(
                0, str(choice["finish_reason"]), choice.get("stop_reason")
            )
        if emitted.first_chunk is None:
            emitted.first_chunk = chunk
        chunk.update(self._common_fields)
        return is_changed

    def _choice_text(self, choice: dict[str, Any]) -> str | None:
        """Return the text of a choice. Check its type before anything of the choice counts as delivered.

        Raises:
            TypeError: The text is not a string.
        """
        text = (
            choice["delta"].get("content")
            if self._emitted.path == CHAT_PATH
            else choice.get("text")
        )
        if not isinstance(text, str | None):
            raise TypeError("its text is not a string")
        return text

    def _process_text(self, choice: dict[str, Any]) -> tuple[str, bool]:
        """Record the text of a choice and reduce it to what the client has not received.

        Returns:
            The new text, and whether the choice has content other than text.
        """
        emitted, holder, name, has_more = self._emitted, choice, "text", False
        if emitted.path == CHAT_PATH:
            holder, name = choice["delta"], "content"
            has_more = any(holder[other] for other in holder.keys() - _PLAIN_DELTA_FIELDS)
        server_text = holder.get(name) or ""
        text = self._apply_stop_filter(self._strip_repeated(server_text), choice)
        if text != server_text:
            holder[name] = text
        if text:
            emitted.text_pieces.append(text)
        emitted.is_text_only = emitted.is_text_only and not has_more
        return text, has_more

    def _apply_stop_filter(self, text: str, choice: dict[str, Any]) -> str:
        """Return the part of `text` that the client receives, if the gateway applies the stop strings."""
        stop_filter = self._emitted.stop_filter
        if stop_filter is None:
            return text
        if self._is_resuming and self._tokens_before >= self._min_output_tokens:
            match = stop_filter.match_across_resume(text)
            if match is not None:
                self.is_done = self.stopped_early = True
                text, choice["stop_reason"] = match
                choice["finish_reason"] = "stop"
                return text
        if choice.get("finish_reason"):
            return stop_filter.finish(text, choice.get("stop_reason"))
        return stop_filter.feed(text)

    def _strip_repeated(self, text: str) -> str:
        """Return the text without the part that repeats delivered text."""
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
        """Record the token ids of a chunk and remove them unless the client requested them.

        Args:
            chunk: Chunk to change.
            choice: Its choice.
            is_counted: Whether the server reports the number of output tokens in this chunk.

        Returns:
            Whether the chunk was changed.
        """
        emitted = self._emitted
        prompt_ids = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt_ids and emitted.prompt_token_ids is None:
            emitted.prompt_token_ids = self._delivered.prompt_token_ids = array("I", prompt_ids)
            emitted.prompt_tokens = len(prompt_ids)
        ids = choice.get("token_ids")
        if ids is not None:
            emitted.token_ids += ids
            emitted.output_tokens += len(ids)
            choice["token_ids"] = (
                emitted.take_undelivered_ids(len(ids)) if self._include_token_ids else None
            )
        elif self._has_content(choice):
            emitted.has_token_ids = False
            texts = choice["delta"].values() if emitted.path == CHAT_PATH else (choice["text"],)
            emitted.output_tokens += 0 if is_counted else estimate_tokens(*texts)
        if (self._include_token_ids and not self._is_resuming) or (ids is None and not prompt_ids):
            return False
        for holder in (chunk, choice):  # the client has the prompt's ids, or did not request them
            if "prompt_token_ids" in holder:
                holder["prompt_token_ids"] = None
        return True

    def _process_timings(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Record llama.cpp's token count and remove the timings unless the client expects them.

        llama.cpp sends timings with the last event even if they were not requested.

        Returns:
            Whether the chunk reports the number of output tokens.
        """
        timings = chunk.get("timings")
        if not isinstance(timings, dict) or "predicted_n" not in timings:
            return False
        if not (self._include_timings or choice.get("finish_reason")):
            del chunk["timings"]
        self._emitted.output_tokens = self._tokens_before + msgspec.convert(
            timings["predicted_n"], TokenCount
        )
        return True

    def _has_content(self, choice: dict[str, Any]) -> bool:
        """Whether a choice carries more than a role."""
        if self._emitted.path == CHAT_PATH:
            return any(value for name, value in choice["delta"].items() if name != "role")
        return bool(choice["text"])

    def _record_usage(self, chunk: dict[str, Any], usage: ReportedUsage) -> None:
        """Record the reported usage. After a resume, count the tokens of earlier servers as output, not as prompt."""
        emitted, prompt_tokens = self._emitted, usage.prompt_tokens or 0
        has_output = emitted.output_tokens > self._tokens_before
        is_false = usage.prompt_tokens == 0 or (usage.completion_tokens == 0 and has_output)
        self._delivered.false_usage = (
            (prompt_tokens, usage.completion_tokens or 0) if is_false else None
        )
        if usage.completion_tokens:
            emitted.output_tokens = self._tokens_before + usage.completion_tokens
        if not self._tokens_before:
            emitted.prompt_tokens = prompt_tokens or emitted.prompt_tokens
            emitted.cached_tokens = usage.cached_tokens
            return
        emitted.prompt_tokens = emitted.prompt_tokens or max(0, prompt_tokens - self._tokens_before)
        chunk["usage"] |= emitted.build_usage()
        if chunk["usage"].get("prompt_tokens_details") is not None:
            # The server counted cached tokens of the longer prompt.
            chunk["usage"]["prompt_tokens_details"] = {"cached_tokens": emitted.cached_tokens}
