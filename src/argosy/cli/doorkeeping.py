"""Who may come in to `argosy serve`: its store, brought up to date, and the first key where callers need one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
        from argosy.store import default_url

        return self.store or default_url()

    @property
    def keyed(self) -> bool:
        """Whether callers need keys from the first request on."""
        from argosy.gateway import is_loopback

        return self.auth == "keys" or (self.auth == "auto" and not is_loopback(self.host))

    def prepare(self) -> str | None:
        """Bring the tables up to date, and make an admin's key where keys are needed and nobody has any.

        That key, which nobody can be shown again. Raises ValueError, saying what to change, when the database
        cannot be used, or when others could connect and there still are no keys.
        """
        from argosy.gateway import AuthConfig, check_exposure
        from argosy.store import open_store

        store = open_store(self.url)
        try:
            store.migrate()
            made = store.accounts.first_run(actor="argosy serve") if self.keyed else None
            check_exposure(self.host, AuthConfig(mode=self.auth), store.directory())
        finally:
            store.close()
        return None if made is None else made[1]
