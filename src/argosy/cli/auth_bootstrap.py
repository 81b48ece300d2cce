"""Authentication of `argosy serve`: migrates the store and creates the first API key if keys are required."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from argosy.cli.server_options import override_console_config

if TYPE_CHECKING:
    from argosy.deployment import AuthConfig, ConsoleConfig

AuthModeName = Literal["auto", "required", "disabled"]
"""`auto`: requests from this machine need no key until a key exists. `required`: all need one. `disabled`: none do."""


class AuthSetup(NamedTuple):
    """Result of the preparation: the first key and whether requests need a key."""

    first_key: str | None
    """Administrator key that was just created. The store keeps only its digest."""
    key_required: bool


@dataclass(frozen=True, slots=True)
class AuthBootstrap:
    """Authentication settings from the command line, and the preparation of the store."""

    configured_store_url: str | None
    """Store URL, or None for the user's default store."""
    auth_mode: AuthModeName
    host: str
    """Address that the server listens on."""
    allowed_origins: list[str] | None = None
    """Origins of web pages that may send requests, or None for origins on this machine."""
    console: bool = True
    """Whether to serve the console."""
    allowed_hosts: list[str] | None = None
    """Names under which browsers may open the console."""
    console_insecure_http: bool = False
    """Whether people may sign in to the console over plain HTTP from other machines."""

    @property
    def auth_config(self) -> AuthConfig:
        """Settings for the gateway."""
        from argosy.deployment import AuthConfig

        if self.allowed_origins is None:
            return AuthConfig(mode=self.auth_mode)
        return AuthConfig(mode=self.auth_mode, allowed_origins=tuple(self.allowed_origins))

    @property
    def console_config(self) -> ConsoleConfig:
        """Settings of the console for the gateway."""
        from argosy.deployment import ConsoleConfig

        return override_console_config(
            ConsoleConfig(),
            console=self.console,
            allowed_hosts=self.allowed_hosts,
            insecure_http=self.console_insecure_http,
        )

    @property
    def store_url(self) -> str:
        """URL of the store, the default one included."""
        from argosy.store import default_store_url

        return self.configured_store_url or default_store_url()

    def prepare_store(self) -> AuthSetup:
        """Migrate the store, and create an administrator key if keys are required and none exists.

        Raises:
            ValueError: The store cannot be used, or other machines could connect while no key exists. The message
                contains the remedy.
        """
        from argosy.gateway import check_exposure, is_loopback
        from argosy.store import open_store

        needs_first_key = self.auth_mode == "required" or (
            self.auth_mode == "auto" and not is_loopback(self.host)
        )
        store = open_store(self.store_url)
        try:
            store.migrate()
            created = store.accounts.bootstrap(actor="argosy serve") if needs_first_key else None
            snapshot = store.load_snapshot()
            check_exposure(self.host, self.auth_config, snapshot)
        finally:
            store.close()
        key_required = needs_first_key or (self.auth_mode == "auto" and snapshot.requires_keys)
        return AuthSetup(None if created is None else created[1], key_required)
