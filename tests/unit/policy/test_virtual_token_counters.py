"""Accounts of tenants: what is remembered of those that are idle."""

from __future__ import annotations

from argosy.policy import VirtualTokenCounters


def test_debts_of_the_idle_are_kept_beside_many_that_are_busy() -> None:
    shares = VirtualTokenCounters(max_idle_tenants=10)
    for number in range(4):
        account = shares.add_request(f"idle {number}", 1.0)
        account.served_tokens += 1000.0
        shares.remove_request(account)
    busy = [shares.add_request(f"busy {number}", 1.0) for number in range(7)]
    for account in busy:
        account.served_tokens = 0.0
    once_more = shares.add_request("busy 0", 1.0)
    shares.remove_request(once_more)
    assert [shares.add_request(f"idle {number}", 1.0).served_tokens for number in range(4)] == [
        1000.0,
        2000.0,
        3000.0,
        4000.0,
    ]
