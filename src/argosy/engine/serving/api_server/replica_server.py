"""Runs one replica: listens, starts the engine, serves, and on SIGTERM drains and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvloop

from argosy.engine.engine_config import EngineConfig
from argosy.engine.execution.checkpoint import locate
from argosy.engine.serving.api_server.replica_app import App
from argosy.engine.serving.api_server.replica_server_config import ServerConfig
from argosy.engine.serving.api_server.replica_state import Engine, Replica
from argosy.engine.serving.engine_core.core_start import EarlyCore
from argosy.engine.serving.engine_core.engine_client import (
    EngineClient,
    EngineFailedError,
    Progress,
)
from argosy.engine.serving.preprocessing.request_processor import Door
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.http_server import (
    GOODBYE_S,
    Certificates,
    Listener,
    calm_collector,
    listening_socket,
    url_of,
)
from argosy.process import heeding, raise_file_limit
from argosy.telemetry import configure_logs

WATCH_S = 0.5

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.server")


@dataclass(frozen=True, slots=True)
class TextTools:
    """How this model reads and writes text."""

    tokenizer: Tokenizer
    template: ChatTemplate

    @classmethod
    def load(cls, path: Path, template: str | None) -> TextTools:
        """From the checkpoint directory `path`; `template` is a file that replaces its chat template."""
        override = Path(template) if template is not None else None
        return cls(Tokenizer.load(path), ChatTemplate.load(path, override))


class ReplicaServer:
    """One replica from start to end.

    It listens at once, so that `/health` and `/ready` answer while the model loads. `on_ready` is called
    with the base URL (for a Unix domain socket, `unix:` and its path) when requests are taken.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine_config: EngineConfig,
        *,
        engine: Engine,
        load_text: Callable[[], TextTools],
        on_ready: Callable[[str], None],
    ) -> None:
        self._config = config
        self._engine_config = engine_config
        self._engine = engine
        self._load_text = load_text
        self._on_ready = on_ready
        self.replica = Replica(config, config.names_of(engine_config.model), engine)
        self._certificates = None if config.tls is None else Certificates(config.tls)
        self._listener = Listener(
            App(self.replica), self._certificates, vanished_s=2 * config.slow_reader_timeout_s
        )
        self._leave = asyncio.Event()
        self._at_once = asyncio.Event()

    def stop(self) -> None:
        """Drain, then leave; called again, leave at once. Call it on the event loop's thread."""
        if self._leave.is_set():
            self.replica.end_all()
            self._at_once.set()
        self._leave.set()

    async def run(self) -> None:
        """Serve until told to stop. Raises EngineFailedError when the engine cannot (go on to) serve."""
        config, certificates = self._config, self._certificates
        renew = None if certificates is None else certificates.reload
        listening = listening_socket(config.host, config.port, config.uds)
        with heeding(self.stop, renew), listening as bound:
            await self._listen(bound)

    async def _listen(self, bound: socket.socket) -> None:
        listening = asyncio.create_task(self._listener.serve(sockets=[bound]))
        scheme = "http" if self._certificates is None else "https"
        serving = asyncio.create_task(self._serve(url_of(bound, scheme)))
        renewing = asyncio.create_task(self._renew())
        leaving = asyncio.create_task(self._leave.wait())
        try:
            await asyncio.wait({listening, serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            leaving.cancel()
            renewing.cancel()
            serving.cancel()
            await self._engine.close()
            self._listener.force_exit = self._at_once.is_set()
            self._listener.stop()
            await listening
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    async def _serve(self, url: str) -> None:
        """Load, announce, and watch the engine; ends only by an error."""
        loading = asyncio.create_task(asyncio.to_thread(self._load_text))
        try:
            ready = await self._engine.start(self.replica.metrics.step_seen)
            text = await loading
        finally:
            loading.cancel()
        door = Door(text.tokenizer, text.template, ready, self._engine_config)
        self.replica.open(door, text.tokenizer, ready)
        log.info("ready", url=url, model=self.replica.names[0], backend=ready.backend)
        self._on_ready(url)
        while self._engine.state != "failed":  # noqa: ASYNC110 - the engine's state is all it shows
            await asyncio.sleep(WATCH_S)
        raise EngineFailedError("the engine failed too often; see the log, then start it again")

    async def _renew(self) -> None:
        if self._certificates is not None:
            await self._certificates.watch()

    async def _drain(self) -> None:
        deadline_s = self._config.drain_deadline_s
        log.info("draining", deadline_s=deadline_s, in_flight=self.replica.in_flight)
        self.replica.drain(deadline_s)
        if self._engine.state in {"failed", "starting"}:
            self.replica.end_all()
        drained = asyncio.create_task(self.replica.drained())
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait(
            {drained, at_once},
            timeout=deadline_s + GOODBYE_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        drained.cancel()
        at_once.cancel()


def serve_replica(
    config: ServerConfig,
    engine_config: EngineConfig,
    *,
    on_ready: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    early: EarlyCore | None = None,
) -> None:
    """Serve one model until SIGTERM or SIGINT; returns when everything is closed.

    `early` is the engine core's process, when it has been started already.

    Raises EngineFailedError, ValueError or OSError, each saying what to change, when it cannot.
    """
    configure_logs(config.log_format, config.log_level, config.log_name)
    raise_file_limit()
    path = locate(engine_config.model, engine_config.revision)

    def ready(url: str) -> None:
        calm_collector()
        if on_ready is not None:
            on_ready(url)

    async def run() -> None:
        server = ReplicaServer(
            config,
            engine_config,
            engine=EngineClient(
                engine_config,
                progress=progress,
                log_format=config.log_format,
                log_level=config.log_level,
                log_name=config.log_name,
                early=early,
            ),
            load_text=lambda: TextTools.load(path, config.chat_template),
            on_ready=ready,
        )
        await server.run()

    uvloop.run(run())
