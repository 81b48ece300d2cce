"""Shadow traffic: copies of requests that another version answers too, for comparison. No client waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from argosy.gateway.pool import Pool
from argosy.gateway.principal import TIERS, Principal
from argosy.gateway.proxy.constraint_check import find_unsupporting_replicas
from argosy.gateway.request_context import RequestContext
from argosy.gateway.request_trace import RequestTrace
from argosy.gateway.version_comparison import OutcomeMeter
from argosy.http_server import ResponseTransport
from argosy.policy.rollout import Arm
from argosy.policy.traffic import ShadowCopy, ShadowSampler
from argosy.protocol import ApiError

MAX_RUNNING_COPIES = 64
"""Copies that one gateway runs at a time. Further requests are not copied."""
_LOWEST_TIER = len(TIERS) - 1

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class _Shadow(msgspec.Struct, eq=False):
    """Copies for one version of one model, while its route declares them."""

    declared: ShadowCopy
    model: str
    sampler: ShadowSampler
    dropped: int = 0
    """Sampled requests that were not copied, because the version had no free slot."""
    tasks: set[asyncio.Task[None]] = msgspec.field(default_factory=set)
    has_ended: bool = False

    def end(self) -> None:
        """Cancel the copies that run."""
        self.has_ended = True
        for task in self.tasks:
            task.cancel()
        log.info(
            "shadow_ended",
            model=self.model,
            version=self.declared.digest,
            copied=self.sampler.num_copied - self.dropped,
            capped=self.sampler.num_capped,
            dropped=self.dropped,
        )


class _Answers(msgspec.Struct, eq=False):
    """Token ids by choice of a request without random sampling and of its copy; None until they are known."""

    original: dict[int, list[int]] | None = None
    copy: dict[int, list[int]] | None = None


class ShadowTraffic:
    """Copies requests of the stable versions as the routes declare. Not thread-safe: use it from one event loop.

    A copy passes no filter, so that it is neither limited nor billed, and has no explanation. It is queued in the
    lowest tier of its version's pool, and dropped if requests wait there already.
    """

    def __init__(
        self,
        outcomes: OutcomeMeter,
        execute: Callable[[RequestContext], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        """Create the component.

        Args:
            outcomes: Measures originals and copies.
            execute: Runs an admitted request. Raises ApiError if it fails.
            clock: Returns monotonic seconds.
        """
        self._outcomes = outcomes
        self._execute = execute
        self._clock = clock
        self._shadows: dict[Pool, _Shadow] = {}
        """By pool of the stable version."""
        self._answers: dict[RequestContext, _Answers] = {}
        """Answers to compare, by original request."""

    @property
    def num_running(self) -> int:
        """Number of copies that run."""
        return sum(len(shadow.tasks) for shadow in self._shadows.values())

    def copy(self, original: RequestContext) -> None:
        """Start a copy of a request that was admitted, if the route of its pool declares that and there is room."""
        stable, version = original.pool, original.assigned_version
        declared = _find_declared(stable)
        if declared is None or version is None or version.digest != stable.version:
            return
        pool = _find_pool(stable, declared)
        if pool is None:
            return
        shadow = self._shadows.get(stable)
        if shadow is None or shadow.declared != declared:
            self._end(stable)
            shadow = self._shadows[stable] = _Shadow(declared, stable.model, ShadowSampler())
        now, sampler = self._clock(), shadow.sampler
        num_capped = sampler.num_capped
        if not sampler.should_copy(declared, original.response_id, now):
            if sampler.num_capped > num_capped:
                self._outcomes.record_copy(stable.model, "capped")
            return
        if self.num_running >= MAX_RUNNING_COPIES or not _has_room(pool, now):
            shadow.dropped += 1
            self._outcomes.record_copy(stable.model, "dropped")
            return
        self._outcomes.count(original, Arm.STABLE, version.key)
        answers = None
        if _is_deterministic(original):
            answers = self._answers[original] = _Answers()
        copy = _build_copy(original, pool, now)
        task = asyncio.create_task(self._run(copy, shadow, version.key, answers))
        shadow.tasks.add(task)
        task.add_done_callback(shadow.tasks.discard)

    def on_request_ended(self, original: RequestContext) -> None:
        """Record the end of a request, before its output is forgotten."""
        answers = self._answers.pop(original, None)
        if answers is not None:
            answers.original = _read_answer(original)
            self._compare(original.pool.model, answers)

    def cancel_outdated(self) -> None:
        """Cancel the copies for versions that their routes do not declare any more. Call it every second."""
        for stable, shadow in tuple(self._shadows.items()):
            if _find_declared(stable) != shadow.declared:
                self._end(stable)

    def close(self) -> None:
        """Cancel all copies."""
        for stable in tuple(self._shadows):
            self._end(stable)

    def _end(self, stable: Pool) -> None:
        shadow = self._shadows.pop(stable, None)
        if shadow is not None:
            shadow.end()

    async def _run(
        self,
        copy: RequestContext,
        shadow: _Shadow,
        key: tuple[str, str],
        answers: _Answers | None,
    ) -> None:
        model = copy.pool.model
        self._outcomes.count(copy, Arm.CANDIDATE, key)
        try:
            if copy.api.generates:
                copy.unsuitable_replicas = find_unsupporting_replicas(
                    copy.pool, copy.fields, copy.api.path
                )
            await self._execute(copy)
        except ApiError as error:
            copy.record_error(error)
        except Exception:
            log.exception("shadow_copy_failed", model=model)
        finally:
            if shadow.has_ended:
                copy.status = "cancelled"
            self._outcomes.on_request_ended(copy)
            self._outcomes.record_copy(model, copy.status)
            copy.error = None  # a reference cycle, since its traceback refers to this frame
        if answers is not None:
            answers.copy = _read_answer(copy)
            self._compare(model, answers)

    def _compare(self, model: str, answers: _Answers) -> None:
        """Compare two answers once both are known and complete."""
        if answers.original and answers.copy:
            self._outcomes.record_answers(model, are_equal=answers.original == answers.copy)


def _find_declared(stable: Pool) -> ShadowCopy | None:
    """Return which copies the route of a model declares. None too if this pool is not the stable version any more."""
    versions = stable.versions
    return None if versions is None else versions.route.shadow


def _find_pool(stable: Pool, declared: ShadowCopy) -> Pool | None:
    """Return the pool that gets the copies, unless its replicas are not published yet."""
    versions = stable.versions
    return None if versions is None else versions.pools.get(declared.digest)


def _has_room(pool: Pool, now: float) -> bool:
    """Whether no request waits at a pool, and a slot is free. A pool that has failed as a whole fails each copy."""
    is_free = bool(pool.replicas_with_free_slots(_LOWEST_TIER, now))
    return not pool.queued_requests and (is_free or pool.has_failed(now))


def _build_copy(original: RequestContext, pool: Pool, now: float) -> RequestContext:
    exchange = original.exchange.detach(ResponseTransport(), dropped_headers=(b"x-request-id",))
    return RequestContext(
        exchange,
        original.fields,
        original.api,
        pool,
        f"{original.api.id_prefix}-{exchange.unique_id}",
        # Of no tenant, so that no share of the replica's time is charged to one.
        Principal(tier=_LOWEST_TIER, cache_domain=original.principal.cache_domain),
        tier=_LOWEST_TIER,
        deadline=original.deadline,
        trace=RequestTrace(arrived_at=now, parsed_at=now),
        started_at=time.time(),
        is_copy=True,
    )


def _is_deterministic(context: RequestContext) -> bool:
    """Whether equal versions generate the same tokens for a request."""
    raw = context.fields.raw
    temperature, seed = (
        msgspec.json.decode(raw[name]) if name in raw else None for name in ("temperature", "seed")
    )
    return temperature == 0 or seed is not None


def _read_answer(context: RequestContext) -> dict[int, list[int]] | None:
    """Return the token ids of a complete answer. None if there are none: only native replicas report them."""
    if context.status != "completed":
        return None
    delivered = context.delivered
    return {choice: delivered.token_ids(choice) for choice in delivered.token_id_pieces} or None
