"""Reloads models and the rules for requests from the settings file while the gateway runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from argosy.deployment import RELOADABLE_SETTINGS, GatewayConfig
from argosy.gateway.model_registry import ModelEntries, ModelRegistry, build_model_entries
from argosy.gateway.objective_recorder import ObjectiveRecorder
from argosy.process import run_in_daemon_thread

ConfigLoader = Callable[[], GatewayConfig]
"""Returns the current settings. Raises ValueError, with what to change, if they are invalid."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class ConfigReloader:
    """Reloads one gateway's models and rules on request. Not thread-safe: use it from one event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        load_config: ConfigLoader,
        registry: ModelRegistry,
        objectives: ObjectiveRecorder,
        on_models_changed: Callable[[], None],
    ) -> None:
        """Create a reloader."""
        self._config = config
        self._load_config = load_config
        self._registry = registry
        self._objectives = objectives
        self._on_models_changed = on_models_changed
        self._reload_requested = asyncio.Event()

    def request_reload(self) -> None:
        """Request a reload. `run` performs it."""
        self._reload_requested.set()

    async def run(self) -> None:
        """Reload the settings after each request. Runs until it is cancelled."""
        while True:
            await self._reload_requested.wait()
            self._reload_requested.clear()
            await self._reload()

    async def _reload(self) -> None:
        """Reload once. Invalid settings are logged and change nothing."""
        try:
            config, entries = await run_in_daemon_thread(self._load)
        except (ValueError, OSError) as error:
            log.error("config_reload_failed", reason=str(error))  # noqa: TRY400 - an invalid file, not a bug
            return
        self._registry.apply_config(entries, config.rules)
        self._objectives.apply(config.objectives)
        self._on_models_changed()
        log.info("config_reloaded", models=[model.name for model, *_ in entries])
        old, new = msgspec.structs.asdict(self._config), msgspec.structs.asdict(config)
        restart_settings = [
            name for name in new if name not in RELOADABLE_SETTINGS and new[name] != old[name]
        ]
        if restart_settings:
            log.warning("config_restart_required", settings=restart_settings)

    def _load(self) -> tuple[GatewayConfig, list[ModelEntries]]:
        """Read the settings and build the model entries, in any thread.

        Raises:
            ValueError: The settings are invalid.
            OSError: A file cannot be read.
        """
        config = self._load_config()
        return config, build_model_entries(
            msgspec.structs.replace(self._config, models=config.models)
        )
