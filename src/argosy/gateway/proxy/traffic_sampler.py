"""Samples ended requests for what counts of tokens do not show: languages, templates, tool calls and embeddings.

A sampled request waits in a short queue until a thread has read it. Only small numbers of it are counted then.
"""

from __future__ import annotations

import asyncio
import re
import time
from base64 import b64decode
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from argosy.gateway.backends import MALFORMED_EVENT_ERRORS
from argosy.gateway.proxy.answer_writer import AnswerWriter, read_answer
from argosy.gateway.proxy.response_writers import ResponseWriter
from argosy.gateway.request_context import CHAT, EMBEDDINGS, RequestContext
from argosy.gateway.request_fields import ChatMessage
from argosy.policy.detection import (
    CellKey,
    RequestSignals,
    find_language,
    fingerprint_template,
    project_embedding,
)
from argosy.policy.prefix_diagnosis import mask_values
from argosy.process import run_in_daemon_thread
from argosy.quality import check_calls

INTERVAL_S = 2.0
"""Least time between two sampled requests of a tenant at a model."""
MIN_GAP_S = 0.1
"""Least mean time between two sampled requests of a gateway."""
MAX_STREAMS = 1000
"""Tenants at models whose last sampled request is known."""
MAX_PROMPT_BYTES = MAX_TOOL_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 18
MAX_TEMPLATE_BYTES = 2048
"""Bytes of a system prompt, and of tools, that make the fingerprint."""
MAX_OPENING_BYTES = 64
"""The same of a text that is completed."""
MAX_WAITING = 32
_EMBEDDING = re.compile(rb'"(?:embedding|float|base64)"\s*:\s*\[*\s*(?:"([^"]*)"|([-+0-9.eE,\s]+))')
"""First embedding of a response, in base64 or as numbers."""
_UNPARSED_CALLS = ("<tool_call>", "[TOOL_CALLS]", "<function=", "<|tool_call", "<|python_tag|>")
"""Beginnings of tool calls in a text, which are calls that no parser could read."""


class _Capture(msgspec.Struct, frozen=True, eq=False):
    """Request that waits to be read."""

    of_replica: CellKey
    of_tenant: CellKey
    prompt: Raw
    tools: Raw
    answer: bytes
    is_stream: bool
    is_chat: bool
    generates: bool


class TrafficSampler:
    """Samples requests, at most one of a tenant at a model in `INTERVAL_S`. Use it from one event loop.

    Args:
        add_signals: Counts the signals of a request of a replica and of a tenant.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        add_signals: Callable[[CellKey, CellKey, RequestSignals], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._add_signals = add_signals
        self._clock = clock
        self.due_at = defaultdict[tuple[str, str], float](float)
        """When the next request may be sampled, by requested model and project."""
        self._free_at = 0.0
        self._waiting: deque[_Capture] = deque()
        self._wake = asyncio.Event()

    def watch(self, writer: ResponseWriter, context: RequestContext) -> ResponseWriter:
        """Return a writer that keeps the answer of a sampled request if it is read; otherwise the same one."""
        if not _reads_answer(context):
            return writer
        return AnswerWriter(writer, context, MAX_ANSWER_BYTES, self.add)

    def add(self, context: RequestContext, answer: bytes = b"", *, is_stream: bool = False) -> None:
        """Sample an ended request, unless too many are or one of its tenant was a moment ago."""
        now, principal, trace = self._clock(), context.principal, context.trace
        if len(self.due_at) >= MAX_STREAMS:
            self.due_at.clear()
        key = (context.fields.model, principal.project)
        is_complete = context.status == "completed"
        is_counted = is_complete and context.is_measured and not context.exchange.internal_route
        if not is_counted or now < max(self.due_at[key], self._free_at):
            return
        if not answer and _reads_answer(context):
            return  # its writer adds it
        self.due_at[key] = now + INTERVAL_S
        fields = context.fields
        is_small = fields.prompt_bytes <= MAX_PROMPT_BYTES or not context.api.generates
        if not is_small or len(self._waiting) >= MAX_WAITING:
            return
        self._free_at = max(self._free_at, now - 1.0) + MIN_GAP_S
        tools = fields.raw.get("tools", Raw(b"null"))
        self._waiting.append(
            _Capture(
                CellKey(trace.model, trace.version, context.replica_name),
                CellKey(trace.model, tenant=principal.tenant),
                fields.raw[fields.prompt_field] if context.api.generates else Raw(),
                tools if len(bytes(tools)) <= MAX_TOOL_BYTES else Raw(b"null"),
                answer,
                is_stream,
                context.api is CHAT,
                context.api.generates,
            )
        )
        self._wake.set()

    async def run(self) -> None:
        """Read the waiting requests, one at a time, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                capture = self._waiting.popleft()
                signals = await run_in_daemon_thread(_read_signals, capture)
                self._add_signals(capture.of_replica, capture.of_tenant, signals)


def _reads_answer(context: RequestContext) -> bool:
    """Return whether the answer of a sampled request is read."""
    fields = context.fields
    return context.api is EMBEDDINGS or ("tools" in fields.raw and fields.choice_count == 1)


def _read_signals(capture: _Capture) -> RequestSignals:
    if not capture.generates:
        return RequestSignals(embedding=_read_embedding(capture.answer))
    language = template = None
    try:
        text, opening = _read_prompt(capture)
        language = find_language(text) if text else None
        template = fingerprint_template(mask_values(opening))
    except (*MALFORMED_EVENT_ERRORS, RecursionError, UnicodeError):
        pass  # a prompt of another form, such as tokens
    return RequestSignals(language, template, has_valid_calls=_check_calls(capture))


def _read_prompt(capture: _Capture) -> tuple[str, bytes]:
    """Return the last text of the user, and what precedes the user's texts. Raises as a decoder does."""
    if not capture.is_chat:
        text = msgspec.json.decode(capture.prompt, type=str)
        return text, text[:MAX_OPENING_BYTES].encode(errors="replace")
    messages = msgspec.json.decode(capture.prompt, type=list[ChatMessage])
    user = next((each.text for each in reversed(messages) if each.role == "user"), "")
    system = next((each.text for each in messages[:1] if each.role != "user"), "")
    opening = system[:MAX_TEMPLATE_BYTES].encode(errors="replace")
    return user, opening + b"\0" + bytes(capture.tools)[:MAX_TEMPLATE_BYTES]


def _check_calls(capture: _Capture) -> bool | None:
    """Return whether the tool calls of an answer are valid; None if it has none."""
    if not capture.answer:
        return None
    try:
        tools: Any = msgspec.json.decode(capture.tools)
        answer = read_answer(capture.answer, is_stream=capture.is_stream, is_chat=capture.is_chat)
        if answer.tool_calls:
            return not check_calls(answer, tools)
    except (*MALFORMED_EVENT_ERRORS, RecursionError):
        return None  # also a schema that only another server accepts
    return False if any(mark in answer.text for mark in _UNPARSED_CALLS) else None


def _read_embedding(body: bytes) -> list[int]:
    """Return the buckets of the first embedding of a response; none if there is no vector."""
    found = _EMBEDDING.search(body)
    if found is None:
        return []
    try:
        if found[1] is not None:
            vector = np.frombuffer(b64decode(found[1], validate=True), "<f4")
        else:
            vector = np.array([float(each) for each in found[2].split(b",") if each.strip()])
        return project_embedding(vector)
    except ValueError:
        return []
