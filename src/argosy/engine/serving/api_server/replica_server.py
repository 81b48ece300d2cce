"""Replica server: listens, starts the engine, serves, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import uvloop

from argosy.engine.engine_config import EngineConfig
from argosy.engine.execution.checkpoint_formats.checkpoint import model_revision, resolve_model_path
from argosy.engine.serving.api_server.adapter_registry import AdapterRegistry, LoraModule
from argosy.engine.serving.api_server.replica_app import ReplicaApp
from argosy.engine.serving.api_server.replica_server_config import ReplicaServerConfig
from argosy.engine.serving.api_server.replica_state import ReplicaState
from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.engine_core.core_start import PrestartedCore
from argosy.engine.serving.engine_core.engine_client import (
    EngineClient,
    EngineFailedError,
    LoadProgressCallback,
)
from argosy.engine.serving.preprocessing.request_processor import RequestProcessor
from argosy.engine.serving.preprocessing.text_processing import TextProcessing
from argosy.http_server import (
    SHUTDOWN_GRACE_S,
    CertificateWatcher,
    HttpServer,
    listen_url,
    listening_sockets,
    tune_gc,
)
from argosy.model_store import hold_model, stored_digest
from argosy.process import handle_signals, raise_file_limit
from argosy.protocol import ApiError
from argosy.telemetry import configure_logging

ENGINE_POLL_INTERVAL_S = 0.5

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.server")


class ReplicaServer:
    """Server of one replica, from start to exit.

    Listens at once, so that `/health` and `/ready` respond while the model loads. When requests are accepted,
    `on_ready` is called with the base URL (`unix:` and the path for a Unix domain socket).
    """

    def __init__(
        self,
        config: ReplicaServerConfig,
        engine_config: EngineConfig,
        *,
        engine: EngineClient,
        load_text_processing: Callable[[], TextProcessing],
        on_ready: Callable[[str], None],
        model_revision: str = "",
        model_digest: str = "",
    ) -> None:
        self._config = config
        self._engine_config = engine_config
        self._engine = engine
        self._load_text_processing = load_text_processing
        self._on_ready = on_ready
        self.replica_state = ReplicaState(
            config,
            config.model_names_for(engine_config.model),
            engine,
            model_revision,
            model_digest,
        )
        self._certificates = None if config.tls is None else CertificateWatcher(config.tls)
        metrics = self.replica_state.metrics
        self._listener = HttpServer(
            ReplicaApp(self.replica_state),
            self._certificates,
            on_connection_refused=lambda: metrics.connection_refusals.add(metrics.model_label),
            on_connection_evicted=lambda reason: metrics.connection_evictions.add(
                (*metrics.model_label, reason)
            ),
            dead_peer_timeout_s=2 * config.slow_reader_timeout_s,
        )
        self._stop_requested = asyncio.Event()
        self._force_stop_requested = asyncio.Event()

    def stop(self) -> None:
        """Drain, then exit. A second call exits at once.

        Call it on the event loop's thread.
        """
        if self._stop_requested.is_set():
            self.replica_state.abort_all()
            self._force_stop_requested.set()
        self._stop_requested.set()

    async def run(self) -> None:
        """Serve until `stop` is called.

        Raises:
            EngineFailedError: The engine cannot start or cannot continue.
        """
        config, certificates = self._config, self._certificates
        reload_certificates = None if certificates is None else certificates.reload
        listening = listening_sockets(config.host, config.port, config.uds)
        with handle_signals(self.stop, reload_certificates), listening as bound_sockets:
            await self._listen(bound_sockets)

    async def _listen(self, bound_sockets: Sequence[socket.socket]) -> None:
        listening = asyncio.create_task(self._listener.serve(sockets=bound_sockets))
        scheme = "http" if self._certificates is None else "https"
        serving = asyncio.create_task(self._serve_model(listen_url(bound_sockets[0], scheme)))
        watching_certificates = asyncio.create_task(self._watch_certificates())
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({listening, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain_requests()
        finally:
            stopping.cancel()
            watching_certificates.cancel()
            serving.cancel()
            await self._engine.close()
            self._listener.force_exit = self._force_stop_requested.is_set()
            self._listener.stop()
            await listening
            self.replica_state.preparation_threads.close()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    async def _serve_model(self, url: str) -> None:
        """Load the model, announce readiness and watch the engine. Ends only with an error."""
        engine_started = asyncio.Event()
        log.info("loading", url=url, model=self.replica_state.model_names[0])
        loading = asyncio.create_task(self._load_text(engine_started))
        try:
            ready = await self._engine.start(self.replica_state.metrics.record_step)
            engine_started.set()
            text_processing = await loading
        finally:
            loading.cancel()
        processor = text_processing.create_processor(ready, self._engine_config)
        pooling_processor = text_processing.create_pooling_processor(ready, self._engine_config)
        self.replica_state.on_model_loaded(processor, text_processing, ready, pooling_processor)
        await self._load_adapters(processor, text_processing, ready)
        output_format = text_processing.output_format
        log.info(
            "ready",
            url=url,
            model=self.replica_state.model_names[0],
            backend=ready.backend,
            tool_format="none" if output_format is None else output_format.name,
        )
        self._on_ready(url)
        while self._engine.state != "failed":  # noqa: ASYNC110 - the engine offers no event for its state
            await asyncio.sleep(ENGINE_POLL_INTERVAL_S)
        raise EngineFailedError(
            "the engine failed too often; see the log, then restart the replica"
        )

    async def _load_adapters(
        self, processor: RequestProcessor, text: TextProcessing, ready: CoreReady
    ) -> None:
        """Load the adapters of the settings.

        Raises:
            ValueError: One of them cannot be used.
        """
        for name in self._config.options_without_effect:
            log.warning("option_ignored", option=name, remedy="Set adapter_memory.")
        modules = [LoraModule.parse(text) for text in self._config.lora_modules]
        if not self._engine_config.enable_lora:
            if modules:
                raise ValueError("--lora-modules needs --enable-lora")
            return

        def create_processor(folder: Path) -> RequestProcessor:
            own = text.with_template_of(folder)
            if own is text:
                return processor
            return own.create_processor(ready, self._engine_config, processor.check_grammar)

        state = self.replica_state
        adapters = AdapterRegistry(
            self._engine, self._config.adapter_root, create_processor, state.model_names
        )
        for module in modules:
            try:
                adapter = await asyncio.to_thread(
                    adapters.prepare_load, module.name, module.path, is_trusted=True
                )
                await adapters.load(module.name, adapter)
            except ApiError as error:
                raise ValueError(f"--lora-modules {module.name}: {error.message}") from error
        state.adapters = adapters
        state.adapter_memory_bytes = self._engine_config.adapter_memory_bytes

    async def _load_text(self, engine_started: asyncio.Event) -> TextProcessing:
        """Load the tokenizer and the template beside the weights, or after the engine has verified their files."""
        if self.replica_state.model_digest:
            await engine_started.wait()
        return await asyncio.to_thread(self._load_text_processing)

    async def _watch_certificates(self) -> None:
        if self._certificates is not None:
            await self._certificates.watch()

    async def _drain_requests(self) -> None:
        deadline_s = self._config.drain_deadline_s
        log.info(
            "draining", deadline_s=deadline_s, in_flight=self.replica_state.http_requests_in_flight
        )
        self.replica_state.is_stopping = True
        self.replica_state.drain(deadline_s)
        if self._engine.state in {"failed", "starting"}:
            self.replica_state.abort_all()
        drained = asyncio.create_task(self.replica_state.wait_drained())
        forced = asyncio.create_task(self._force_stop_requested.wait())
        await asyncio.wait(
            {drained, forced},
            timeout=deadline_s + SHUTDOWN_GRACE_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        drained.cancel()
        forced.cancel()


def serve_replica(
    config: ReplicaServerConfig,
    engine_config: EngineConfig,
    *,
    on_ready: Callable[[str], None] | None = None,
    on_load_progress: LoadProgressCallback | None = None,
    prestarted_core: PrestartedCore | None = None,
) -> None:
    """Serve one model until SIGTERM or SIGINT. Returns after everything is closed.

    If `prestarted_core` is given, its process becomes the engine core.

    Raises:
        EngineFailedError: The engine cannot serve.
        ValueError: A setting is invalid.
        OSError: A file or socket cannot be opened.
    """
    configure_logging(config.log_format, config.log_level, config.log_name)
    raise_file_limit()
    path = resolve_model_path(engine_config.model, engine_config.revision, engine_config.digest)

    def notify_ready(url: str) -> None:
        tune_gc()
        if on_ready is not None:
            on_ready(url)

    async def run() -> None:
        server = ReplicaServer(
            config,
            engine_config,
            engine=EngineClient(
                engine_config,
                on_load_progress=on_load_progress,
                log_format=config.log_format,
                log_level=config.log_level,
                log_name=config.log_name,
                prestarted_core=prestarted_core,
            ),
            load_text_processing=lambda: TextProcessing.load(
                path,
                config.chat_template,
                config.tool_format,
                generation_config=engine_config.generation_config,
                override_generation_config=engine_config.override_generation_config,
            ),
            on_ready=notify_ready,
            model_revision=model_revision(path, engine_config.revision),
            model_digest=engine_config.digest or stored_digest(path),
        )
        await server.run()

    with hold_model(path):
        uvloop.run(run())
