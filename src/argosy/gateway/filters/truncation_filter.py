"""Filter that makes a conversation shorter which is too long for its model, as the rule or the request says."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import structlog
from msgspec import Raw

from argosy.deployment import SummaryConfig, TruncationRule
from argosy.gateway.backends import MALFORMED_EVENT_ERRORS
from argosy.gateway.event_loop import TenantSlots
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.request_context import (
    CHAT,
    CLIENT_ERROR_STATUSES,
    ApiShape,
    RequestContext,
)
from argosy.gateway.request_fields import BYTES_PER_TOKEN, MAX_TOKEN_BYTES, TOOL_FIELDS
from argosy.gateway.upstream import UpstreamError, UpstreamResponse
from argosy.http_server import JSON_CONTENT_TYPE
from argosy.policy import (
    AttemptOutcome,
    Message,
    build_summary_prompt,
    classify_status,
    format_ranges,
    insert_summary,
    list_cuts,
)
from argosy.protocol import IGNORED_FIELDS_HEADER, ApiError, format_names, invalid_request

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

COUNT_TIMEOUT_S = 10.0
"""Time for counting the tokens of one prompt."""
MAX_CONCURRENT_PER_TENANT = 4
"""Conversations of one tenant that are measured at a time."""
COUNTING_KINDS = frozenset({"argosy", "vllm"})
"""Kinds of replicas that count the tokens of a chat (`/tokenize`)."""
ANSWER_SHARE = 8
"""Share of the context that is kept for an answer whose request does not say how long it may be: one eighth."""
_TEMPLATE_FIELDS = (*TOOL_FIELDS, "chat_template_kwargs", "documents", "reasoning_effort")
"""Fields beside the messages that a chat template renders."""
MESSAGE_OVERHEAD_TOKENS = 16
"""Tokens that a template adds to a message, at most."""
MAX_SUMMARIES = 1000
"""Summaries that a gateway keeps, of all tenants. Those that were used longest ago are dropped first."""
MAX_SUMMARY_CHARS = 10_000
"""Characters of a summary that are used."""
ModelCall = Callable[[RequestContext, ApiShape, bytes, float], Awaitable[bytes]]
"""Sends the body of a request to an API, on behalf of a client's request and within seconds, as `ModelCaller.call`."""
_EMPTY_MESSAGE_BYTES = len(b'{"role":"user","content":""}')
_encode = msgspec.json.Encoder().encode


