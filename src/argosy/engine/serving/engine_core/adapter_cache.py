"""LoRA adapters in the executor's memory: which are loaded, which requests wait for one, and which are evicted."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import structlog

from argosy.engine.execution.checkpoint_formats.checkpoint import checkpoint_fingerprint
from argosy.engine.serving.core_messages import AdapterReport
from argosy.model_store import hold_model, verify_model
from argosy.policy import EwmaRate
from argosy.process import return_free_memory

if TYPE_CHECKING:
    from argosy.engine.engine_request import AdapterSource

LOAD_TIMEOUT_S = 60.0
"""Time after which the requests that wait for a load fail. Its thread cannot be stopped, and may still succeed."""
MAX_LOADS = 2
"""Maximum number of loads at the same time, without those that take too long."""
MAX_BYPASS_S = 2.0
"""Time for which an adapter waits for memory while requests for the loaded adapters still start."""
FIRST_RETRY_S = 1.0
"""Time after a failed load in which requests for the adapter fail at once. Doubled by each further failure."""
MAX_RETRY_S = 60.0
MAX_FAILURES = 1024
"""Maximum number of adapters whose failures are remembered."""
RATE_HALF_LIFE_BYTES = 256e6

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


class AdapterExecutor(Protocol):
    """Part of the executor that keeps adapters."""

    def add_adapter(self, slot: int, folder: Path) -> int:
        """Load an adapter into a free slot, from any thread, and return its bytes.

        Raises:
            ValueError: The model cannot use it. The message says why.
        """
        ...

    def remove_adapter(self, slot: int) -> None:
        """Free a slot that no row uses."""
        ...


class AdapterFailedError(Exception):
    """An adapter cannot be loaded, with the code of the response."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class _Failure(NamedTuple):
    error: AdapterFailedError
    failures: int
    retry_at: float


@dataclass(slots=True, eq=False)
class _Adapter:
    source: AdapterSource
    queued_at: float
    size_bytes: int
    """Memory that it takes, or that is reserved for it."""
    used_at: float
    slot: int = 0
    """Slot in the executor. 0 while it waits for memory."""
    load: Future[int] | None = None
    """Load in progress."""
    started_at: float = 0.0
    is_late: bool = False
    """Whether the load takes too long."""
    is_pinned: bool = False
    is_preloading: bool = False
    """Whether it is loaded although no request waits for it."""
    is_draining: bool = False
    """Whether it makes room for another adapter, so that no further request starts."""
    is_unloading: bool = False
    waiters: dict[str, tuple[Future[int], float]] = field(default_factory=dict)
    """Future of the slot, and time since which the request waits, by request."""
    running: set[str] = field(default_factory=set)
    """Requests that have the slot."""

    @property
    def is_resident(self) -> bool:
        return self.slot > 0 and self.load is None

    @property
    def is_evictable(self) -> bool:
        is_needed = self.running or (self.waiters and not self.is_draining)
        return self.is_resident and not (is_needed or self.is_pinned)


