"""Takes in the models of the settings' file, and the routes to them, again when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from argosy.gateway.config import GatewayConfig
from argosy.gateway.model_registry import Behind, Served, read_models
from argosy.process import aside

Reread = Callable[[], GatewayConfig]
"""The settings as they are now. Raises ValueError, saying what to change."""

TAKEN = frozenset({"models", "routes"})
"""Settings that are taken in; others need a restart."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class Reloading:
    """One gateway's. Belongs to one event loop."""

    def __init__(
        self, config: GatewayConfig, reread: Reread, served: Served, taken: Callable[[], None]
    ) -> None:
        """`config` is what the gateway was started with; `taken` is called when there are other models."""
        self._config = config
        self._reread = reread
        self._served = served
        self._taken = taken
        self._wanted = asyncio.Event()

    def want(self) -> None:
        """Have it done soon."""
        self._wanted.set()

    async def run(self) -> None:
        """Do it whenever it is wanted."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self._reload()

    async def _reload(self) -> None:
        """Settings that are wrong change nothing."""
        try:
            config, behind = await aside(self._read)
        except (ValueError, OSError) as error:
            log.error("settings_not_taken", reason=str(error))  # noqa: TRY400 - no bug of ours
            return
        self._served.take(behind, config.routes)
        self._taken()
        log.info("settings_taken", models=[model.name for model, _ in behind])
        before, now = msgspec.structs.asdict(self._config), msgspec.structs.asdict(config)
        later = [name for name in now if name not in TAKEN and now[name] != before[name]]
        if later:
            log.warning("settings_need_a_restart", settings=later)

    def _read(self) -> tuple[GatewayConfig, list[Behind]]:
        """Raises ValueError or OSError."""
        config = self._reread()
        return config, read_models(msgspec.structs.replace(self._config, models=config.models))
