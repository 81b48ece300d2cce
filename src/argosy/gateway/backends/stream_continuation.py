"""Carries one answer over servers of any kind: what each is asked, and who reads what it gives.

Our own replicas go on exactly, from their journal. Others go on from the token ids that they gave (vLLM,
SGLang), which is exact for greedy answers, or from the text, as an assistant's last message or a longer prompt. What is
more than text (tools, schemas, log-probabilities, several choices) is not carried on over other servers: then
there is no `Leg`, and the client is told.
"""

from __future__ import annotations

import msgspec

from argosy.gateway.backends.backend_adapter import COMPLETION_PATH, BackendAdapter
from argosy.gateway.backends.emitted_choice import RESUMED_FINGERPRINT, EmittedChoice
from argosy.gateway.backends.native_stream_parser import DeliveredOutput, NativeStreamParser
from argosy.gateway.backends.passthrough import ChoiceUsageSum, PassthroughParser, ResponseIdentity
from argosy.gateway.backends.request_builder import (
    build_body,
    build_native_body,
    build_resume_from_ids,
    build_resume_from_text,
    count_resume_tokens,
    gateway_stop_strings,
    has_plain_text_output,
    has_stop_strings,
    has_text_only_prompt,
    is_continuous_usage_requested,
    is_echo_requested,
    is_timings_requested,
    is_token_ids_requested,
    is_usage_requested,
    max_output_tokens,
    min_output_tokens,
)
from argosy.gateway.backends.resumable_stream_parser import (
    ResumableStreamParser,
    StreamParserOptions,
)
from argosy.gateway.backends.stop_string_filter import StopStringFilter
from argosy.gateway.backends.stream_parser import StreamParser
from argosy.gateway.request_fields import RequestFields
from argosy.protocol import SSE_DONE

MIN_REPEATED_CHARS = 16
"""Characters of what was told by which it is known when it comes again: no event has as many by chance."""


class UpstreamRequest(msgspec.Struct, frozen=True):
    """A request as one server gets it."""

    path: bytes
    body: bytes

    def with_priority(self, priority: int) -> UpstreamRequest:
        """The same, saying how urgent it is: of what clients say of that, nothing is sent to others."""
        return UpstreamRequest(self.path, b'{"priority":%d,%b' % (priority, self.body[1:]))


class UpstreamPlan(msgspec.Struct, frozen=True):
    """One server's part of a streamed answer."""

    request: UpstreamRequest
    parser: StreamParser


def build_nonstreaming_request(
    fields: RequestFields, path: bytes, adapter: BackendAdapter, model: str
) -> UpstreamRequest:
    """The request for an answer in one piece."""
    if adapter.is_native:
        return UpstreamRequest(path, build_native_body(fields, model))
    return UpstreamRequest(path, build_body(fields, path, adapter, model, resumable=False))


