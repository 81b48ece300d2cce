"""Settings of the console: the `console` section of the gateway's configuration."""

from __future__ import annotations

import msgspec


class ConsoleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The web application that the gateway serves at `/`."""

    enabled: bool = True
    """Whether the gateway serves the console."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names under which browsers may open the console, besides addresses, `host` and the names of the machine
    itself. Example: `llm.example.com`. A browser that was given another name for the gateway is refused."""
    insecure_http: bool = False
    """Allow to sign in over plain HTTP from other machines. Anyone in between can then read the key."""
