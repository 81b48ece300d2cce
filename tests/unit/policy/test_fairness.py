"""Accounts of tenants: what is remembered of those that are idle."""

from __future__ import annotations

from argosy.policy import TenantShares


def test_debts_of_the_idle_are_kept_beside_many_that_are_busy() -> None:
    shares = TenantShares(max_idle=10)
    for number in range(4):
        account = shares.enter(f"idle {number}", 1.0)
        account.served += 1000.0
        shares.leave(account)
    busy = [shares.enter(f"busy {number}", 1.0) for number in range(7)]
    for account in busy:
        account.served = 0.0
    once_more = shares.enter("busy 0", 1.0)
    shares.leave(once_more)
    assert [shares.enter(f"idle {number}", 1.0).served for number in range(4)] == [
        1000.0,
        2000.0,
        3000.0,
        4000.0,
    ]
