"""Memory of tenants: its sums are exact, its bounds hold, and only larger tenants lose something to others."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import MemoryEntry, TenantMemory

TENANTS = st.sampled_from("abcd")
SIZES = st.integers(0, 60)


@given(
    st.integers(0, 150),
    st.integers(0, 150),
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["add", "add_cached"]), TENANTS, SIZES),
            st.tuples(st.sampled_from(["resize", "remove"]), st.integers(0, 30), SIZES),
        ),
        max_size=60,
    ),
)
def test_sums_are_exact_and_only_the_largest_tenant_makes_room(
    max_bytes: int, max_tenant_bytes: int, steps: list[tuple[str, str | int, int]]
) -> None:
    memory = TenantMemory(max_bytes, max_tenant_bytes)
    kept: dict[int, tuple[str, int, MemoryEntry]] = {}
    """Tenant, size and entry by number, oldest first."""

    def tenant_bytes() -> Counter[str]:
        sizes: Counter[str] = Counter()
        for tenant, size, _ in kept.values():
            sizes[tenant] += size
        return sizes

    def on_evicted(key: str) -> None:
        number = int(key)
        tenant, _, entry = kept[number]
        sizes = tenant_bytes()
        assert number == min(n for n, (other, *_) in kept.items() if other == tenant)
        if tenant == requester[0]:
            assert action == "add_cached"
        else:
            assert sizes[tenant] == max(sizes.values())
            own = sizes[requester[0]] + requester[1]
            assert sizes[tenant] >= own + (action != "add_cached")
        assert entry.size_bytes == 0
        del kept[number]

    for number, (action, target, size) in enumerate(steps):
        if isinstance(target, str):
            requester = target, size
            before = dict(kept)
            add = memory.add if action == "add" else memory.add_cached
            entry = MemoryEntry(target, str(number), size, on_evicted)
            if add(entry):
                kept[number] = target, size, entry
            elif action == "add":
                sizes = tenant_bytes()
                others = sizes.total() - sizes[target]
                is_largest = all(sizes[target] + size >= each for each in sizes.values())
                assert sizes[target] + size > max_tenant_bytes or (
                    is_largest and sizes[target] + size + others > max_bytes
                )
                assert {n for n in before if before[n][0] == target} <= set(kept)
            else:
                assert len(before) == len(kept) or size <= min(max_bytes, max_tenant_bytes)
                assert size > min(max_bytes, max_tenant_bytes) or (
                    tenant_bytes().total() + size > max_bytes
                )
        elif target in kept:
            tenant, old_size, entry = kept[target]
            requester = tenant, size - old_size
            if action == "remove":
                memory.remove(entry)
                del kept[target]
            elif memory.resize(entry, size):
                kept[target] = tenant, size, entry
        sizes = tenant_bytes()
        assert memory.used_bytes == sizes.total() <= max_bytes
        assert all(each <= max_tenant_bytes for each in sizes.values())
        largest = memory.find_largest()
        assert (largest is None) == (not kept)
        assert largest is None or sizes[largest] == max(sizes.values())
