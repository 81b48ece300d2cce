"""Decisions, pure: no clock, no input or output, no torch."""

from argosy.policy.fairness import INPUT_PRICE, OUTPUT_PRICE, Account, TenantShares

__all__ = ["INPUT_PRICE", "OUTPUT_PRICE", "Account", "TenantShares"]
