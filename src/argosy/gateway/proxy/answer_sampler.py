"""Samples answers of projects that permit it, and grades them. No client waits for that.

An answer is chosen when its request arrives, and kept while it is sent. When it has ended, a thread removes personal
data from it and applies fixed checks. A judge may grade what passes them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from hashlib import blake2b

import msgspec
import structlog
from msgspec import Raw

from argosy.deployment import QualityConfig
from argosy.gateway.backends import MALFORMED_EVENT_ERRORS
from argosy.gateway.content_session import ContentSession
from argosy.gateway.proxy.answer_writer import AnswerWriter, read_answer
from argosy.gateway.proxy.response_writers import ResponseWriter
from argosy.gateway.request_context import CHAT, RequestContext
from argosy.gateway.request_fields import ChatMessage
from argosy.policy.content import DETECTORS, Matcher, Rule, TextFilter
from argosy.process import run_in_daemon_thread
from argosy.quality import (
    MAX_JUDGED_CHARS,
    ModelClient,
    QualityRunError,
    SendRequest,
    build_grading,
    check_answer,
    read_score,
)
from argosy.store import Quality, QualityConsent, QualitySample, SampledTexts, StoreError

MAX_PROMPT_BYTES = 1 << 16
"""Size of the largest prompt whose answer is sampled."""
MAX_ANSWER_BYTES = 1 << 18
"""Size of the events of the longest answer that is sampled."""
MAX_WAITING = 32
"""Answers that wait to be graded. Further ones are not sampled."""
_CHOICES = 1 << 64

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class _Capture(msgspec.Struct, frozen=True, eq=False):
    """Sampled answer that waits to be graded."""

    sample: QualitySample
    """Without a grade."""
    tenant: str
    replica: str
    consent: QualityConsent
    prompt: Raw
    response_format: Raw
    answer: bytes
    """Events of a stream, or a body."""
    is_stream: bool
    is_chat: bool
    content: ContentSession | None


class AnswerSampler:
    """Chooses answers, and keeps them with their grades in the store. Use it from one event loop.

    Args:
        config: Settings.
        quality: Where samples are kept.
        send: Sends a request to the judge.
        on_graded: Called with each sample that was kept, its tenant and its replica.
    """

    def __init__(
        self,
        config: QualityConfig,
        quality: Quality,
        send: SendRequest,
        on_graded: Callable[[QualitySample, str, str], None],
    ) -> None:
        self._config = config
        self._quality = quality
        self._send = send
        self._on_graded = on_graded
        self._waiting: deque[_Capture] = deque()
        self._wake = asyncio.Event()
        self._minute = 0
        self._num_chosen = 0
        """Samples of the current minute."""
        self._problem = ""
        """Last logged reason why samples are not graded or kept."""

    def watch(self, writer: ResponseWriter, context: RequestContext) -> ResponseWriter:
        """Return a writer that keeps the answer as well if it is sampled; otherwise the same one."""
        fields, exchange = context.fields, context.exchange
        if (
            exchange.internal_route
            or exchange.forbids_storage
            or bytes(fields.raw.get("store", b"")) == b"false"
            or fields.choice_count != 1
            or not 0 < fields.prompt_bytes <= MAX_PROMPT_BYTES
            or not self._choose(context.response_id)
        ):
            return writer
        return AnswerWriter(writer, context, MAX_ANSWER_BYTES, self.add)

    def add(self, context: RequestContext, answer: bytes, *, is_stream: bool) -> None:
        """Let a complete answer be graded, unless too many wait already."""
        if len(self._waiting) >= MAX_WAITING:
            return
        fields, principal = context.fields, context.principal
        sample = QualitySample(
            id=context.response_id,
            organisation=principal.organisation,
            project=principal.project,
            model=context.model,
            version=context.trace.version,
            score=0.0,
            has_passed=False,
            created_at=time.time(),
        )
        self._waiting.append(
            _Capture(
                sample,
                principal.tenant,
                context.replica_name,
                principal.quality,
                fields.raw[fields.prompt_field],
                fields.raw.get("response_format", Raw(b"null")),
                answer,
                is_stream,
                context.api is CHAT,
                context.content,
            )
        )
        self._wake.set()

    async def run(self) -> None:
        """Grade the waiting answers, one at a time, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                capture = self._waiting.popleft()
                try:
                    sample, texts = await self._grade(capture)
                    is_kept = await run_in_daemon_thread(self._quality.add_sample, sample, texts)
                except (StoreError, *MALFORMED_EVENT_ERRORS) as error:
                    self._report(f"a sample is not kept: {error}")
                    continue
                if is_kept:
                    self._on_graded(sample, capture.tenant, capture.replica)

    def _choose(self, response_id: str) -> bool:
        """Return whether an answer is sampled, by the hash of its id and the samples of this minute."""
        digest = blake2b(response_id.encode(), digest_size=8).digest()
        if int.from_bytes(digest) >= self._config.sample_ratio * _CHOICES:
            return False
        minute = int(time.time() / 60.0)
        if minute != self._minute:
            self._minute, self._num_chosen = minute, 0
        self._num_chosen += 1
        return self._num_chosen <= self._config.max_samples_per_minute

    async def _grade(self, capture: _Capture) -> tuple[QualitySample, SampledTexts]:
        """Return a sample with its grade, and its texts without personal data. Raises MALFORMED_EVENT_ERRORS."""
        question, answer, problem = await run_in_daemon_thread(_read_capture, capture)
        if capture.content is not None:
            question, answer = await capture.content.filter_stored([question, answer])
        question, answer = question[-MAX_JUDGED_CHARS:], answer[:MAX_JUDGED_CHARS]
        judge, score, reason = "", 0.0 if problem else 1.0, problem
        has_passed = not problem
        config = self._config.judge
        if has_passed and config is not None and capture.consent == "judged":
            body = build_grading(config.rubric, question, answer)
            try:
                judged = await ModelClient(config.model, self._send).answer(body)
                score, reason = read_score(judged.text)
            except (QualityRunError, TimeoutError) as error:
                self._report(f"the judge {config.model} gives no grade: {error}")
            else:
                judge, has_passed = config.model, score >= config.min_score
                self._problem = ""
        sample = msgspec.structs.replace(
            capture.sample, judge=judge, score=score, has_passed=has_passed
        )
        return sample, SampledTexts(reason=_redact(reason), question=question, answer=answer)

    def _report(self, problem: str) -> None:
        """Log a problem, once until another one."""
        if problem != self._problem:
            log.warning("answer_not_graded", reason=problem)
        self._problem = problem


def _read_capture(capture: _Capture) -> tuple[str, str, str]:
    """Return question and answer without personal data, and what the fixed checks find. Raises as a decoder does."""
    decode = msgspec.json.decode
    if capture.is_chat:
        messages = decode(capture.prompt, type=list[ChatMessage])
        question = next((each.text for each in reversed(messages) if each.role == "user"), "")
    else:
        question = decode(capture.prompt, type=str)
    answer = read_answer(capture.answer, is_stream=capture.is_stream, is_chat=capture.is_chat)
    text = answer.text
    if answer.tool_calls:
        calls = msgspec.json.encode(answer.tool_calls).decode()
        text = f"{text}\n{calls}" if text else calls
    problem = check_answer(answer, decode(capture.response_format))
    return _redact(question), _redact(text), problem


@cache
def _matcher() -> Matcher:
    return Matcher([Rule(each, "redact") for group in DETECTORS.values() for each in group])


def _redact(text: str) -> str:
    text_filter = TextFilter(_matcher())
    return text_filter.feed(text) + text_filter.flush()
