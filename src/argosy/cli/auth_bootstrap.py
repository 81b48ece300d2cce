"""Who may come in to `argosy serve`: its store, brought up to date, and the first key where callers need one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from argosy.gateway import AuthConfig

AuthModeName = Literal["auto", "required", "disabled"]
"""`auto`: those on this machine need no key until there is one. `keys`: always. `off`: nobody does."""


@dataclass(frozen=True, slots=True)
class AuthSetup:
    """What callers need."""

    first_key: str | None
    """An administrator's, which was made just now and cannot be shown again."""
    key_required: bool
    """Whether they need a key."""


@dataclass(frozen=True, slots=True)
class AuthBootstrap:
    """What was asked for."""

    configured_store_url: str | None
    """URL of the database; None: the user's own."""
    auth_mode: AuthModeName
    host: str
    """Where it listens."""
    allowed_origins: list[str] | None = None
    """Of web pages; None: those of this machine."""

    @property
    def auth_config(self) -> AuthConfig:
        """The same as the gateway's settings."""
        from argosy.gateway import AuthConfig

        if self.allowed_origins is None:
            return AuthConfig(mode=self.auth_mode)
        return AuthConfig(mode=self.auth_mode, allowed_origins=tuple(self.allowed_origins))

    @property
    def store_url(self) -> str:
        """The database."""
        from argosy.store import default_store_url

        return self.configured_store_url or default_store_url()

    def prepare_store(self) -> AuthSetup:
        """Bring the tables up to date, and make an admin's key where keys are needed and nobody has any.

        Raises ValueError, saying what to change, when the database cannot be used, or when others could connect
        and there still are no keys.
        """
        from argosy.gateway import check_exposure, is_loopback
        from argosy.store import open_store

        needed = self.auth_mode == "required" or (
            self.auth_mode == "auto" and not is_loopback(self.host)
        )
        store = open_store(self.store_url)
        try:
            store.migrate()
            made = store.accounts.bootstrap(actor="argosy serve") if needed else None
            directory = store.load_snapshot()
            check_exposure(self.host, self.auth_config, directory)
        finally:
            store.close()
        keyed = needed or (self.auth_mode == "auto" and directory.requires_keys)
        return AuthSetup(None if made is None else made[1], keyed)
