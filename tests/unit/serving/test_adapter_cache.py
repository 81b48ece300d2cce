"""Adapters in the engine's memory: loads in threads, waiting, eviction, pins, failures and unloading."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.adapter_folders import adapter_source, write_adapter

from argosy.engine import AdapterSource
from argosy.engine.serving.engine_core.adapter_cache import (
    LOAD_TIMEOUT_S,
    MAX_BYPASS_S,
    MAX_LOADS,
    AdapterCache,
    AdapterFailedError,
)


class FakeExecutor:
    """Executor whose adapters are only counted. The gate holds back loads of some folders."""

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}
        self.removed: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.slow: set[str] = set()
        self.gate = threading.Event()

    def add_adapter(self, slot: int, folder: Path) -> int:
        assert slot >= 1
        assert slot not in self.slots
        if folder.name in self.slow:
            self.gate.wait()
        if folder.name in self.broken:
            raise self.broken[folder.name]
        self.slots[slot] = folder.name
        return (folder / "adapter_model.safetensors").stat().st_size

    def remove_adapter(self, slot: int) -> None:
        self.removed.append(self.slots.pop(slot))


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def cache(executor: FakeExecutor) -> AdapterCache:
    """Cache with room for three adapters."""
    return AdapterCache(executor, 30)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterSource]:
    """Adapters of 10 bytes, and a large one."""
    root = tmp_path_factory.mktemp("adapters")
    small = {name: adapter_source(write_adapter(root / name, name)) for name in "abcdef"}
    return small | {"large": adapter_source(write_adapter(root / "large", "large", 31))}


def settle(cache: AdapterCache, now: float) -> None:
    """Advance until all loads that can end have ended."""
    cache.advance(now)
    while any(thread.name == "adapter-load" for thread in threading.enumerate()):
        for thread in threading.enumerate():
            if thread.name == "adapter-load":
                thread.join()
        cache.advance(now)
    cache.advance(now)


def failure_of(slot: Future[int]) -> tuple[str, str]:
    error = slot.exception(timeout=0)
    assert isinstance(error, AdapterFailedError)
    return error.code, str(error)


def test_requests_share_slot_and_idle_adapters_leave_in_order_of_last_use(
    cache: AdapterCache, executor: FakeExecutor, sources: dict[str, AdapterSource]
) -> None:
    slots = [cache.acquire(f"a{n}", sources["a"], 0.0) for n in range(2)]
    assert not slots[0].done()
    settle(cache, 0.0)
    assert slots[0].result(0) == slots[1].result(0)
    for _ in range(2):  # it is loaded already
        cache.preload(sources["a"], is_pinned=False, now=0.0)
        assert cache.is_busy
        report = cache.drain_report()
        assert report is not None
        assert report.resident == {sources["a"].digest: 10}
        assert not cache.is_busy
    for now, name in enumerate("bca", 1):
        cache.acquire(name, sources[name], float(now))
        settle(cache, float(now))
        cache.release(name, float(now))
    cache.acquire("d", sources["d"], 9.0)
    settle(cache, 9.0)
    assert executor.removed == ["b"]
    cache.preload(sources["c"], is_pinned=True, now=10.0)
    cache.acquire("e", sources["e"], 11.0)
    settle(cache, 11.0)
    assert executor.removed == ["b"]  # a is in use, c is pinned, and d is in use
    cache.release("a0", 12.0)
    cache.release("a1", 12.0)
    settle(cache, 12.0)
    assert executor.removed == ["b", "a"]
    assert cache.used_bytes == 30
    assert failure_of(cache.acquire("x", sources["large"], 13.0))[0] == "adapter_load_failed"


def test_waiting_adapter_is_bypassed_for_a_while_and_then_others_drain(
    cache: AdapterCache, executor: FakeExecutor, sources: dict[str, AdapterSource]
) -> None:
    for name in "abc":
        cache.acquire(name, sources[name], 0.0)
    settle(cache, 0.0)
    waiting = cache.acquire("d", sources["d"], 1.0)
    settle(cache, 1.0)
    assert cache.acquire("a2", sources["a"], 1.5).done()
    settle(cache, 1.0 + MAX_BYPASS_S)
    held = {name: cache.acquire(f"{name}3", sources[name], 3.1) for name in "abc"}
    assert [name for name, slot in held.items() if not slot.done()] == ["b"]
    cache.release("b", 4.0)
    settle(cache, 4.0)
    assert waiting.done()
    assert not held["b"].done()
    cache.release("d", 5.0)
    settle(cache, 5.0)
    assert held["b"].done()
    assert executor.removed == ["b", "d"]


def test_failure_ends_own_requests_only_and_later_ones_at_once_for_a_while(
    cache: AdapterCache, executor: FakeExecutor, sources: dict[str, AdapterSource]
) -> None:
    executor.broken = {"a": ValueError("target_modules is odd"), "b": OSError("disk")}
    slots = {name: cache.acquire(name, sources[name], 0.0) for name in "abc"}
    settle(cache, 0.0)
    code, message = failure_of(slots["a"])
    assert code == "invalid_adapter"
    assert "target_modules is odd" in message
    assert failure_of(slots["b"])[0] == "adapter_load_failed"
    assert slots["c"].result(0)
    report = cache.drain_report()
    assert report is not None
    assert report.resident == {sources["c"].digest: 10}
    assert report.failures.keys() == {sources["a"].digest, sources["b"].digest}
    for now, retries in [(0.9, False), (1.1, True), (2.9, False), (3.2, True)]:
        slot = cache.acquire(f"{now}", sources["a"], now)
        assert slot.done() is not retries
        settle(cache, now)
        assert failure_of(slot)
    executor.broken = {}
    cache.preload(sources["a"], is_pinned=False, now=3.3)  # an operator repaired it
    settle(cache, 3.3)
    assert cache.acquire("again", sources["a"], 3.3).result(0)
    assert dict(cache.loads) == {"failed": 4, "loaded": 2}


def test_changed_files_are_not_loaded_as_the_version_that_was_asked_for(
    cache: AdapterCache, tmp_path: Path
) -> None:
    source = adapter_source(write_adapter(tmp_path / "a", "old"))
    write_adapter(tmp_path / "a", "new")
    slot = cache.acquire("r", source, 0.0)
    settle(cache, 0.0)
    assert failure_of(slot)[0] == "invalid_adapter"


def test_slow_loads_fail_after_a_while_and_delay_no_others(
    cache: AdapterCache, executor: FakeExecutor, sources: dict[str, AdapterSource]
) -> None:
    executor.slow = {"a", "b"}
    slow = [cache.acquire(name, sources[name], 0.0) for name in "ab"]
    assert len(slow) == MAX_LOADS
    cache.advance(0.0)
    other = cache.acquire("c", sources["c"], 1.0)
    cache.advance(LOAD_TIMEOUT_S + 1)
    assert [failure_of(slot)[0] for slot in slow] == ["adapter_load_failed"] * 2
    assert failure_of(cache.acquire("a2", sources["a"], LOAD_TIMEOUT_S + 9.0))
    cache.advance(LOAD_TIMEOUT_S + 9.0)
    executor.gate.set()
    settle(cache, LOAD_TIMEOUT_S + 9.0)
    assert other.result(0)
    assert cache.acquire("a3", sources["a"], LOAD_TIMEOUT_S + 10.0).done()


def test_unloaded_adapter_leaves_with_its_last_request(
    cache: AdapterCache, executor: FakeExecutor, sources: dict[str, AdapterSource]
) -> None:
    cache.preload(sources["a"], is_pinned=True, now=0.0)
    cache.acquire("r", sources["a"], 0.0)
    settle(cache, 0.0)
    cache.unload(sources["a"].digest)
    assert executor.removed == []
    cache.release("r", 1.0)
    assert executor.removed == ["a"]
    assert (cache.used_bytes, cache.num_resident, cache.evictions) == (0, 0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["acquire", "acquire", "release", "preload", "unload"]),
            st.sampled_from("abcdef"),
            st.booleans(),
            st.sampled_from([0.0, 0.5, 3.0]),
        ),
        max_size=30,
    )
)
def test_memory_is_bounded_and_no_adapter_leaves_a_running_request(
    sources: dict[str, AdapterSource], events: list[tuple[str, str, bool, float]]
) -> None:
    executor, now = FakeExecutor(), 0.0
    cache = AdapterCache(executor, 30)
    open_requests: list[tuple[str, str, Future[int]]] = []
    for number, (event, name, is_settled, wait_s) in enumerate(events):
        now += wait_s
        if event == "acquire":
            slot = cache.acquire(str(number), sources[name], now)
            open_requests.append((str(number), name, slot))
        elif event == "release" and open_requests:
            cache.release(open_requests.pop(number % len(open_requests))[0], now)
        elif event == "preload":
            cache.preload(sources[name], is_pinned=False, now=now)
        elif event == "unload":
            cache.unload(sources[name].digest)
        if is_settled:
            settle(cache, now)
        assert cache.used_bytes <= 30
        for _, adapter, slot in open_requests:
            assert not slot.done() or executor.slots[slot.result()] == adapter
    while open_requests:  # everyone gets a turn as long as requests end
        now += MAX_BYPASS_S
        settle(cache, now)
        running = [request for request in open_requests if request[2].done()]
        assert running
        for request in running:
            open_requests.remove(request)
            cache.release(request[0], now)
    settle(cache, now)
    cache.drain_report()
    assert not cache.is_busy
