"""The admin API, under /admin: accounts, keys, limits, prices, usage, the audit log, requests explained."""

from argosy.gateway.admin.app import build_admin_app

__all__ = ["build_admin_app"]
