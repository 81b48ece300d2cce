"""Exchange of an attempt with its replica: the request, and the response until its start is known."""

from __future__ import annotations

import asyncio
import time
from binascii import a2b_base64
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import cast

import msgspec

from argosy.gateway.backends import (
    BackendAdapter,
    DeliveredOutput,
    ResponseBody,
    UpstreamPlan,
    count_resume_tokens,
    derive_cache_salt,
    infer_status,
    is_json_object,
    normalize_calls,
    parse_error_message,
    parse_response_body,
)
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.request_context import RequestContext
from argosy.gateway.upstream import UpstreamError, UpstreamResponse
from argosy.policy import AttemptOutcome, CacheHitReport, PromptTokensReport, classify_status
from argosy.policy.placement import Attempt, AttemptEnding
from argosy.protocol import unpack_block_names

MAX_JSON_CONTAINERS = 1 << 21
"""Maximum objects and lists in a buffered response. More take long to parse, and log-probabilities need fewer."""


class BufferedResponse(msgspec.Struct, frozen=True):
    """A response that was received in one piece."""

    status: int
    body: bytes
    content_type: bytes
    parsed: ResponseBody
    """Fields of a successful response that the gateway reads; empty for others."""


ResponseStart = BufferedResponse | UpstreamPlan
"""Start of a response: complete at once, or a stream that the plan's parser reads."""


class UpstreamRefusedError(Exception):
    """A replica answered, but not with a usable response to the request."""

    ending = AttemptEnding.REFUSED

    def __init__(self, status: int, reason: str, upstream_message: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.upstream_message = upstream_message
        """The replica's error message, for operators. It may be about the fleet's account at a hosted API."""
        self.outcome: AttemptOutcome | None = classify_status(status)


class UnsuitableReplicaError(Exception):
    """The replica cannot resume the response at its current position, or does not enforce the request's constraint."""

    outcome = None
    ending = AttemptEnding.UNSUITABLE


CallError = UpstreamError | UpstreamRefusedError | UnsuitableReplicaError
CALL_ERRORS = (UpstreamError, UpstreamRefusedError, UnsuitableReplicaError)


class UpstreamCall(UpstreamResponse):
    """Attempt at a replica: its response, and the measurement of its stream.

    Token rates are measured during the stream, because a slow stream may last an hour.
    """

    task: asyncio.Task[ResponseStart] | None = None
    """Task that waits for the start of the response, if another attempt may be faster."""
    start_tokens = 0
    """Output tokens that the client had when the stream was attached."""
    has_token = False
    """Whether the attempt's first token has arrived."""
    is_client_limited = False
    """Whether client backpressure slowed the replica since the last measurement, which is then discarded."""
    _measured_tokens: int | None = None
    """Output tokens at the last measurement of the rate; None while no rate is measured."""
    _measured_at = 0.0

    def __init__(self, attempt: Attempt, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.attempt = attempt
        self.replica = cast("ReplicaEndpoint", attempt.replica)

    def cancel(self) -> None:
        """Give the attempt up."""
        task, self.task = self.task, None
        if task is not None and not task.cancel() and not task.cancelled():
            task.exception()  # marks the exception as retrieved
        self.abort("attempt ended")

    @property
    def retry_after_s(self) -> float | None:
        """Seconds of the replica's `Retry-After` header, a number or a date (RFC 9110, 10.2.3)."""
        value = self.headers.get(b"retry-after", b"").decode("latin-1")
        if not value:
            return None
        try:
            seconds = float(value) if value[:1].isdigit() else _parse_http_date(value) - time.time()
        except (ValueError, OverflowError):
            return None
        return max(0.0, seconds)

    def record_first_token(self, delivered: DeliveredOutput, context: RequestContext) -> None:
        """Record the first token, with what the replica reports about the prompt."""
        fields, request, attempt = context.fields, context.placement, self.attempt
        self.has_token = True
        if fields.choice_count == 1:
            self._measured_tokens = delivered.output_tokens
            self._measured_at = self.last_activity_at
        uncached_tokens: int | None = None
        cache_report: CacheHitReport | PromptTokensReport | None = None
        keys = [] if request is None else request.block_keys
        prompt_blocks = request.prompt_blocks if request is not None and keys else 0.0
        if self.replica.is_native:  # other servers report usage at the end, if at all
            uncached_tokens = delivered.prompt_tokens - delivered.cached_tokens
            if keys:
                cache_report = CacheHitReport(
                    keys,
                    attempt.chosen.cached_blocks,
                    prompt_blocks,
                    delivered.prompt_tokens - count_resume_tokens(fields),
                    delivered.cached_tokens,
                    unpack_block_names(a2b_base64(delivered.prompt_blocks)),
                )
        elif delivered.prompt_token_ids is not None and keys and context.adapter is None:
            salt = derive_cache_salt(fields, self.replica.adapter)
            cache_report = PromptTokensReport(keys, prompt_blocks, salt, delivered.prompt_token_ids)
        attempt.record_first_token(
            self.last_activity_at,
            uncached_tokens,
            cache_report,
            is_resumed=self.start_tokens > 0,
        )

    def measure(self, tokens: int, now: float) -> None:
        """Measure the rate since the last call, at `tokens` output tokens now."""
        if self._measured_tokens is None:
            return
        new_tokens, duration_s = tokens - self._measured_tokens, now - self._measured_at
        self._measured_tokens, self._measured_at = tokens, now
        if duration_s > 0 and not self.is_client_limited:
            self.replica.on_tokens_streamed(new_tokens, duration_s)


def check_buffered_response(
    status: int, body: bytes, content_type: bytes, adapter: BackendAdapter, *, has_started: bool
) -> BufferedResponse:
    """Check a response in one piece.

    Args:
        status: Its status.
        body: Its body.
        content_type: Its content type.
        adapter: Adapter of the replica.
        has_started: Whether the client may have received events, so that only a stream can continue the response.

    Raises:
        UpstreamRefusedError: It is an error, or no response to the request.
        UpstreamError: The replica ended it early.
    """
    if body.count(b"{") + body.count(b"[") > MAX_JSON_CONTAINERS:
        raise UpstreamRefusedError(
            502, f"the response has more than {MAX_JSON_CONTAINERS} objects and lists"
        )
    received_status, status = status, infer_status(status, body, adapter.client_error_markers)
    outcome = classify_status(status)
    if outcome is not AttemptOutcome.SUCCESS or has_started:
        raise UpstreamRefusedError(status, f"status {received_status}", parse_error_message(body))
    if status == 200 and not is_json_object(body):
        raise UpstreamRefusedError(502, "the response is not a JSON object")
    parsed = parse_response_body(body) if status == 200 else ResponseBody()
    if not adapter.is_native:
        status = parsed.find_status() if status == 200 else status
        if classify_status(status) is not AttemptOutcome.SUCCESS:
            raise UpstreamError("the replica ended the response early")
        body, parsed = normalize_calls(body, parsed)
    return BufferedResponse(status, body, content_type, parsed)


def _parse_http_date(value: str) -> float:
    """Parse an HTTP date into seconds since the epoch.

    Raises:
        ValueError: The value is not a date.
        OverflowError: The date is out of range.
    """
    return parsedate_to_datetime(value).timestamp()
