"""Streamed response that several servers generate one after the other, each with its own request and parser.

A native replica resumes exactly, from its resume metadata. vLLM and SGLang resume from the token ids that they sent,
which is exact for greedy decoding. Other servers resume from the text, as the beginning of an assistant message or
as a longer prompt. Responses with more than text (tools, schemas, log-probabilities, several choices) are not resumed
on servers of other backends. No `UpstreamPlan` exists for them, and the client receives an error.
"""

from __future__ import annotations

import msgspec

from argosy.gateway.backends.backend_adapter import COMPLETION_PATH, BackendAdapter
from argosy.gateway.backends.emitted_choice import (
    RESUMED_FINGERPRINT,
    EmittedChoice,
    StopStringFilter,
)
from argosy.gateway.backends.native_stream_parser import NativeStreamParser
from argosy.gateway.backends.passthrough import PassthroughParser, ResponseIdentity
from argosy.gateway.backends.request_builder import (
    UpstreamTarget,
    build_body,
    build_native_body,
    build_resume_from_ids,
    build_resume_from_text,
    count_resume_tokens,
    gateway_stop_strings,
    has_plain_text_output,
    has_stop_strings,
    has_text_only_prompt,
    is_set,
    max_output_tokens,
    stream_options,
)
from argosy.gateway.backends.resumable_stream_parser import ResumableStreamParser
from argosy.gateway.backends.stream_parser import DeliveredOutput, StreamParser
from argosy.gateway.backends.usage import ChoiceUsageSum
from argosy.gateway.request_fields import RequestFields
from argosy.protocol import SSE_DONE

MIN_REPEATED_CHARS = 16
"""Minimum length of delivered text by which its repetition is recognised. No event repeats as much by chance."""


class UpstreamPlan(msgspec.Struct, frozen=True):
    """Request to one server for its part of a streamed response, and the parser of that part."""

    path: bytes
    body: bytes
    parser: StreamParser


def build_nonstreaming_body(fields: RequestFields, path: bytes, target: UpstreamTarget) -> bytes:
    """Build the body of the request to a server for a response that the client receives as a whole."""
    if target.adapter.is_native:
        return build_native_body(fields, target.lora or target.model)
    return build_body(fields, path, target, resumable=False)