class TruncationFilter:
    """Filter for chats whose conversation may be truncated. Tokens are counted by a replica of the model."""

    def __init__(self) -> None:
        self._slots = TenantSlots(MAX_CONCURRENT_PER_TENANT)
        self.call_model: ModelCall | None = None
        """Sends a request for a summary. The server sets it."""
        self._summaries: OrderedDict[bytes, str] = OrderedDict()
        """Summaries by tenant, settings and what they summarise, so that a prefix stays the same."""

    async def on_request(self, context: RequestContext) -> bool:
        """Make the conversation fit.

        Raises:
            ApiError: 400 if it is too long, and no replica counts tokens or nothing more may be dropped.
        """
        if context.truncation is None:
            return False
        await self._fit(context, context.truncation)
        return False

    def on_tokens(self, context: RequestContext, chunk_times: Sequence[float]) -> None:
        """Do nothing: only prompts are changed."""

    async def on_fallback(self, context: RequestContext) -> None:
        """Do nothing: the model that answers now truncates or refuses the rest itself."""

    def on_complete(self, context: RequestContext) -> None:
        """Do nothing: the filter keeps nothing."""

    async def _fit(self, context: RequestContext, rule: TruncationRule) -> None:
        limit = context.pool.max_model_len
        if limit is None:  # no replica reports its context
            return
        room = limit - _reserve_tokens(context, rule, limit)
        messages = msgspec.json.decode(context.fields.raw["messages"])
        if room <= 0 or not _is_conversation(messages):
            return
        if _surely_fits(context, messages, room):
            context.fields.raw.pop("truncation", None)
            return
        shortened: list[Message] | None = None
        async with self._slots.hold(context.exchange, context.principal.tenant):
            try:
                counter = _TokenCounter(context)
                dropped = await self._find_cut(counter, rule, messages, room)
                if dropped and rule.summary is not None:
                    shortened = await self._summarise(context, rule.summary, messages, dropped)
                    if shortened is not None and await counter.exceeds(shortened, room):
                        shortened = None
            except _NotCountedError:
                context.fields.raw.pop("truncation", None)
                if not context.fields.exceeds_token_limit(limit):
                    return  # the replica checks it
                reason = "and no replica of the model counts tokens, so that it cannot be truncated"
                raise _too_long(limit, reason) from None
        if dropped is None:
            raise _too_long(limit, "even without the turns that may be dropped")
        context.fields.raw.pop("truncation", None)
        if dropped:
            _drop(context, rule, messages, dropped, shortened)

    async def _summarise(
        self,
        context: RequestContext,
        config: SummaryConfig,
        messages: list[dict[str, Any]],
        dropped: Sequence[int],
    ) -> list[Message] | None:
        """Return the conversation with a summary of its dropped messages; None if there is none in time."""
        prompt = build_summary_prompt(
            [messages[index] for index in dropped], config.max_chars, config.max_tokens // 2
        )
        principal = context.principal
        identity = (
            principal.tenant,
            principal.cache_domain,
            config.model,
            config.max_tokens,
            prompt,
        )
        key = hashlib.blake2b(_encode(identity), digest_size=16).digest()
        summary = self._summaries.get(key)
        if summary is None and self.call_model is not None:
            body = {
                "model": config.model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": config.max_tokens,
                "temperature": 0,
            }
            try:
                answer = await self.call_model(context, CHAT, _encode(body), config.timeout_s)
                content = msgspec.json.decode(answer)["choices"][0]["message"]["content"]
                summary = content.strip()[:MAX_SUMMARY_CHARS]
            except (ApiError, TimeoutError, *MALFORMED_EVENT_ERRORS) as error:
                reason = error.code if isinstance(error, ApiError) else type(error).__name__
                log.warning("summary_failed", model=config.model, reason=reason)
        if not summary:
            return None
        self._summaries[key] = summary
        self._summaries.move_to_end(key)
        if len(self._summaries) > MAX_SUMMARIES:
            self._summaries.popitem(last=False)
        return insert_summary(messages, dropped, summary)

    @staticmethod
    async def _find_cut(
        counter: _TokenCounter, rule: TruncationRule, messages: list[dict[str, Any]], room: int
    ) -> Sequence[int] | None:
        """Return the indexes of the fewest messages without which a conversation fits; None if it never does.

        Counts the tokens of one conversation for each doubling of the number of cuts, and of one more.

        Raises:
            _NotCountedError: The tokens cannot be counted.
        """
        if not await counter.exceeds(messages, room):
            return ()
        left = room
        if rule.summary is not None:
            left = max(room // 2, room - rule.summary.max_tokens - 2 * MESSAGE_OVERHEAD_TOKENS)
        cuts = list_cuts(
            messages,
            _measure_bytes,
            max(1, int(room * (1 - rule.keep)) * BYTES_PER_TOKEN),
            keeps_first_turn=rule.policy == "middle",
        )
        low, high = 0, len(cuts)
        while low < high:
            middle = (low + high) // 2
            if await counter.exceeds(_without(messages, cuts[middle]), left):
                low = middle + 1
            else:
                high = middle
        return cuts[low] if low < len(cuts) else None


class _TokenCounter:
    """Counts the tokens of conversations with what a request has beside its messages."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._replica = _find_counter(context)
        self._raw = {
            name: context.fields.raw[name]
            for name in _TEMPLATE_FIELDS
            if name in context.fields.raw
        }

    async def exceeds(self, messages: Sequence[Message], room: int) -> bool:
        """Return whether a conversation has more tokens than there is room for.

        Raises:
            _NotCountedError: No replica counts tokens, or it could not.
        """
        encoded = _encode(messages)
        if self._replica is None:
            raise _NotCountedError
        if len(encoded) // MAX_TOKEN_BYTES > 2 * room:
            return True
        model: str = self._replica.upstream_model or ""
        if self._context.adapter is not None and self._replica.is_native:
            model = self._context.adapter.digest
        body = self._raw | {
            "model": Raw(_encode(model)),
            "messages": Raw(encoded),
            "add_generation_prompt": Raw(b"true"),
        }
        count = await _count(self._replica, _encode(body), self._context.exchange.request_id)
        if count is None and len(encoded) // BYTES_PER_TOKEN <= room:
            raise _NotCountedError  # not because it is far too long
        return count is None or count > room


class _NotCountedError(Exception):
    """The tokens of a conversation are not known."""


async def _count(replica: ReplicaEndpoint, body: bytes, request_id: str) -> int | None:
    """Return the number of tokens of a prompt; None if the replica refuses to count it.

    Raises:
        _NotCountedError: The replica does not answer.
    """
    headers = [(b"content-type", JSON_CONTENT_TYPE), (b"x-request-id", request_id.encode())]
    request = replica.upstream.build_request(b"POST", b"/tokenize", body, headers)
    response = UpstreamResponse(time.monotonic)
    outcome: AttemptOutcome | None = AttemptOutcome.FAILURE
    replica.on_request_sent(0)
    try:
        async with asyncio.timeout(COUNT_TIMEOUT_S):
            await response.send(replica.upstream, request)
            status, content = await response.status, await response.read_body()
        outcome = classify_status(status)
        if status in CLIENT_ERROR_STATUSES:
            return None
        return int(msgspec.json.decode(content)["count"])
    except UpstreamError as error:
        outcome = error.outcome
        raise _NotCountedError from error
    except (TimeoutError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise _NotCountedError from error
    finally:
        response.abort("request ended")
        replica.on_request_ended(outcome, time.monotonic())
        replica.on_capacity_change()


def _find_counter(context: RequestContext) -> ReplicaEndpoint | None:
    """Return the least busy replica that counts tokens; None if there is none."""
    return min(
        (each for each in context.pool.eligible_replicas() if each.kind in COUNTING_KINDS),
        key=lambda replica: replica.load.in_flight,
        default=None,
    )


def _reserve_tokens(context: RequestContext, rule: TruncationRule, limit: int) -> int:
    """Return the tokens of the context that are kept for the answer."""
    default = rule.answer_tokens or limit // ANSWER_SHARE
    asked = context.fields.max_output_tokens
    if asked is None:
        return default
    is_bound_only = bytes(context.fields.raw.get("clamp_max_tokens", b"")) == b"true"
    return min(asked, default) if is_bound_only else asked


def _is_conversation(messages: object) -> bool:
    return isinstance(messages, list) and all(isinstance(each, dict) for each in messages)


def _surely_fits(context: RequestContext, messages: list[Any], room: int) -> bool:
    """Return whether a prompt fits with any tokenizer, since a token has at least one byte."""
    raw = context.fields.raw
    size = sum(len(bytes(raw[name])) for name in ("messages", *_TEMPLATE_FIELDS) if name in raw)
    return size + MESSAGE_OVERHEAD_TOKENS * len(messages) <= room


def _measure_bytes(message: Mapping[str, Any]) -> int:
    """Return the size of a message as its template renders it, about."""
    return max(MESSAGE_OVERHEAD_TOKENS, len(_encode(message)) - _EMPTY_MESSAGE_BYTES)


def _without(messages: list[dict[str, Any]], dropped: Sequence[int]) -> list[dict[str, Any]]:
    left_out = frozenset(dropped)
    return [each for index, each in enumerate(messages) if index not in left_out]


def _drop(
    context: RequestContext,
    rule: TruncationRule,
    messages: list[dict[str, Any]],
    dropped: Sequence[int],
    shortened: Sequence[Message] | None,
) -> None:
    """Drop messages from a request, and report it in a header and in its explanation.

    `shortened` is the conversation with a summary; None without one.
    """
    fields = context.fields
    encoded = _encode(_without(messages, dropped) if shortened is None else shortened)
    fields.raw["messages"] = Raw(encoded)
    ranges = format_ranges(dropped)
    saved_tokens = (fields.prompt_bytes - len(encoded)) // BYTES_PER_TOKEN
    context.fields = msgspec.structs.replace(
        fields,
        prompt_bytes=len(encoded),
        estimated_prompt_tokens=max(1, fields.estimated_prompt_tokens - saved_tokens),
        min_prompt_tokens=None,
    )
    context.response_headers.append((IGNORED_FIELDS_HEADER, format_names(ranges)))
    context.trace.truncation = {
        "rule": rule.name or "truncation",
        "policy": rule.policy,
        "messages": len(messages),
        "dropped": list(ranges),
    }
    if rule.summary is not None:
        made = None if shortened is None else rule.summary.model
        context.trace.truncation["summary_model"] = made


def _too_long(limit: int, reason: str) -> ApiError:
    message = (
        f"This model's maximum context length is {limit} tokens. The prompt is longer, {reason}. "
        "Send a shorter one."
    )
    return invalid_request(message, "messages", "context_length_exceeded")
