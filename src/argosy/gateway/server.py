"""Runs a gateway: opens its books, listens, looks after replicas and streams, and on SIGTERM drains and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import structlog
import uvloop

from argosy.gateway.accounting import Books, Keeping
from argosy.gateway.admin import build_admin
from argosy.gateway.app import Front
from argosy.gateway.auth import Identity, check_exposure
from argosy.gateway.config import GatewayConfig
from argosy.gateway.config_reloader import Reloading, Reread
from argosy.gateway.cors import Origins
from argosy.gateway.filters import Idempotency, Ledger, Limits, Recorder, kept_answers, shared_state
from argosy.gateway.model_registry import Served, read_models
from argosy.gateway.operations import Operating, read_replicas
from argosy.gateway.pool import Care, LookUp, Replica, look_after, look_up
from argosy.gateway.proxy import FastPath, Serving, load_fast_path
from argosy.gateway.request_context import Stage
from argosy.gateway.request_trace import Traces
from argosy.http_server import Certificates, Listener, calm_collector, listening_socket, url_of
from argosy.native import NativeUnavailable
from argosy.process import heeding, raise_file_limit
from argosy.store import Directory, StoreConfig
from argosy.telemetry import GatewayMetrics, GatewayReading, configure_logs

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

T = TypeVar("T")


class GatewayServer:
    """One gateway from start to end. `on_ready` is called with its base URL.

    Raises ValueError, saying what to change, when the configuration cannot be meant.
    """

    def __init__(
        self,
        config: GatewayConfig,
        on_ready: Callable[[str], None],
        reread: Reread | None = None,
        look_up: LookUp = look_up,
    ) -> None:
        """`reread` is asked for other models at `renew`; `look_up` for the addresses of names."""
        self._config = config
        self._on_ready = on_ready
        self._served = Served(read_models(config), config.routes, look_up)
        self._models = self._served.models
        self._identity = Identity(Directory(), config.auth)
        self._origins = Origins(config.auth.allowed_origins)
        self._metrics = GatewayMetrics()
        self._traces = Traces(config.explain)
        self._certificates = None if config.tls is None else Certificates(config.tls)
        self._keeping: Keeping | None = None
        self._reloading: Reloading | None = None
        if reread is not None:
            self._reloading = Reloading(config, reread, self._served, self._mean)
        self._leave = asyncio.Event()
        self._at_once = asyncio.Event()

    @property
    def replicas(self) -> list[Replica]:
        """Those of all models."""
        return self._served.replicas

    def stop(self) -> None:
        """Drain, then leave; called again, leave at once. Call it on the event loop's thread."""
        if self._leave.is_set():
            self._at_once.set()
        self._leave.set()

    def renew(self) -> None:
        """Take in what the files of the certificates hold now, and the models of the settings."""
        if self._certificates is not None:
            self._certificates.reload()
        if self._reloading is not None:
            self._reloading.want()

    def _mean(self) -> None:
        """There are other models: limits and prices of aliases may be for others now."""
        if self._keeping is not None:
            self._keeping.mean()

    async def run(self, bound: socket.socket | None = None) -> None:
        """Serve until told to stop, on `bound` if that is given.

        Raises ValueError or OSError, saying what to change, when it cannot.
        """
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._served.close)
            stages = await self._first_stages(closing)
            if self._config.store is not None:
                stages += await self._stages_with(self._config.store, closing)
                if self._leave.is_set():
                    return
            if bound is None:
                bound = closing.enter_context(self._bind())
            fast_path = await self._fast_path()
            if fast_path is not None:
                closing.callback(fast_path.close)
            await self._serve(stages, bound, fast_path)

    async def _first_stages(self, closing: contextlib.AsyncExitStack) -> list[Stage]:
        """Those that need no store. Raises ValueError, saying what to change."""
        config = self._config.idempotency
        answers = kept_answers(config, self._config.limits)
        await answers.start()
        closing.push_async_callback(answers.close)
        recorder = Recorder(self._traces, self._metrics, time.monotonic)
        return [recorder, Idempotency(answers, config.answer_bytes)]

    async def _stages_with(
        self, store: StoreConfig, closing: contextlib.AsyncExitStack
    ) -> list[Stage]:
        """Those that go by a store, which is open and kept from now on; none where we are to leave before.

        Raises ValueError or OSError, saying what to change.
        """
        books = await self._unless_left(Books.open(store))
        if books is None:
            return []
        closing.push_async_callback(books.close)
        limits = Limits(shared_state(self._config.limits))
        await limits.start()
        closing.push_async_callback(limits.close)
        ledger = Ledger(books.spool)
        self._keeping = Keeping(books, self._models, self._identity, limits, ledger)
        closing.callback(self._keeping.close)
        await self._unless_left(self._keeping.begin(books.directory))
        return [limits, ledger]

    async def _unless_left(self, beginning: Coroutine[Any, Any, T]) -> T | None:
        """What it returns; None: we are to leave before it has ended. Raises as it does."""
        begun = asyncio.create_task(beginning)
        leaving = asyncio.create_task(self._leave.wait())
        try:
            await asyncio.wait({begun, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return await begun if begun.done() else None
        finally:
            begun.cancel()
            leaving.cancel()

    async def _serve(
        self, stages: list[Stage], bound: socket.socket, fast_path: FastPath | None
    ) -> None:
        keeping = self._keeping
        serving = Serving(self._models, self._config, stages, fast_path)
        front = Front(
            self._models,
            serving,
            Operating(self._models, self._metrics, lambda: self._read(front, serving)),
            identify=self._identity.identify,
            admin=build_admin(
                None if keeping is None else keeping.books.store,
                self._identity,
                self._explain,
                _nothing if keeping is None else keeping.books.changed,
            ),
            origins=self._origins,
            metrics=self._metrics,
            config=self._config,
            limits=None if keeping is None else keeping.limits,
        )
        await self._served.start()
        caring: list[Care] = [serving.tend]
        if keeping is not None:
            caring += [partial(keeping.books.keep_fresh, keeping.update), keeping.books.forget]
        if self._reloading is not None:
            caring.append(self._reloading.run)
        if self._certificates is not None:
            caring.append(self._certificates.watch)
        each = 2 if fast_path is None else 4  # its own and a replica's, which the fast path has too
        await self._listen(front, bound, caring, each)

    async def _listen(
        self, front: Front, bound: socket.socket, caring: list[Care], each: int
    ) -> None:
        """To clients that take so many descriptors `each`."""
        certificates = self._certificates
        listener = Listener(
            front,
            certificates,
            descriptors=each,
            age_s=self._config.connection_age_s,
            idle_s=self._config.connection_idle_s,
            vanished_s=2 * self._config.slow_reader_timeout_s,
        )
        listening = asyncio.create_task(listener.serve(sockets=[bound]))
        leaving = asyncio.create_task(self._leave.wait())
        tasks = [asyncio.create_task(look_after(care)) for care in caring]
        url = url_of(bound, "http" if certificates is None else "https")
        log.info("ready", url=url, models=[model.name for model in self._config.models])
        self._on_ready(url)
        try:
            await asyncio.wait({listening, leaving}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain(front, listener)
        finally:
            for task in (*tasks, leaving):
                task.cancel()
            listener.stop()
            await listening  # what did not end in time too, and is counted
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fast_path(self) -> FastPath | None:
        if self._config.fast_path == "off":
            return None
        try:
            return FastPath(await asyncio.to_thread(load_fast_path))
        except NativeUnavailable as error:
            log.info("no_fast_path", reason=str(error))
            return None

    def _explain(self, request: str, organisation: str | None) -> dict[str, Any] | None:
        self._traces.forget(time.monotonic())
        trace = self._traces.find(request, organisation)
        return None if trace is None else trace.tell()

    def _read(self, front: Front, serving: Serving) -> GatewayReading:
        keeping = self._keeping
        return GatewayReading(
            in_flight=front.in_flight,
            on_fast_path=serving.on_fast_path,
            queued=serving.queued,
            replicas=read_replicas(self._models.pools),
            backlog=0 if keeping is None else keeping.books.spool.waiting,
            in_memory=0 if keeping is None else keeping.books.spool.in_memory,
            store_up=None if keeping is None else keeping.books.fresh,
            shared_limits=None if keeping is None else keeping.limits.read(),
        )

    async def _drain(self, front: Front, listener: Listener) -> None:
        """Let what runs end, for as long as it may."""
        log.info("draining", in_flight=front.in_flight)

        async def end() -> None:
            await listener.retire(self._config.drain_idle_s)
            await front.idle()

        ended = asyncio.create_task(end())
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait(
            {ended, at_once},
            timeout=self._config.drain_deadline_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        ended.cancel()
        at_once.cancel()
        listener.force_exit = front.in_flight > 0

    def _bind(self) -> AbstractContextManager[socket.socket]:
        """Raises ValueError when anybody could come in who should not."""
        config, keeping = self._config, self._keeping
        if config.uds is None:
            known = Directory() if keeping is None else keeping.books.directory
            check_exposure(config.host, config.auth, known)
        return listening_socket(config.host, config.port, config.uds)


def _nothing() -> None:
    """Nobody has accounts that could change."""


def serve_gateway(config: GatewayConfig, on_ready: Callable[[str], None], reread: Reread) -> None:
    """Serve until SIGTERM or SIGINT, at SIGHUP the models that `reread` has then.

    Raises ValueError or OSError, saying what to change.
    """
    configure_logs(config.log_format, config.log_level)
    raise_file_limit()

    def ready(url: str) -> None:
        calm_collector()
        on_ready(url)

    async def run() -> None:
        server = GatewayServer(config, ready, reread)
        with heeding(server.stop, server.renew):
            await server.run()

    uvloop.run(run())
