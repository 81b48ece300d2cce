"""Check of a new version with pinned prompts, before it gets any traffic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import httpx2
import msgspec
import structlog

from argosy.deployment import ExpectedText, PinnedPrompt
from argosy.fleet.control.replica_monitor import UNSUPPORTED_STATUSES, open_replica_client
from argosy.policy.rollout import CheckStatus

ANSWER_TIMEOUT_S = 120.0
RETRY_INTERVAL_S = 2.0
"""Interval at which a check without a result is repeated."""
SEED = 0
DEFAULT_PROMPTS = (
    PinnedPrompt(prompt="The capital of France is"),
    PinnedPrompt(prompt="1, 2, 3, 4, 5, 6,"),
    PinnedPrompt(prompt='{"name": "Ada", "language":'),
)
"""Prompts of pools that declare none."""
_BUSY_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses of a replica that may answer later."""
_MAX_SHOWN = 60
"""Characters of a prompt or an answer in a reason."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class CheckResult(NamedTuple):
    """Result of a check, and why. A pending one is repeated."""

    status: CheckStatus
    reason: str


_PENDING = CheckResult(CheckStatus.PENDING, "")


class _Answer(NamedTuple):
    """Answer of a replica, or the status with which it refuses the request."""

    status: int
    text: str = ""
    finish_reason: str = ""

    def __str__(self) -> str:
        if self.status == httpx2.codes.OK:
            return f"{_shorten(self.text)} ({self.finish_reason})"
        return f"status {self.status}"


class _NoAnswerError(Exception):
    """A replica cannot be reached or is busy, which says nothing about its version."""


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    message: _Message = _Message()
    finish_reason: str | None = None


class _Response(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]


async def check_pinned_prompts(
    stable_url: str | None,
    candidate_urls: Sequence[str],
    model: str,
    prompts: Sequence[PinnedPrompt] | None,
    *,
    same_weights: bool,
) -> CheckResult:
    """Send each pinned prompt to each replica of a candidate. One wrong answer is a failure.

    `stable_url` is a replica of the stable version, the reference for `expect: same`; None if none is ready. With
    `same_weights` both versions have the same weights and arithmetic, so that their answers have the same bytes.
    `prompts` is None for the default ones, and empty for no check.
    """
    if not candidate_urls:
        return CheckResult(CheckStatus.PENDING, "no replica of the candidate is ready")
    is_default = prompts is None
    prompts = DEFAULT_PROMPTS if prompts is None else prompts
    reference = [stable_url] if same_weights and stable_url is not None else []
    for prompt in prompts:
        is_compared = bool(reference) and prompt.expect == "same"
        urls = [*reference, *candidate_urls] if is_compared else candidate_urls
        try:
            answers = await asyncio.gather(*(_request_answer(url, model, prompt) for url in urls))
        except _NoAnswerError as error:
            return CheckResult(CheckStatus.PENDING, str(error))
        expected = answers.pop(0) if is_compared else None
        for url, answer in zip(candidate_urls, answers, strict=True):
            problem = _find_problem(prompt, answer, expected, is_default=is_default)
            if problem:
                shown = _shorten(_prompt_text(prompt))
                return CheckResult(CheckStatus.FAILED, f"prompt {shown} at {url}: {problem}")
    return CheckResult(CheckStatus.PASSED, _describe_pass(prompts, is_compared=bool(reference)))


def _find_problem(
    prompt: PinnedPrompt, answer: _Answer, expected: _Answer | None, *, is_default: bool
) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    if expected is not None and expected.status == answer.status in UNSUPPORTED_STATUSES:
        # Both versions refuse it, as a model of embeddings does.
        return "" if is_default else f"both versions answer it with {answer}; change the prompt"
    if expected is None and is_default and answer.status in UNSUPPORTED_STATUSES:
        return ""
    if answer.status != httpx2.codes.OK:
        return f"expected an answer, got {answer}"
    if expected is not None and answer != expected:
        return f"expected {expected}, as the stable version answers, got {answer}"
    return _find_missing_text(prompt.expect, answer) if prompt.expect != "same" else ""


def _find_missing_text(expect: ExpectedText, answer: _Answer) -> str:
    if expect.contains is not None and expect.contains not in answer.text:
        return f"expected an answer with {_shorten(expect.contains)}, got {answer}"
    if expect.regex is not None and not expect.matches(answer.text):
        return f"expected an answer that matches {_shorten(expect.regex)}, got {answer}"
    return ""


async def _request_answer(url: str, model: str, prompt: PinnedPrompt) -> _Answer:
    body: dict[str, object] = {
        "model": model,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "seed": SEED,
    }
    if prompt.messages:
        path = "/v1/chat/completions"
        body["messages"] = msgspec.to_builtins(prompt.messages)
    else:
        path, body["prompt"] = "/v1/completions", prompt.prompt
    try:
        async with open_replica_client(url, ANSWER_TIMEOUT_S) as client:
            response = await client.post(path, json=body)
    except (httpx2.HTTPError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise _NoAnswerError(f"the replica at {url} cannot be reached: {reason}") from error
    if response.status_code in _BUSY_STATUSES:
        raise _NoAnswerError(f"the replica at {url} answers {response.status_code}")
    if response.status_code != httpx2.codes.OK:
        return _Answer(response.status_code)
    try:
        choice = msgspec.json.decode(response.content, type=_Response).choices[0]
    except (msgspec.MsgspecError, IndexError):
        return _Answer(response.status_code, "", "no completion")
    text = choice.message.content or "" if prompt.messages else choice.text
    return _Answer(response.status_code, text, choice.finish_reason or "")


def _describe_pass(prompts: Sequence[PinnedPrompt], *, is_compared: bool) -> str:
    if not prompts:
        return "no pinned prompts are declared"
    same = sum(prompt.expect == "same" for prompt in prompts)
    parts = []
    if same and is_compared:
        parts.append(
            f"{same} answer{' is' if same == 1 else 's are'} the same as with the stable version"
        )
    elif same:
        parts.append(
            f"{same} prompt{' is' if same == 1 else 's are'} answered; other weights, so answers are not compared"
        )
    if declared := len(prompts) - same:
        parts.append(f"{declared} answer{' is' if declared == 1 else 's are'} as declared")
    return "; ".join(parts)


def _prompt_text(prompt: PinnedPrompt) -> str:
    return prompt.prompt if prompt.prompt is not None else prompt.messages[-1].content


def _shorten(text: str) -> str:
    shown = text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
    return repr(shown)


class PinnedPromptCheck:
    """Latest check of a candidate of one pool. Not thread-safe: use it from one event loop.

    Args:
        pool: Name of the pool.
        wake: Set when a check has a result.
    """

    def __init__(self, pool: str, wake: asyncio.Event) -> None:
        self._pool = pool
        self._wake = wake
        self._rollout = ""
        self._task: asyncio.Task[CheckResult] | None = None
        self._started_at = 0.0

    def result(self, rollout: str) -> CheckResult:
        """Return the latest result for a rollout. A check that failed to run has none."""
        task = self._task
        if task is None or rollout != self._rollout or not task.done():
            return _PENDING
        if task.cancelled() or task.exception() is not None:
            return _PENDING
        return task.result()

    def run(self, rollout: str, send: Callable[[], Awaitable[CheckResult]]) -> None:
        """Run a check unless one runs, or has a result other than pending."""
        now = time.monotonic()
        if self._task is not None and rollout == self._rollout:
            is_recent = now - self._started_at < RETRY_INTERVAL_S
            if not self._task.done() or is_recent:
                return
            if self.result(rollout).status is not CheckStatus.PENDING:
                return
        self.cancel()
        self._rollout, self._started_at = rollout, now
        self._task = asyncio.ensure_future(send())
        self._task.add_done_callback(self._on_task_ended)

    def _on_task_ended(self, task: asyncio.Task[CheckResult]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("rollout_check_failed", pool=self._pool, reason=repr(task.exception()))
        self._wake.set()

    def cancel(self) -> asyncio.Task[CheckResult] | None:
        """End and forget the check. Returns its task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        return task