class StreamContinuation:
    """Plan of one streamed response over the servers that generate it, one after the other."""

    def __init__(self, fields: RequestFields, path: bytes, delivered: DeliveredOutput) -> None:
        self._fields = fields
        self._path = path
        self._delivered = delivered
        self._emitted = EmittedChoice(path)
        self._passthrough: PassthroughParser | None = None
        self._max_output_tokens: int | None = None

    def restart(self) -> None:
        """Forget all parts, because the response begins anew."""
        self._emitted = EmittedChoice(self._path)
        self._passthrough = self._max_output_tokens = None

    def plan_upstream(self, target: UpstreamTarget) -> UpstreamPlan | None:
        """Plan the part of the next server. The other methods refer to the last planned part.

        Returns:
            The plan; None if this server cannot resume where the last one stopped.
        """
        adapter = target.adapter
        if adapter.is_native:
            if self._emitted.first_chunk is not None or self._is_passthrough_committed:
                return None
            is_resume = bool(self._delivered.token_id_pieces)
            can_resume = self._delivered.is_exact and self._path in adapter.token_id_paths
            return (
                None
                if is_resume and not can_resume
                else self._plan_native(target.lora or target.model)
            )
        if self._is_passthrough_committed or self._delivered.token_id_pieces:
            return None
        self._max_output_tokens = max_output_tokens(self._fields, self._path, adapter)
        if self._emitted.first_chunk is None:
            return self._plan_first(target)
        return self._plan_resume(target)

    @property
    def response_identity(self) -> ResponseIdentity | None:
        """Id, creation time and model of the response, if a server of another backend than Argosy started it."""
        if self._passthrough is not None:
            return self._passthrough.response_identity
        return (
            None
            if self._emitted.first_chunk is None
            else msgspec.convert(self._emitted.common_fields(), ResponseIdentity)
        )

    @property
    def can_resume(self) -> bool:
        """Whether another server may be able to resume the stream."""
        return not self._is_passthrough_committed and self._emitted.is_text_only

    @property
    def is_finished(self) -> bool:
        """Whether the client received the finish reason of every choice."""
        return len(self._delivered.finish_reasons) == self._fields.choice_count

    def flush_held_text(self) -> bytes:
        """Return the event with text that was held back, for a response that ends here."""
        return self._emitted.build_held_event()

    def build_missing_tail(self) -> bytes | None:
        """Build the events that are missing after the last token: finish reason, usage, `[DONE]`.

        Returns:
            The events; None if tokens are missing too, so that another server has to resume the stream.
        """
        emitted, limit = self._emitted, self._max_output_tokens
        if self._passthrough is not None and (self._passthrough.is_done or self.is_finished):
            has_usage = self._passthrough.is_done or self._passthrough.is_usage_delivered
            return SSE_DONE if has_usage or not self._includes_usage else None
        if emitted.first_chunk is None:
            return None
        missing = b""
        if not emitted.is_finished:
            if limit is None or emitted.output_tokens < limit or not emitted.is_text_only:
                return None
            missing = emitted.build_finish_event("length")
            self._delivered.finish_reasons[0] = "length"
        # No server reported the prompt tokens: estimate them.
        emitted.prompt_tokens = emitted.prompt_tokens or self._fields.estimated_prompt_tokens
        self._delivered.prompt_tokens = emitted.prompt_tokens
        if self._includes_usage and not emitted.is_usage_delivered:
            missing += emitted.build_usage_event()
        return missing + SSE_DONE

    @property
    def _includes_usage(self) -> bool:
        return bool(stream_options(self._fields).get("include_usage"))

    @property
    def _is_passthrough_committed(self) -> bool:
        return self._passthrough is not None and self._passthrough.is_committed

    def _plan_native(self, model: str) -> UpstreamPlan:
        """Plan the part of a native replica: from the start, or after the delivered token ids."""
        fields, delivered = self._fields, self._delivered
        self._passthrough = ids = None
        if delivered.token_id_pieces:
            ids = [delivered.token_ids(choice) for choice in range(fields.choice_count)]
        body = build_native_body(fields, model, ids, force_stream=True)
        return UpstreamPlan(
            self._path,
            body,
            NativeStreamParser(delivered, count_resume_tokens(fields)),
        )

    def _plan_first(self, target: UpstreamTarget) -> UpstreamPlan:
        """Plan the part of the first server of another backend than Argosy."""
        fields, path, adapter = self._fields, self._path, target.adapter
        self._passthrough = None
        is_resumable = (
            path in adapter.token_id_paths | adapter.prefill_paths
            and has_plain_text_output(fields, path)
        )
        body = build_body(fields, path, target, resumable=is_resumable)
        self._emitted.stop_filter = None
        if is_resumable:
            return UpstreamPlan(path, body, self._build_parser(adapter))
        self._passthrough = PassthroughParser(
            self._delivered,
            include_usage=self._includes_usage,
            has_echo=is_set(fields, "echo"),
            choice_usages=ChoiceUsageSum(fields) if adapter.has_per_choice_usage else None,
        )
        return UpstreamPlan(path, body, self._passthrough)

    def _plan_resume(self, target: UpstreamTarget) -> UpstreamPlan | None:
        """Plan to resume after the delivered text.

        The server starts over if no text was delivered. Otherwise it resumes from the token ids if they are known
        and exact, else from the text.
        """
        fields, path, emitted, adapter = self._fields, self._path, self._emitted, target.adapter
        if not emitted.is_text_only or emitted.is_finished:
            return None
        delivered_text = "".join(emitted.text_pieces)
        if not delivered_text.strip():
            emitted.restart()
            body = build_body(fields, path, target, resumable=True)
            return UpstreamPlan(
                path,
                body,
                self._build_parser(adapter, trailing_whitespace=delivered_text),
            )
        if not fields.has_generated_seed:
            emitted.system_fingerprint = RESUMED_FINGERPRINT
        emitted.drop_textless_tokens()
        repeated_text = "" if emitted.ends_on_token else emitted.full_text()
        is_recognisable = emitted.ends_on_token or len(repeated_text) >= MIN_REPEATED_CHARS
        is_aligned = is_recognisable and (
            emitted.stop_filter is not None or not has_stop_strings(fields)
        )
        is_exact = is_aligned and has_text_only_prompt(fields, path)
        if (
            path in adapter.token_id_paths
            and emitted.has_token_ids
            and emitted.prompt_token_ids
            and is_exact
        ):
            ids = [*emitted.prompt_token_ids, *emitted.token_ids]
            body_from_ids = build_resume_from_ids(fields, path, target, ids, len(emitted.token_ids))
            if body_from_ids is not None:
                parser = self._build_parser(
                    adapter, from_completion=path != COMPLETION_PATH, repeated_text=repeated_text
                )
                return UpstreamPlan(COMPLETION_PATH, body_from_ids, parser)
        if path not in adapter.prefill_paths:
            return None
        # Models resume badly after trailing white space, and some chat templates drop it anyway.
        text = emitted.full_text()
        stem = text.rstrip()
        body_from_text = build_resume_from_text(fields, path, target, stem, emitted.output_tokens)
        if body_from_text is None:
            return None
        emitted.has_token_ids = False  # the new server tokenizes the text in its own way
        parser = self._build_parser(adapter, trailing_whitespace=text[len(stem) :])
        return UpstreamPlan(path, body_from_text, parser)

    def _build_parser(
        self,
        adapter: BackendAdapter,
        *,
        from_completion: bool = False,
        trailing_whitespace: str = "",
        repeated_text: str = "",
    ) -> ResumableStreamParser:
        fields = self._fields
        path = COMPLETION_PATH if from_completion else self._path
        is_usage_added = adapter.has_continuous_usage and path not in adapter.token_id_paths
        stop_strings = gateway_stop_strings(fields, adapter)
        if stop_strings and self._emitted.stop_filter is None:
            self._emitted.stop_filter = StopStringFilter(stop_strings)
        return ResumableStreamParser(
            self._emitted,
            self._delivered,
            fields,
            is_usage_added=is_usage_added,
            from_completion=from_completion,
            trailing_whitespace=trailing_whitespace,
            repeated_text=repeated_text,
        )
