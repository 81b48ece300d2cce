"""`argosy serve` and `argosy replica`: the same server, for a person and for a fleet."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, Self

from argosy.cli import options
from argosy.cli.failure import BROKEN, fail

if TYPE_CHECKING:
    from argosy.engine import EarlyCore, EngineConfig, ServerConfig

SERVE_HELP = "Serve a model with the OpenAI API on this machine (the bundled model by default)."
REPLICA_HELP = "Serve a model as one replica of a fleet: the same server, logs instead of a panel."


class Display(Protocol):
    """What is shown while a server starts and runs."""

    log_format: Literal["json", "console"]
    log_level: options.Level

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

    def progress(self, what: str, done: float) -> None:
        """Loading got this far (0 to 1)."""
        ...

    def ready(self, url: str, model: str) -> None:
        """Requests for `model` are taken at `url`."""
        ...


class Plain:
    """Nothing but the log."""

    log_format: Literal["json", "console"] = "json"
    log_level: options.Level = "info"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def progress(self, what: str, done: float) -> None:
        """The log has it."""

    def ready(self, url: str, model: str) -> None:
        """The log has it."""


class Panel:
    """A progress bar, then a panel that says where the server is and what to try."""

    log_format: Literal["json", "console"] = "console"
    log_level: options.Level = "warning"

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting the engine", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def progress(self, what: str, done: float) -> None:
        """Move the bar."""
        self._bar.update(self._task, description=what, completed=done, total=1.0)

    def ready(self, url: str, model: str) -> None:
        """Replace the bar by the panel."""
        from rich.panel import Panel as Box
        from rich.text import Text

        self._bar.stop()
        base = f"{url}/v1" if url.startswith("http") else url
        headline = Text.assemble((model, "bold"), " is ready at ", (base, "bold green"))
        self._console.print(Box(headline, title="Argosy", expand=False))
        self._console.print(_try_next(url, model), soft_wrap=True, markup=False, highlight=False)


def command(display: Callable[[], Display]) -> Callable[..., None]:
    """The command, showing itself through `display`."""

    def serve(
        model: options.Model = None,
        *,
        host: options.Host = "127.0.0.1",
        port: options.Port = 8000,
        uds: options.UnixSocket = None,
        served_model_name: options.ServedNames = None,
        revision: options.Revision = None,
        dtype: options.DType = "auto",
        device: options.Device = "auto",
        quantize: options.Quantize = None,
        chat_template: options.Template = None,
        max_model_len: options.MaxModelLen = None,
        max_seqs: options.MaxSeqs = 64,
        kv_memory: options.KvMemory = None,
        kv_dtype: options.KvDType = "auto",
        host_kv: options.HostKv = None,
        pack_cache: options.PackCache = None,
        threads: options.Threads = None,
        max_step_tokens: options.MaxStepTokens = 1024,
        batching: options.Batching = "continuous",
        prefix_cache: options.PrefixCache = True,
        request_timeout: options.RequestTimeout = 600.0,
        drain_deadline: options.DrainDeadline = 30.0,
        vllm_metrics: options.VllmMetrics = False,
        log_level: options.LogLevel = None,
    ) -> None:
        _require_engine()
        from argosy.engine import PACK_CACHE_BYTES, EngineConfig, ServerConfig
        from argosy.models import BUNDLED

        shown = display()
        _run(
            ServerConfig(
                host=host,
                port=port,
                uds=uds,
                served_model_names=tuple(served_model_name or ()),
                chat_template=chat_template,
                drain_deadline_s=drain_deadline,
                vllm_metrics=vllm_metrics,
                log_format=shown.log_format,
                log_level=log_level or shown.log_level,
            ),
            EngineConfig(
                model=model or str(BUNDLED),
                revision=revision,
                dtype=dtype,
                device=device,
                quantize=quantize,
                threads=threads,
                max_model_len=max_model_len,
                max_seqs=max_seqs,
                max_step_tokens=max_step_tokens,
                batching=batching,
                kv_memory_bytes=kv_memory,
                kv_dtype=kv_dtype,
                host_kv_bytes=host_kv or 0,
                pack_cache_bytes=PACK_CACHE_BYTES if pack_cache is None else pack_cache,
                prefix_cache=prefix_cache,
                request_timeout_s=request_timeout,
            ),
            shown,
        )

    return serve


def _run(server: ServerConfig, engine: EngineConfig, shown: Display) -> None:
    from argosy.engine import EarlyCore

    try:
        with EarlyCore() as early:  # its imports take longest: it does them during ours
            _serve(server, engine, shown, early)
    except OSError as error:
        fail(error.strerror or str(error))


def _serve(server: ServerConfig, engine: EngineConfig, shown: Display, early: EarlyCore) -> None:
    from argosy.engine import EngineFailedError, serve_replica

    served = False

    def ready(url: str) -> None:
        nonlocal served
        served = True
        shown.ready(url, server.names_of(engine.model)[0])

    try:
        with shown:
            serve_replica(server, engine, on_ready=ready, progress=shown.progress, early=early)
    except ValueError as error:
        fail(str(error))
    except EngineFailedError as error:
        if served:
            fail(str(error), BROKEN)
        fail(str(error))


def _require_engine() -> None:
    if importlib.util.find_spec("torch") is None:
        fail("the engine is not installed here; install it with: pip install 'argosy[engine]'")


def _try_next(url: str, model: str) -> str:
    if url.startswith("unix:"):
        socket = url.removeprefix("unix:")
        return f"""Talk to it:   argosy chat --url {url}
With curl:    curl --unix-socket {socket} http://localhost/v1/models
Ctrl-C stops it."""
    argument = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    return f"""Talk to it:   argosy chat{argument}
OpenAI SDK:   client = OpenAI(base_url="{url}/v1", api_key="none")
With curl:    curl {url}/v1/chat/completions -H 'content-type: application/json' \\
                -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
Ctrl-C stops it."""
