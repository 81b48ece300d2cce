"""Who may come in to `argosy serve`: its store, brought up to date, and the first key where callers need one."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

from argosy.store import default_url, open_store

Auth = Literal["auto", "keys", "off"]
"""`auto`: those on this machine need no key until there is one. `keys`: always. `off`: nobody does."""


@dataclass(frozen=True, slots=True)
class Doorkeeping:
    """What was asked for."""

    store: str | None
    """URL of the database; None: the user's own."""
    auth: Auth
    host: str
    """Where it listens."""

    @property
    def url(self) -> str:
        """The database."""
        return self.store or default_url()

    @property
    def keyed(self) -> bool:
        """Whether callers need keys from the first request on."""
        return self.auth == "keys" or (self.auth == "auto" and not _is_loopback(self.host))

    def prepare(self) -> str | None:
        """Bring the tables up to date, and make an admin's key where keys are needed and nobody has any.

        That key, which nobody can be shown again. Raises ValueError, saying what to change, when the database
        cannot be used, or when others could connect and there still are no keys.
        """
        from argosy.gateway import AuthConfig, check_exposure

        store = open_store(self.url)
        try:
            store.migrate()
            made = store.accounts.first_run(actor="argosy serve") if self.keyed else None
            check_exposure(self.host, AuthConfig(mode=self.auth), store.directory())
        finally:
            store.close()
        return None if made is None else made[1]


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
