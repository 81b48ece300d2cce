"""The stream of a server that cannot be carried on elsewhere: whole events pass as they came, and are counted."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from argosy.gateway.backends.backend_adapter import BackendAdapter
from argosy.gateway.backends.native_stream_parser import DeliveredOutput
from argosy.gateway.backends.stream_events import (
    DONE_DATA,
    EVENT_END,
    MALFORMED_EVENT_ERRORS,
    describe_error_chunk,
    error_chunk_status,
    event_data,
    split_events,
)
from argosy.gateway.backends.stream_parser import StreamParser
from argosy.gateway.request_fields import BYTES_PER_TOKEN, MAX_CHOICES, RequestFields
from argosy.protocol import SSE_DONE, LineBuffer

MAX_TOKEN_COUNT = 2**31 - 1
TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKEN_COUNT)]
"""A count that can be: whatever else a server says is not billed. A ledger could not sum up a few larger ones."""


MAX_SINGLE_TOKEN_BYTES = 32
"""Longer text of one event is of several tokens: many servers send those that came together as one."""


def estimate_tokens(*values: object) -> int:
    """How many tokens an event has brought that says this, about, where its server does not tell: mostly one.

    Of several texts the longest counts: some say the same twice, by an old name and a new one.
    """
    texts = [
        text
        for one in values
        for text in (_tool_call_arguments(one) if isinstance(one, list) else [one])
    ]
    size = max(len(text.encode()) for text in ("", *texts) if isinstance(text, str))
    return size // BYTES_PER_TOKEN if size > MAX_SINGLE_TOKEN_BYTES else 1


def _tool_call_arguments(calls: list[object]) -> list[object]:
    """Those of tool calls, as far as they are some."""
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    return [one.get("arguments") for one in functions if isinstance(one, dict)]


class PromptTokensDetails(msgspec.Struct):
    """`prompt_tokens_details`, as far as it counts."""

    cached_tokens: TokenCount | None = None


class ReportedUsage(msgspec.Struct):
    """The tokens that a server says it used; None where it does not say."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    prompt_tokens_details: PromptTokensDetails | None = None

    def apply_to(self, delivered: DeliveredOutput) -> None:
        """Take it for what was delivered, as far as it says."""
        if self.prompt_tokens is not None:
            delivered.prompt_tokens = self.prompt_tokens
        if self.completion_tokens is not None:
            delivered.output_tokens = self.completion_tokens
        delivered.cached_tokens = min(self.cached_tokens, delivered.prompt_tokens)

    @property
    def cached_tokens(self) -> int:
        """0 where it does not say."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class ResponseIdentity(msgspec.Struct):
    """What all events of a stream say of the answer."""

    id: str = ""
    created: int = 0
    model: str = ""


class ChoiceUsageSum:
    """Those of an answer's choices, where a server tells one for each."""

    def __init__(self, fields: RequestFields) -> None:
        self._fields = fields
        self._reported = self._prompt_tokens = self._output_tokens = self._cached_tokens = 0

    def add(self, usage: ReportedUsage) -> ReportedUsage | None:
        """One more; what they are together, once all have been told."""
        self._reported += 1
        self._prompt_tokens += usage.prompt_tokens or 0
        self._output_tokens += usage.completion_tokens or 0
        self._cached_tokens += usage.cached_tokens
        return self.total() if self._reported == self._fields.choice_count else None

    def total(self) -> ReportedUsage | None:
        """Those that were told; None: there was none. All choices of a prompt have told its tokens."""
        if not self._reported:
            return None
        prompt, cached = (
            min(MAX_TOKEN_COUNT, tokens * self._fields.prompt_count // self._reported)
            for tokens in (self._prompt_tokens, self._cached_tokens)
        )
        return ReportedUsage(
            prompt or None,
            min(MAX_TOKEN_COUNT, self._output_tokens) or None,
            PromptTokensDetails(cached),
        )


class _UsageBody(msgspec.Struct):
    usage: ReportedUsage | None = None


def parse_usage(
    content: bytes, fields: RequestFields, adapter: BackendAdapter
) -> ReportedUsage | None:
    """The usage of a whole answer; None when it tells none, or is no such answer.

    About so much where it tells that of its first choice only.
    """
    try:
        usage = msgspec.json.decode(content, type=_UsageBody).usage
        if usage is None or fields.choice_count == 1 or not adapter.has_per_choice_usage:
            return usage
    except (msgspec.DecodeError, RecursionError):
        return None
    others = sum(_estimate_choice_tokens(content)[1:])
    output = None if usage.completion_tokens is None else usage.completion_tokens + others
    prompt = usage.prompt_tokens if fields.prompt_count == 1 else None
    return ReportedUsage(prompt, output, usage.prompt_tokens_details)


def estimate_response_tokens(content: bytes) -> int:
    """How many tokens a whole answer brought, about, where its server does not tell: those of what its choices say."""
    return sum(_estimate_choice_tokens(content)) or len(content) // BYTES_PER_TOKEN


def _estimate_choice_tokens(content: bytes) -> list[int]:
    """The same of each choice; empty where there are none to be read."""
    try:
        choices = msgspec.json.decode(content, type=_ResponseBody).choices
    except (msgspec.DecodeError, RecursionError):
        return []
    return [choice.content_bytes // BYTES_PER_TOKEN or 1 for choice in choices]


class _ChoiceFinish(msgspec.Struct):
    finish_reason: str | None = None


class _FinishBody(msgspec.Struct):
    choices: list[_ChoiceFinish] | None = None
    error: Any = None


def is_json_object(content: bytes) -> bool:
    """Whether it looks like a whole one of JSON: pages, texts, halves and what is compressed do not."""
    text = content.removeprefix(BOM_UTF8).strip()
    return text.startswith(b"{") and text.endswith(b"}")


def status_in_body(content: bytes, incomplete_finish_reasons: frozenset[str]) -> int:
    """The status that a whole answer with 200 means: a server may fail or refuse after its head.

    500 where it was `broken_off`, as a finish reason says, or has more choices than anybody may ask for.
    """
    try:
        told = msgspec.json.decode(content, type=_FinishBody)
    except MALFORMED_EVENT_ERRORS:
        return 200
    if not told.choices and told.error is not None:
        return error_chunk_status({"error": told.error}) or 500
    if len(told.choices or ()) > MAX_CHOICES:
        return 500
    ends = {choice.finish_reason for choice in told.choices or ()}
    return 200 if ends.isdisjoint(incomplete_finish_reasons) else 500


def parse_finish_reasons(content: bytes) -> dict[int, str]:
    """Why each choice of a whole answer ended, by its place there, as far as it says."""
    try:
        choices = msgspec.json.decode(content, type=_FinishBody).choices or ()
    except MALFORMED_EVENT_ERRORS:
        return {}
    reasons = enumerate(choice.finish_reason for choice in choices)
    return {place: reason for place, reason in reasons if reason}


class _MessageDelta(msgspec.Struct):
    """Text mostly; some send parts."""

    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None

    @property
    def has_content(self) -> bool:
        more = self.reasoning or self.reasoning_content or self.refusal or self.tool_calls
        return bool(self.content or more or self.function_call or self.audio)

    @property
    def estimated_tokens(self) -> int:
        return estimate_tokens(*self.texts)

    @property
    def texts(self) -> list[object]:
        """All that it says, as far as it is text."""
        calls = self.tool_calls if isinstance(self.tool_calls, list) else []
        said = self.content, self.reasoning, self.reasoning_content, self.refusal
        return [*said, *_tool_call_arguments(calls)]


class _StreamChoice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _MessageDelta | None = None
    finish_reason: str | None = None

    @property
    def has_content(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.has_content)

    @property
    def estimated_tokens(self) -> int:
        return estimate_tokens(self.text) if self.delta is None else self.delta.estimated_tokens


class _ResponseChoice(msgspec.Struct):
    text: str | None = None
    message: _MessageDelta | None = None

    @property
    def content_bytes(self) -> int:
        """Bytes of what a whole answer's choice says: of texts, and of parts, calls and sounds as they came."""
        message = self.message
        said: list[object] = [self.text]
        if message is not None:
            said = [*message.texts, message.function_call, message.audio]
        return sum(
            len(one.encode() if isinstance(one, str) else msgspec.json.encode(one))
            for one in said
            if one
        )


class _ResponseBody(msgspec.Struct):
    choices: list[_ResponseChoice] = []


class _StreamChunk(msgspec.Struct):
    choices: list[_StreamChoice] | None = None
    usage: ReportedUsage | None = None
    error: Any = None
    object: str | None = None


class PassthroughParser(StreamParser):
    """One attempt's stream. What a choice says counts by its length (`tokens_of`), until the usage tells."""

    def __init__(
        self,
        delivered: DeliveredOutput,
        incomplete_finish_reasons: frozenset[str],
        *,
        include_usage: bool,
        has_echo: bool,
        choice_usages: ChoiceUsageSum | None,
    ) -> None:
        """`echoes`: each choice begins with its prompt. `broken_off`: finish reasons of answers that are none.

        `usages`: there is one for each choice.
        """
        self._delivered = delivered
        self._incomplete_finish_reasons = incomplete_finish_reasons
        self._include_usage = include_usage
        self._has_echo = has_echo
        self._choice_usages = choice_usages
        self._started_choices: set[int] = set()
        """Choices that have said something."""
        self._decode = msgspec.json.Decoder(_StreamChunk).decode
        self._buffer = LineBuffer()
        self._first_data = b""
        self.is_committed = False
        """More than comments was passed on: nobody else can give this answer any more."""
        self.is_usage_delivered = False
        """The last event had it."""

    @property
    def response_identity(self) -> ResponseIdentity | None:
        """What its events say of the answer."""
        try:
            return msgspec.json.decode(self._first_data, type=ResponseIdentity)
        except MALFORMED_EVENT_ERRORS:
            return None

    def feed(self, body: bytes) -> bytes:
        """See `StreamReader`."""
        if self.is_done or self.failure:
            return b""
        whole = split_events(self._buffer, body)
        events = whole.split(EVENT_END)[:-1]
        kept = [event for event in events if self._process_event(event)]
        self.is_committed = self.is_committed or any(
            event_data(event) is not None for event in kept
        )
        return whole if len(kept) == len(events) else b"".join(event + EVENT_END for event in kept)

    def flush(self) -> bytes:
        """See `StreamReader`."""
        return SSE_DONE

    def _process_event(self, event: bytes) -> bool:
        """Count an event; whether the client gets it."""
        if self.is_done or self.failure:
            return False
        data = event_data(event)
        if data == DONE_DATA:
            self.is_done = True
            self._record_usage(None if self._choice_usages is None else self._choice_usages.total())
            return False
        if data is None:
            return True
        try:
            chunk = self._decode(data)
        except (msgspec.DecodeError, RecursionError):
            return True  # no chunk, but perhaps its reader knows what it is
        if chunk.error is not None or chunk.object == "error":
            error = msgspec.json.decode(data)
            self.failure, self.failure_status = (
                describe_error_chunk(error),
                error_chunk_status(error),
            )
            return False
        if len(chunk.choices or ()) > MAX_CHOICES:
            self.failure = "an event of its stream has more choices than anybody may ask for"
            return False
        if any(
            choice.finish_reason in self._incomplete_finish_reasons
            for choice in chunk.choices or ()
        ):
            self.failure = "it broke the answer off"
            return False
        self._first_data = self._first_data or data
        self._record_chunk(chunk)
        return bool(chunk.choices) or chunk.usage is None or self._include_usage

    def _record_chunk(self, chunk: _StreamChunk) -> None:
        delivered, usage = self._delivered, chunk.usage
        for choice in chunk.choices or ():
            if choice.has_content:
                prompt = self._has_echo and choice.index not in self._started_choices
                delivered.output_tokens += 1 if prompt else choice.estimated_tokens
                self._started_choices.add(choice.index)
            if choice.finish_reason:
                delivered.finish_reasons[choice.index] = choice.finish_reason
        self.is_usage_delivered = usage is not None
        self._record_usage(
            usage
            if usage is None or self._choice_usages is None
            else self._choice_usages.add(usage)
        )

    def _record_usage(self, usage: ReportedUsage | None) -> None:
        """Believe it, unless it says that nothing was made where something came: some have not counted yet."""
        if usage is not None and not (usage.completion_tokens == 0 < self._delivered.output_tokens):
            usage.apply_to(self._delivered)
