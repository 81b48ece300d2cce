"""Shadow traffic: copies of requests that another version answers too, for comparison. No client waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from argosy.gateway.pool import Pool
from argosy.gateway.principal import TIERS, Principal
from argosy.gateway.proxy.adapter_loading import find_replicas_without_adapters
from argosy.gateway.proxy.constraint_check import find_unsupporting_replicas
from argosy.gateway.request_context import RequestContext
from argosy.gateway.request_trace import RequestTrace
from argosy.gateway.version_comparison import AdapterMeter, OutcomeMeter
from argosy.http_server import ResponseTransport
from argosy.policy.rollout import Arm
from argosy.policy.traffic import ShadowCopy, ShadowSampler
from argosy.protocol import ApiError
from argosy.store import Adapter

MAX_RUNNING_COPIES = 64
"""Copies that one gateway runs at a time. Further requests are not copied."""
_LOWEST_TIER = len(TIERS) - 1

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class _Shadow(msgspec.Struct, eq=False):
    """Copies for one version of one model or adapter, while its route declares them."""

    declared: ShadowCopy
    model: str
    meter: OutcomeMeter | AdapterMeter
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

    meter: OutcomeMeter | AdapterMeter
    original: dict[int, list[int]] | None = None
    copy: dict[int, list[int]] | None = None


class ShadowTraffic:
    """Copies requests of the stable versions as the routes declare, and of adapters before a candidate has a share.

    Not thread-safe: use it from one event loop.

    A copy passes no filter, so that it is neither limited nor billed, and has no explanation. It is queued in the
    lowest tier of its version's pool, and dropped if requests wait there already.
    """

    def __init__(
        self,
        outcomes: OutcomeMeter | None,
        adapter_meter: AdapterMeter | None,
        execute: Callable[[RequestContext], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        """Create the component.

        Args:
            outcomes: Measures originals and copies of models; None outside of fleets.
            adapter_meter: Measures those of adapters; None without a store.
            execute: Runs an admitted request. Raises ApiError if it fails.
            clock: Returns monotonic seconds.
        """
        self._outcomes = outcomes
        self._adapter_meter = adapter_meter
        self._execute = execute
        self._clock = clock
        self._shadows: dict[Pool | str, _Shadow] = {}
        """By pool of the stable version, or by id of the adapter."""
        self._answers: dict[RequestContext, _Answers] = {}
        """Answers to compare, by original request."""

    @property
    def num_running(self) -> int:
        """Number of copies that run."""
        return sum(len(shadow.tasks) for shadow in self._shadows.values())

    def copy(self, original: RequestContext) -> None:
        """Start a copy of a request that was admitted, if the route of its pool declares that and there is room."""
        stable, version, adapter = original.pool, original.assigned_version, original.adapter
        source = stable if adapter is None else adapter.id
        meter = self._outcomes if adapter is None else self._adapter_meter
        declared = self._find_declared(source)
        if declared is None or meter is None or version is None:
            return
        if adapter is None:
            is_stable, pool = version.digest == stable.version, _find_pool(stable, declared)
        else:  # both versions are served by the same replicas
            is_stable, pool = version.digest != declared.digest, stable
            adapter = msgspec.structs.replace(adapter, digest=declared.digest)
        if not is_stable or pool is None:
            return
        shadow = self._shadows.get(source)
        if shadow is None or shadow.declared != declared:
            self._end(source)
            shadow = self._shadows[source] = _Shadow(declared, stable.model, meter, ShadowSampler())
        now, sampler = self._clock(), shadow.sampler
        num_capped = sampler.num_capped
        if not sampler.should_copy(declared, original.response_id, now):
            if sampler.num_capped > num_capped:
                meter.record_copy(stable.model, "capped")
            return
        if self.num_running >= MAX_RUNNING_COPIES or not _has_room(pool, original, now):
            shadow.dropped += 1
            meter.record_copy(stable.model, "dropped")
            return
        meter.count(original, Arm.STABLE, version.key)
        answers = None
        if _is_deterministic(original):
            answers = self._answers[original] = _Answers(meter)
        copy = _build_copy(original, pool, adapter, now)
        task = asyncio.create_task(self._run(copy, shadow, version.key, answers))
        shadow.tasks.add(task)
        task.add_done_callback(shadow.tasks.discard)

    def on_request_ended(self, original: RequestContext) -> None:
        """Record the end of a request, before its output is forgotten."""
        answers = self._answers.pop(original, None)
        if answers is not None:
            answers.original = _read_answer(original)
            _compare(original.pool.model, answers)

    def cancel_outdated(self) -> None:
        """Cancel the copies for versions that their routes do not declare any more. Call it every second."""
        for source, shadow in tuple(self._shadows.items()):
            if self._find_declared(source) != shadow.declared:
                self._end(source)

    def close(self) -> None:
        """Cancel all copies."""
        for source in tuple(self._shadows):
            self._end(source)

    def _find_declared(self, source: Pool | str) -> ShadowCopy | None:
        """Return which copies are declared. None too if a pool is not that of the stable version any more."""
        if isinstance(source, str):
            return None if self._adapter_meter is None else self._adapter_meter.find_copies(source)
        return None if source.versions is None else source.versions.route.shadow

    def _end(self, source: Pool | str) -> None:
        shadow = self._shadows.pop(source, None)
        if shadow is not None:
            shadow.end()

    async def _run(
        self,
        copy: RequestContext,
        shadow: _Shadow,
        key: tuple[str, str],
        answers: _Answers | None,
    ) -> None:
        model, meter = copy.pool.model, shadow.meter
        meter.count(copy, Arm.CANDIDATE, key)
        try:
            if copy.api.generates:
                copy.unsuitable_replicas = find_unsupporting_replicas(
                    copy.pool, copy.fields, copy.api.path
                )
            if copy.adapter is not None:
                copy.unsuitable_replicas |= find_replicas_without_adapters(copy.pool)
            await self._execute(copy)
        except ApiError as error:
            copy.record_error(error)
        except Exception:
            log.exception("shadow_copy_failed", model=model)
        finally:
            if shadow.has_ended:
                copy.status = "cancelled"
            meter.on_request_ended(copy)
            meter.record_copy(model, copy.status)
            copy.error = None  # a reference cycle, since its traceback refers to this frame
        if answers is not None:
            answers.copy = _read_answer(copy)
            _compare(model, answers)


def _compare(model: str, answers: _Answers) -> None:
    """Compare two answers once both are known and complete."""
    if answers.original and answers.copy:
        answers.meter.record_answers(model, are_equal=answers.original == answers.copy)


def _find_pool(stable: Pool, declared: ShadowCopy) -> Pool | None:
    """Return the pool that gets the copies, unless its replicas are not published yet."""
    versions = stable.versions
    return None if versions is None else versions.pools.get(declared.digest)


def _has_room(pool: Pool, original: RequestContext, now: float) -> bool:
    """Whether no other request waits at a pool, and a slot is free. A failed pool fails each copy."""
    waiting = pool.queued_requests - (pool is original.pool)  # which is sent next
    is_free = bool(pool.replicas_with_free_slots(_LOWEST_TIER, now))
    return waiting <= 0 and (is_free or pool.has_failed(now))


def _build_copy(
    original: RequestContext, pool: Pool, adapter: Adapter | None, now: float
) -> RequestContext:
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
        adapter=adapter,
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
