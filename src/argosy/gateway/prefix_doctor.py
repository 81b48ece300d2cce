"""Finds out why prompts miss the prefix cache, from a sample of the requests or all of some for a limited time.

Prompts wait in a short queue until a thread has outlined and compared them. Only hashes are kept then, whose keys
differ between tenants and never leave the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec
import structlog
from msgspec import Raw

from argosy.gateway.pool import compute_cache_scope
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import CHAT, RequestContext
from argosy.gateway.request_fields import TOOL_FIELDS
from argosy.policy import Rates
from argosy.policy.prefix_diagnosis import (
    PrefixDiagnosis,
    PrefixReport,
    PrefixTally,
    PromptMemory,
    PromptSegment,
    SegmentKind,
    ServedPrompt,
    diagnose_prompt,
    outline_prompt,
)
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError

SAMPLED_PERIOD_S = 30.0
"""Length of the periods of which a share is sampled, so that the turns of a conversation are sampled together."""
_PERIODS = 10_007
MAX_WATCH_S = 3600.0
MAX_WATCHES = 64
MAX_PROMPT_BYTES = 1 << 20
"""Size of the largest request whose prompt is examined."""
MAX_QUEUED_BYTES = 16 << 20
MAX_QUEUED = 128
MAX_QUEUED_OF_TENANT = 64
MAX_TALLIES = 256
"""Projects and models of which sums are kept: those that had a prompt last."""
_KINDS: dict[str, SegmentKind] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class PrefixWatch(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose prompts are all examined for some time."""

    organisation: str | None
    """Id of their organisation. None for all."""
    project: str | None
    """Id of their project. None for all."""
    model: str | None
    """Name of the model that answers. None for all."""
    until: float
    """End, in seconds since the epoch."""

    def covers(self, organisation: str | None, project: str | None, model: str | None) -> bool:
        """Return whether requests are among those of the watch."""
        return (
            self.organisation in {None, organisation}
            and self.project in {None, project}
            and self.model in {None, model}
        )


class _Owner(msgspec.Struct, frozen=True):
    """Project and model of a prompt."""

    organisation: str
    project: str
    model: str


class _Capture(msgspec.Struct, frozen=True, eq=False):
    """Request whose prompt waits to be examined."""

    owner: _Owner
    tenant: str
    messages: Raw
    """The messages, or the text of a completion."""
    tools: Sequence[Raw]
    is_chat: bool
    session: str
    size_bytes: int
    weight: float
    """Number of requests that it stands for."""
    rates: Rates
    prefill_tokens_per_s: float
    facts: dict[str, Any]
    """Fields of `ServedPrompt` beside the outline and the conversation."""


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: Any = None
    tool_calls: Any = None


