"""Takes in the models of the settings' file, and the routes to them, again when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from argosy.gateway.config import GatewayConfig
from argosy.gateway.model_registry import ModelEntries, ModelRegistry, build_model_entries
from argosy.process import run_in_daemon_thread

ConfigLoader = Callable[[], GatewayConfig]
"""The settings as they are now. Raises ValueError, saying what to change."""

RELOADABLE_SETTINGS = frozenset({"models", "routes"})
"""Settings that are taken in; others need a restart."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class ConfigReloader:
    """One gateway's. Belongs to one event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        load_config: ConfigLoader,
        registry: ModelRegistry,
        on_models_changed: Callable[[], None],
    ) -> None:
        """`config` is what the gateway was started with; `taken` is called when there are other models."""
        self._config = config
        self._load_config = load_config
        self._registry = registry
        self._on_models_changed = on_models_changed
        self._reload_requested = asyncio.Event()

    def request_reload(self) -> None:
        """Have it done soon."""
        self._reload_requested.set()

    async def run(self) -> None:
        """Do it whenever it is wanted."""
        while True:
            await self._reload_requested.wait()
            self._reload_requested.clear()
            await self._reload()

    async def _reload(self) -> None:
        """Settings that are wrong change nothing."""
        try:
            config, behind = await run_in_daemon_thread(self._load)
        except (ValueError, OSError) as error:
            log.error("config_reload_failed", reason=str(error))  # noqa: TRY400 - no bug of ours
            return
        self._registry.apply_config(behind, config.routes)
        self._on_models_changed()
        log.info("config_reloaded", models=[model.name for model, _ in behind])
        before, now = msgspec.structs.asdict(self._config), msgspec.structs.asdict(config)
        later = [
            name for name in now if name not in RELOADABLE_SETTINGS and now[name] != before[name]
        ]
        if later:
            log.warning("config_restart_required", settings=later)

    def _load(self) -> tuple[GatewayConfig, list[ModelEntries]]:
        """Raises ValueError or OSError."""
        config = self._load_config()
        return config, build_model_entries(
            msgspec.structs.replace(self._config, models=config.models)
        )
