"""The options that `argosy serve` and `argosy replica` share, and the settings that they make."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from argosy.cli import options
from argosy.cli.failure import fail
from argosy.cli.tls import TlsCert, TlsClientCa, TlsKey, tls_of
from argosy.engine import EngineConfig, ServerConfig

Run = Callable[..., None]
"""`run(server, engine, **own)`; `own` are the command's own options, all keywords."""


def with_settings(run: Run) -> Callable[..., None]:
    """`run` as a command that also has the shared options, and gets them as settings."""
    shared = inspect.signature(_settings, eval_str=True).parameters
    _, _, *own = inspect.signature(run, eval_str=True).parameters.values()

    @functools.wraps(run)
    def command(**given: Any) -> None:  # noqa: ANN401 - whatever the options hold
        _require_engine()
        try:
            server, engine = _settings(**{name: given.pop(name) for name in shared})
        except ValueError as error:
            fail(str(error))
        run(server, engine, **given)

    command.__signature__ = inspect.Signature([*shared.values(), *own])  # type: ignore[attr-defined]
    return command


def _settings(
    model: options.Model = None,
    *,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    uds: options.UnixSocket = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
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
) -> tuple[ServerConfig, EngineConfig]:
    """Raises ValueError, saying what to change."""
    from argosy.engine import PACK_CACHE_BYTES
    from argosy.models import BUNDLED

    server = ServerConfig(
        host=host,
        port=port,
        uds=uds,
        tls=tls_of(tls_cert, tls_key, tls_client_ca),
        served_model_names=tuple(served_model_name or ()),
        chat_template=chat_template,
        drain_deadline_s=drain_deadline,
        vllm_metrics=vllm_metrics,
    )
    engine = EngineConfig(
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
    )
    return server, engine


def _require_engine() -> None:
    if importlib.util.find_spec("torch") is None:
        fail("the engine is not installed here; install it with: pip install 'argosy[engine]'")
