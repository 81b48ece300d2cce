"""Who may come in to `argosy serve`: its store, brought up to date, and the first key where callers need one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from argosy.gateway import AuthConfig

Auth = Literal["auto", "keys", "off"]
"""`auto`: those on this machine need no key until there is one. `keys`: always. `off`: nobody does."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What callers need."""

    first_key: str | None
    """An administrator's, which was made just now and cannot be shown again."""
    keyed: bool
    """Whether they need a key."""


@dataclass(frozen=True, slots=True)
class Doorkeeping:
    """What was asked for."""

    store: str | None
    """URL of the database; None: the user's own."""
    auth: Auth
    host: str
    """Where it listens."""
    allowed_origins: list[str] | None = None
    """Of web pages; None: those of this machine."""

    @property
    def config(self) -> AuthConfig:
        """The same as the gateway's settings."""
        from argosy.gateway import AuthConfig

        if self.allowed_origins is None:
            return AuthConfig(mode=self.auth)
        return AuthConfig(mode=self.auth, allowed_origins=tuple(self.allowed_origins))

    @property
    def url(self) -> str:
        """The database."""
        from argosy.store import default_url

        return self.store or default_url()

    def prepare(self) -> Opening:
        """Bring the tables up to date, and make an admin's key where keys are needed and nobody has any.

        Raises ValueError, saying what to change, when the database cannot be used, or when others could connect
        and there still are no keys.
        """
        from argosy.gateway import check_exposure, is_loopback
        from argosy.store import open_store

        needed = self.auth == "keys" or (self.auth == "auto" and not is_loopback(self.host))
        store = open_store(self.url)
        try:
            store.migrate()
            made = store.accounts.first_run(actor="argosy serve") if needed else None
            directory = store.directory()
            check_exposure(self.host, self.config, directory)
        finally:
            store.close()
        keyed = needed or (self.auth == "auto" and directory.keyed)
        return Opening(None if made is None else made[1], keyed)