class AdapterCache:
    """Adapters by their digest. Loads run in threads of their own, so that no step waits for one.

    A request gets the slot of its adapter with `acquire` and keeps it until `release`. Adapters that no request uses
    stay resident, and those that were used longest ago are evicted when memory is short. Where all of it is in use, an
    adapter waits in the order of arrival, and after `MAX_BYPASS_S` others are drained for it. Not thread-safe.

    Args:
        executor: Keeps the adapters.
        memory_bytes: Memory for all of them. Until an adapter is loaded, the size of its files is reserved for it.
    """

    def __init__(self, executor: AdapterExecutor, memory_bytes: int) -> None:
        self._executor = executor
        self._memory_bytes = memory_bytes
        self._adapters: dict[str, _Adapter] = {}
        self._by_request: dict[str, _Adapter] = {}
        self._queue: deque[_Adapter] = deque()
        """Adapters that wait for memory, in the order of their arrival."""
        self._failures: OrderedDict[str, _Failure] = OrderedDict()
        self._loading: list[_Adapter] = []
        self._used_slots: set[int] = set()
        self.used_bytes = 0
        """Memory of the loaded adapters, and that reserved for loads in progress."""
        self._has_changes = False
        self._new_failures: dict[str, tuple[str, str]] = {}
        self._rate = EwmaRate(RATE_HALF_LIFE_BYTES)
        self.loads: Counter[str] = Counter()
        """Number of loads by result: `loaded` and `failed`."""
        self.load_s = 0.0
        self.wait_s = 0.0
        """Seconds for which requests waited for adapters."""
        self.evictions = 0

    @property
    def is_busy(self) -> bool:
        """Whether `advance` and `drain_report` must be called soon."""
        is_loading = not all(each.is_late for each in self._loading)
        return self._has_changes or is_loading or bool(self._queue)

    @property
    def num_resident(self) -> int:
        """Number of loaded adapters."""
        return len(self._used_slots) - len(self._loading)

    @property
    def load_bytes_per_s(self) -> float:
        """Measured rate of loading. 0 before the first measurement."""
        return self._rate.units_per_s

    def acquire(self, request_id: str, source: AdapterSource, now: float) -> Future[int]:
        """Return the future of the adapter's slot, which is loaded if it is not resident.

        Its exception is an `AdapterFailedError`. Call `release` when the request has ended, whatever the result.
        """
        slot: Future[int] = Future()
        adapter, failure = self._adapters.get(source.digest), self._failures.get(source.digest)
        if failure is not None and (now < failure.retry_at or (adapter and adapter.is_late)):
            slot.set_exception(failure.error)
            return slot
        if adapter is None:
            problem = self._find_obstacle(source)
            if problem is not None:
                slot.set_exception(problem)
                return slot
            adapter = self._enqueue(source, now)
        adapter.is_unloading = False
        self._by_request[request_id] = adapter
        adapter.waiters[request_id] = slot, now
        self._grant(adapter, now)
        return slot

    def release(self, request_id: str, now: float) -> None:
        """Give up the slot of a request, or its place among those that wait for it."""
        adapter = self._by_request.pop(request_id, None)
        if adapter is None:
            return
        adapter.waiters.pop(request_id, None)
        if request_id in adapter.running:
            adapter.running.discard(request_id)
            adapter.used_at = now
        self._remove_if_unloading(adapter)

    def preload(self, source: AdapterSource, *, is_pinned: bool, now: float) -> None:
        """Load an adapter before its first request. The next report has the result.

        A pinned adapter is not evicted until it is unloaded.
        """
        self._failures.pop(source.digest, None)
        self._has_changes = True
        adapter = self._adapters.get(source.digest)
        if adapter is None:
            problem = self._find_obstacle(source)
            if problem is not None:
                self._new_failures[source.digest] = str(problem), problem.code
                return
            adapter = self._enqueue(source, now)
        adapter.is_pinned |= is_pinned
        adapter.is_preloading = not adapter.is_resident
        adapter.is_unloading = False

    def unload(self, digest: str) -> None:
        """Remove an adapter and its pin as soon as no request uses it."""
        adapter = self._adapters.get(digest)
        if adapter is None:
            return
        adapter.is_pinned = adapter.is_preloading = False
        adapter.is_unloading = True
        self._remove_if_unloading(adapter)

    def drop_unused(self) -> None:
        """Remove the adapters that no request uses and that are not pinned, without a report."""
        for adapter in list(self._adapters.values()):
            if adapter.is_evictable:
                self._remove(adapter)
        self._has_changes = False

    def advance(self, now: float) -> None:
        """Publish finished loads, start those that have room, and fail those that take too long."""
        if not self._loading and not self._queue:
            return
        for adapter in self._loading.copy():
            if adapter.load is not None and adapter.load.done():
                self._finish_load(adapter, adapter.load, now)
            elif not adapter.is_late and now - adapter.started_at > LOAD_TIMEOUT_S:
                adapter.is_late = True
                problem = f"its files were not read within {LOAD_TIMEOUT_S:g} s"
                self._fail(adapter, _failed(adapter.source, problem), now)
        for adapter in self._adapters.values():
            adapter.is_draining = False
        self._start_loads(now)
        for adapter in self._adapters.values():
            self._grant(adapter, now)

    def drain_report(self) -> AdapterReport | None:
        """Return which adapters are resident and which failed since the last report, or None without a change."""
        if not self._has_changes:
            return None
        self._has_changes, failures, self._new_failures = False, self._new_failures, {}
        resident = {
            digest: each.size_bytes for digest, each in self._adapters.items() if each.is_resident
        }
        return AdapterReport(resident, failures)

    def _enqueue(self, source: AdapterSource, now: float) -> _Adapter:
        adapter = _Adapter(source, queued_at=now, size_bytes=source.size_bytes, used_at=now)
        self._adapters[source.digest] = adapter
        self._queue.append(adapter)
        return adapter

    def _find_obstacle(self, source: AdapterSource) -> AdapterFailedError | None:
        """Return why an adapter can never have room, or None."""
        pinned = sum(each.size_bytes for each in self._adapters.values() if each.is_pinned)
        if source.size_bytes <= self._memory_bytes - pinned:
            return None
        return _failed(
            source,
            f"it takes {source.size_bytes:,} bytes, and there are {self._memory_bytes - pinned:,} for adapters that "
            "are not pinned; raise --adapter-memory",
        )

    def _grant(self, adapter: _Adapter, now: float) -> None:
        """Give the slot to the requests that wait for it, if the adapter is loaded and makes no room for others."""
        if not adapter.is_resident or adapter.is_draining or not adapter.waiters:
            return
        for request_id, (slot, since) in adapter.waiters.items():
            adapter.running.add(request_id)
            self.wait_s += now - since
            slot.set_result(adapter.slot)
        adapter.waiters.clear()
        adapter.used_at = now

    def _start_loads(self, now: float) -> None:
        while self._queue and sum(not each.is_late for each in self._loading) < MAX_LOADS:
            adapter = self._queue[0]
            if not adapter.waiters and not adapter.is_preloading:
                del self._adapters[self._queue.popleft().source.digest]
                continue
            is_overdue = now - adapter.queued_at >= MAX_BYPASS_S
            if not self._make_room(adapter.size_bytes, now, drains=is_overdue):
                return
            self._queue.popleft()
            self._start_load(adapter, now)

    def _make_room(self, size_bytes: int, now: float, *, drains: bool) -> bool:
        """Evict the adapters that were used longest ago, and return whether there is room.

        Nothing is evicted if that is not enough. If `drains`, adapters in use then start no further request.
        """
        missing = self.used_bytes + size_bytes - self._memory_bytes
        resident = [each for each in self._adapters.values() if each.is_resident]
        candidates = sorted(
            (each for each in resident if not each.is_pinned),
            key=lambda each: (len(each.running), each.used_at),
        )
        chosen = []
        for each in candidates:
            if missing <= 0:
                break
            if each.is_evictable or drains:
                each.is_draining = drains
                chosen.append(each)
                missing -= each.size_bytes
        if missing > 0 or not all(each.is_evictable for each in chosen):
            return False
        for each in chosen:
            self.evictions += 1
            self._remove(each)
            if each.waiters:
                waiting = self._enqueue(each.source, now)
                waiting.waiters = each.waiters
                self._by_request |= dict.fromkeys(each.waiters, waiting)
        return True

    def _start_load(self, adapter: _Adapter, now: float) -> None:
        slot = next(n for n in range(1, len(self._used_slots) + 2) if n not in self._used_slots)
        self._used_slots.add(slot)
        self._loading.append(adapter)
        self.used_bytes += adapter.size_bytes
        load: Future[int] = Future()
        adapter.slot, adapter.load, adapter.started_at = slot, load, now

        def run() -> None:
            try:
                size_bytes = _load(self._executor, slot, adapter.source)
                return_free_memory()  # what was needed to read and pack it
                load.set_result(size_bytes)
            except BaseException as error:  # noqa: BLE001 - the result of the load
                load.set_exception(error)

        threading.Thread(target=run, name="adapter-load", daemon=True).start()

    def _finish_load(self, adapter: _Adapter, load: Future[int], now: float) -> None:
        adapter.load, adapter.is_late, duration_s = None, False, now - adapter.started_at
        self._loading.remove(adapter)
        self._has_changes = True
        self.load_s += duration_s
        error = load.exception()
        if error is not None:
            self.used_bytes -= adapter.size_bytes
            self._used_slots.discard(adapter.slot)
            del self._adapters[adapter.source.digest]
            self._fail(adapter, _describe_failure(adapter.source, error), now)
            return
        self._failures.pop(adapter.source.digest, None)
        self.used_bytes += load.result() - adapter.size_bytes
        adapter.size_bytes, adapter.used_at, adapter.is_preloading = load.result(), now, False
        self.loads["loaded"] += 1
        self._rate.add(adapter.size_bytes, max(duration_s, 1e-6))
        log.info(
            "adapter_loaded",
            adapter=adapter.source.digest,
            bytes=adapter.size_bytes,
            seconds=round(duration_s, 3),
        )
        self._remove_if_unloading(adapter)
        self._make_room(0, now, drains=False)  # it may take more than was reserved

    def _fail(self, adapter: _Adapter, error: AdapterFailedError, now: float) -> None:
        """Fail the requests that wait for an adapter, and those of the next seconds."""
        digest = adapter.source.digest
        earlier = self._failures.pop(digest, None)
        count = 1 if earlier is None else earlier.failures + 1
        wait_s = min(FIRST_RETRY_S * 2.0 ** (count - 1), MAX_RETRY_S)
        self._failures[digest] = _Failure(error, count, now + wait_s)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)
        self.loads["failed"] += 1
        self._new_failures[digest] = str(error), error.code
        self._has_changes = True
        log.warning("adapter_load_failed", adapter=digest, error=str(error), retry_in_s=wait_s)
        for request_id, (slot, _) in adapter.waiters.items():
            del self._by_request[request_id]
            slot.set_exception(error)
        adapter.waiters.clear()

    def _remove_if_unloading(self, adapter: _Adapter) -> None:
        if adapter.is_unloading and adapter.is_evictable and not adapter.waiters:
            self._remove(adapter)

    def _remove(self, adapter: _Adapter) -> None:
        """Remove a loaded adapter that no request uses, and return its memory to the system."""
        self._executor.remove_adapter(adapter.slot)
        self._used_slots.discard(adapter.slot)
        self.used_bytes -= adapter.size_bytes
        del self._adapters[adapter.source.digest]
        self._has_changes = True
        return_free_memory()
        log.info("adapter_removed", adapter=adapter.source.digest, bytes=adapter.size_bytes)


def _load(executor: AdapterExecutor, slot: int, source: AdapterSource) -> int:
    """Load an adapter if its files are those of its digest, and return its bytes.

    Raises:
        ValueError: They are not, or the model cannot use it.
    """
    folder = Path(source.folder)
    with hold_model(folder):
        state = checkpoint_fingerprint(folder)
        verify_model(folder, source.digest)
        size_bytes = executor.add_adapter(slot, folder)
    if checkpoint_fingerprint(folder) != state:
        executor.remove_adapter(slot)
        raise OSError(f"the files of {folder} changed while they were read")
    return size_bytes


def _describe_failure(source: AdapterSource, error: BaseException) -> AdapterFailedError:
    """Return the error of a response. Wrong files fail on every replica, and anything else may pass."""
    reason = str(error) or type(error).__name__
    if isinstance(error, ValueError):
        return AdapterFailedError(
            f"the adapter {source.folder} cannot be used: {reason}", "invalid_adapter"
        )
    return _failed(source, reason)


def _failed(source: AdapterSource, reason: str) -> AdapterFailedError:
    return AdapterFailedError(
        f"the adapter {source.digest} cannot be loaded: {reason}", "adapter_load_failed"
    )