class StreamContinuation:
    """One streamed answer on its way over the servers that give it, one after the other."""

    def __init__(self, fields: RequestFields, path: bytes, delivered: DeliveredOutput) -> None:
        self._fields = fields
        self._path = path
        self._delivered = delivered
        self._emitted = EmittedChoice(path)
        self._passthrough: PassthroughParser | None = None
        self._max_output_tokens: int | None = None

    def plan_upstream(
        self, adapter: BackendAdapter, model: str, max_model_len: int = 0
    ) -> UpstreamPlan | None:
        """The next server's part. None: this one cannot go on where the last one stopped.

        What is told of the answer goes by the part that was given last.
        `room`: tokens that the model's context has; 0: unknown.
        """
        if adapter.is_native:
            return (
                self._plan_native(model)
                if self._emitted.first_chunk is None and not self._is_passthrough_committed
                else None
            )
        if self._is_passthrough_committed or self._delivered.token_id_pieces:
            return None
        self._max_output_tokens = max_output_tokens(self._fields, self._path, adapter)
        if self._emitted.first_chunk is None:
            return self._plan_first(adapter, model)
        return self._plan_resume(adapter, model, max_model_len)

    @property
    def response_identity(self) -> ResponseIdentity | None:
        """What its events say of the answer, where a server that is not ours named it."""
        if self._passthrough is not None:
            return self._passthrough.response_identity
        return (
            None
            if self._emitted.first_chunk is None
            else msgspec.convert(self._emitted.common_fields(), ResponseIdentity)
        )

    @property
    def can_resume(self) -> bool:
        """Whether there could be a server that goes on."""
        return not self._is_passthrough_committed and self._emitted.is_text_only

    @property
    def is_finished(self) -> bool:
        """Whether each choice was told to have come to its end."""
        return len(self._delivered.finish_reasons) == self._fields.choice_count

    def flush_held_text(self) -> bytes:
        """What a server has given and the client has not, when the answer ends here."""
        return self._emitted.build_held_event()

    def build_missing_tail(self) -> bytes | None:
        """What still has to be told of an answer that had come to its end when its server failed."""
        told, limit = self._emitted, self._max_output_tokens
        if self._passthrough is not None and (self._passthrough.is_done or self.is_finished):
            told_usage = self._passthrough.is_done or self._passthrough.is_usage_delivered
            return SSE_DONE if told_usage or not is_usage_requested(self._fields) else None
        if told.first_chunk is None:
            return None
        missing = b""
        if not told.is_finished:
            if limit is None or told.output_tokens < limit or not told.is_text_only:
                return None
            missing = told.build_finish_event("length")
            self._delivered.finish_reasons[0] = "length"
        # Where nobody said: about so many.
        told.prompt_tokens = told.prompt_tokens or self._fields.estimated_prompt_tokens
        self._delivered.prompt_tokens = told.prompt_tokens
        if is_usage_requested(self._fields) and not told.is_usage_delivered:
            missing += told.build_usage_event()
        return missing + SSE_DONE

    @property
    def _is_passthrough_committed(self) -> bool:
        return self._passthrough is not None and self._passthrough.is_committed

    def _plan_native(self, model: str) -> UpstreamPlan:
        ask, delivered = self._fields, self._delivered
        self._passthrough = ids = None
        if delivered.token_id_pieces:
            ids = [delivered.token_ids(choice) for choice in range(ask.choice_count)]
        body = build_native_body(ask, model, ids, force_stream=True)
        return UpstreamPlan(
            UpstreamRequest(self._path, body),
            NativeStreamParser(delivered, count_resume_tokens(ask)),
        )

    def _plan_first(self, adapter: BackendAdapter, model: str) -> UpstreamPlan:
        ask, path = self._fields, self._path
        self._passthrough = None
        carriable = (
            path in adapter.token_id_paths | adapter.prefill_paths
            and has_plain_text_output(ask, path)
        )
        body = build_body(ask, path, adapter, model, resumable=carriable)
        outgoing = UpstreamRequest(path, body)
        self._emitted.stop_filter = None
        if carriable:
            return UpstreamPlan(outgoing, self._build_parser(adapter))
        shown, echoed = is_usage_requested(ask), is_echo_requested(ask)
        self._passthrough = PassthroughParser(
            self._delivered,
            adapter.incomplete_finish_reasons,
            include_usage=shown,
            has_echo=echoed,
            choice_usages=ChoiceUsageSum(ask) if adapter.has_per_choice_usage else None,
        )
        return UpstreamPlan(outgoing, self._passthrough)

    def _plan_resume(
        self, adapter: BackendAdapter, model: str, max_model_len: int
    ) -> UpstreamPlan | None:
        """Go on after what was told: from the start while that was no text, else from the ids, else from the text."""
        ask, path, told = self._fields, self._path, self._emitted
        if not told.is_text_only or told.is_finished:
            return None
        beginning = "".join(told.text_pieces)
        if not beginning.strip():
            told.restart()
            body = build_body(ask, path, adapter, model, resumable=True)
            return UpstreamPlan(
                UpstreamRequest(path, body),
                self._build_parser(adapter, trailing_whitespace=beginning),
            )
        if not ask.has_generated_seed:
            told.system_fingerprint = RESUMED_FINGERPRINT
        told.drop_textless_tokens()
        again = "" if told.ends_on_token else told.full_text()
        known = told.ends_on_token or len(again) >= MIN_REPEATED_CHARS
        aligned = known and (told.stop_filter is not None or not has_stop_strings(ask))
        exact = aligned and has_text_only_prompt(ask, path)
        if (
            path in adapter.token_id_paths
            and told.has_token_ids
            and told.prompt_token_ids
            and exact
        ):
            ids = [*told.prompt_token_ids, *told.token_ids]
            count = len(told.token_ids)
            from_ids = build_resume_from_ids(
                ask, path, adapter, model, ids, delivered_tokens=count, max_model_len=max_model_len
            )
            if from_ids is not None:
                reader = self._build_parser(
                    adapter, from_completion=path != COMPLETION_PATH, repeated_text=again
                )
                return UpstreamPlan(UpstreamRequest(COMPLETION_PATH, from_ids), reader)
        if path not in adapter.prefill_paths:
            return None
        # A text that ends in white space is hard to go on from, and some templates drop it anyway.
        text = told.full_text()
        stem = text.rstrip()
        from_text = build_resume_from_text(ask, path, adapter, model, stem, told.output_tokens)
        if from_text is None:
            return None
        told.has_token_ids = False  # its tokens are not those that the new server sees
        reader = self._build_parser(adapter, trailing_whitespace=text[len(stem) :])
        return UpstreamPlan(UpstreamRequest(path, from_text), reader)

    def _build_parser(
        self,
        adapter: BackendAdapter,
        *,
        from_completion: bool = False,
        trailing_whitespace: str = "",
        repeated_text: str = "",
    ) -> ResumableStreamParser:
        ask = self._fields
        path = COMPLETION_PATH if from_completion else self._path
        added = adapter.has_continuous_usage and path not in adapter.token_id_paths
        stops = gateway_stop_strings(ask, adapter)
        if stops and self._emitted.stop_filter is None:
            self._emitted.stop_filter = StopStringFilter(stops)
        view = StreamParserOptions(
            include_usage=is_usage_requested(ask),
            include_continuous_usage=is_continuous_usage_requested(ask) or not added,
            include_token_ids=is_token_ids_requested(ask),
            incomplete_finish_reasons=adapter.incomplete_finish_reasons,
            include_timings=is_timings_requested(ask),
            from_completion=from_completion,
            trailing_whitespace=trailing_whitespace,
            min_output_tokens=min_output_tokens(ask),
            repeated_text=repeated_text,
        )
        return ResumableStreamParser(self._emitted, self._delivered, view)
