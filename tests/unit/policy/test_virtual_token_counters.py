"""Virtual token counters: debts of idle tenants are kept."""

from __future__ import annotations

from argosy.policy import VirtualTokenCounters


def test_debts_of_idle_tenants_survive_many_busy_tenants() -> None:
    counters = VirtualTokenCounters(max_idle_tenants=10)
    for number in range(4):
        counter = counters.add_request(f"idle {number}", 1.0)
        counter.served_tokens += 1000.0
        counters.remove_request(counter)
    busy = [counters.add_request(f"busy {number}", 1.0) for number in range(7)]
    for counter in busy:
        counter.served_tokens = 0.0
    second_request = counters.add_request("busy 0", 1.0)
    counters.remove_request(second_request)
    assert [counters.add_request(f"idle {number}", 1.0).served_tokens for number in range(4)] == [
        1000.0,
        2000.0,
        3000.0,
        4000.0,
    ]