class PrefixDoctor:
    """Examines prompts of ended requests. Use it from one event loop."""

    def __init__(self, sample_ratio: float) -> None:
        self.sample_ratio = sample_ratio
        self._watches: list[PrefixWatch] = []
        self._queue: list[_Capture] = []
        self._queued_bytes = 0
        self._queued_by_tenant: Counter[str] = Counter()
        self._wake = asyncio.Event()
        self._tallies: OrderedDict[_Owner, PrefixTally] = OrderedDict()
        """Sums, those with the latest prompt at the end."""
        self._memory = PromptMemory()
        """Used by the examining thread only."""
        self._secret = secrets.token_bytes(32)

    def add(self, context: RequestContext) -> None:
        """Queue the prompt of an ended request, if it is to be examined."""
        trace, fields = context.trace, context.fields
        if not (trace.attempts and trace.tokens.prompt_tokens and context.api.generates):
            return
        attempt = trace.attempts[-1]
        is_single = fields.prompt_count == 1 and not attempt.delivered_tokens
        if not is_single or "resume" in fields.raw or context.is_copy:
            return
        principal, now = context.principal, time.time()
        weight = self._find_weight(principal, trace.model, now)
        if not weight:
            return
        owner = _Owner(principal.organisation, principal.project, trace.model)
        if (
            fields.body_bytes > MAX_PROMPT_BYTES
            or self._queued_bytes + fields.body_bytes > MAX_QUEUED_BYTES
            or len(self._queue) >= MAX_QUEUED
            or self._queued_by_tenant[principal.tenant] >= MAX_QUEUED_OF_TENANT
        ):
            self._find_tally(owner, now).skipped_requests += 1
            return
        replica = context.pool.replicas.get(attempt.replica)
        content = context.pool.model if context.adapter is None else context.adapter.digest
        scope = f"{context.pool.version}\0{content}"
        sent_at = attempt.chosen_at if attempt.sent_at is None else attempt.sent_at
        computed_at = attempt.first_token_at or trace.ended_at or sent_at
        capture = _Capture(
            owner=owner,
            tenant=principal.tenant,
            messages=fields.raw[fields.prompt_field],
            tools=[fields.raw[name] for name in TOOL_FIELDS if name in fields.raw],
            is_chat=context.api is CHAT,
            session=fields.session_id,
            size_bytes=fields.body_bytes,
            weight=weight,
            rates=context.rates,
            prefill_tokens_per_s=0.0 if replica is None else replica.load.prefill_tokens_per_s,
            facts={
                "scope": compute_cache_scope(fields, principal.cache_domain, scope),
                "prompt_tokens": trace.tokens.prompt_tokens,
                "cached_tokens": trace.tokens.cached_tokens,
                "replica": attempt.replica,
                "cache_resets": 0 if replica is None else replica.cache_resets,
                "is_cache_full": replica is not None and replica.is_cache_full,
                "sent_at": sent_at,
                "computed_at": computed_at,
            },
        )
        self._queue.append(capture)
        self._queued_bytes += capture.size_bytes
        self._queued_by_tenant[capture.tenant] += 1
        self._wake.set()

    async def run(self) -> None:
        """Examine queued prompts, one at a time, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                capture = self._queue.pop(0)
                self._queued_bytes -= capture.size_bytes
                self._queued_by_tenant[capture.tenant] -= 1
                if not self._queued_by_tenant[capture.tenant]:
                    del self._queued_by_tenant[capture.tenant]
                diagnosis = await run_in_daemon_thread(self._examine, capture)
                tally = self._find_tally(capture.owner, time.time())
                if diagnosis is None:
                    tally.skipped_requests += 1
                    continue
                tally.add(
                    diagnosis,
                    weight=capture.weight,
                    rates=capture.rates,
                    prefill_tokens_per_s=capture.prefill_tokens_per_s,
                )

    def watch(
        self,
        organisation: str | None,
        project: str | None,
        model: str | None,
        duration_s: float,
        actor: str,
    ) -> PrefixWatch:
        """Examine all prompts of some requests for a time, and begin their sums again.

        Args:
            organisation: Id of their organisation. None for all.
            project: Id of their project. None for all.
            model: Name of the model that answers. None for all.
            duration_s: Seconds, at most `MAX_WATCH_S`.
            actor: Name of the caller in the log.

        Raises:
            ApiError: 429 if too many watches run.
        """
        now = time.time()
        watch = PrefixWatch(
            organisation=organisation, project=project, model=model, until=now + duration_s
        )
        subject = attrgetter("organisation", "project", "model")
        self._watches = [
            each for each in self._watches if each.until > now and subject(each) != subject(watch)
        ]
        if len(self._watches) >= MAX_WATCHES:
            message = f"At most {MAX_WATCHES} examinations run at a time. Wait until one ends."
            raise ApiError(429, "overloaded", message)
        self._watches.append(watch)
        for owner in list(self._tallies):
            if watch.covers(owner.organisation, owner.project, owner.model):
                del self._tallies[owner]
        log.info(
            "prefix_examination_started",
            actor=actor,
            organisation=organisation,
            project=project,
            model=model,
            duration_s=duration_s,
        )
        return watch

    def list_watches(self, organisation: str | None) -> list[PrefixWatch]:
        """Return the running watches of an organisation, or all."""
        now = time.time()
        return [
            each
            for each in self._watches
            if each.until > now and organisation in {None, each.organisation}
        ]

    def list_reports(
        self, organisation: str | None, project: str | None, model: str | None
    ) -> list[PrefixReport]:
        """Return the reports of an organisation, a project and a model, of all where one is None; busiest first."""
        wanted = PrefixWatch(organisation=organisation, project=project, model=model, until=0)
        now = time.time()
        reports = [
            tally.report(owner.organisation or None, owner.project or None, owner.model, now)
            for owner, tally in self._tallies.items()
            if wanted.covers(owner.organisation, owner.project, owner.model)
        ]
        return sorted(reports, key=lambda each: -each.input_tokens)

    def _find_weight(self, principal: Principal, model: str, now: float) -> float:
        """Return the number of requests that a request of the tenant stands for, or 0 if it is not examined."""
        for watch in self._watches:
            if watch.until > now and watch.covers(principal.organisation, principal.project, model):
                return 1.0
        period = hash((now // SAMPLED_PERIOD_S, principal.tenant)) % _PERIODS
        return 1 / self.sample_ratio if period < self.sample_ratio * _PERIODS else 0.0

    def _find_tally(self, owner: _Owner, now: float) -> PrefixTally:
        tally = self._tallies.get(owner)
        if tally is None:
            tally = self._tallies[owner] = PrefixTally(now)
            while len(self._tallies) > MAX_TALLIES:
                self._tallies.popitem(last=False)
        self._tallies.move_to_end(owner)
        return tally

    def _examine(self, capture: _Capture) -> PrefixDiagnosis | None:
        """Diagnose a prompt and remember its outline, from a thread. None if it is malformed or has media."""
        try:
            segments = _read_segments(capture)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return None
        if segments is None:
            return None
        tenant = capture.tenant
        secret = hashlib.blake2b(tenant.encode(errors="replace"), key=self._secret).digest()
        outline = outline_prompt(segments, secret)
        identity = capture.session or str(outline.opening or "")
        conversation = (
            identity
            and hashlib.blake2b(
                identity.encode(errors="replace"), key=secret, digest_size=8
            ).digest()
        )
        prompt = ServedPrompt(outline=outline, conversation=conversation or b"", **capture.facts)
        earlier, separate = self._memory.find(tenant, prompt.scope, prompt.conversation)
        diagnosis = diagnose_prompt(prompt, earlier, separate)
        self._memory.add(tenant, prompt)
        return diagnosis


def _read_segments(capture: _Capture) -> list[PromptSegment] | None:
    """Return the parts of a prompt: system prompts at its beginning, tools, other messages.

    None if it has media, whose tokens do not follow from their bytes.

    Raises:
        DecodeError: The prompt is malformed.
    """
    if not capture.is_chat:
        prompt = msgspec.json.decode(capture.messages)
        is_text = isinstance(prompt, str)
        content = prompt.encode(errors="replace") if is_text else bytes(capture.messages)
        return [PromptSegment("text", 1, content)]
    system, messages = list[PromptSegment](), list[PromptSegment]()
    for number, message in enumerate(msgspec.json.decode(capture.messages, type=list[_Message]), 1):
        kind = _KINDS.get(message.role, "other")
        text = _render(message)
        if text is None:
            return None
        segment = PromptSegment(kind, number, text)
        (system if kind == "system" and not messages else messages).append(segment)
    tools = [
        tool
        for raw in capture.tools
        for tool in msgspec.json.decode(raw, type=list[Raw] | None) or ()
    ]
    return [
        *system,
        *(PromptSegment("tool", number, bytes(tool)) for number, tool in enumerate(tools, 1)),
        *messages,
    ]


def _render(message: _Message) -> bytes | None:
    """Return the text of a message, with calls of tools in JSON; None if it has other parts than text."""
    content = message.content
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            return None
        content = "".join(str(part.get("text", "")) for part in content)
    parts = [
        each.encode(errors="replace") if isinstance(each, str) else msgspec.json.encode(each)
        for each in (content, message.tool_calls)
        if each is not None
    ]
    return b"\n".join(parts)
