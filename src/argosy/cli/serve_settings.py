"""Settings that `argosy serve` and `argosy replica` build from their shared options."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import typer

from argosy.cli import serve_options
from argosy.cli.failure import fail
from argosy.cli.tls_options import TlsCert, TlsClientCa, TlsKey, build_tls_config
from argosy.engine import EngineConfig, ReplicaServerConfig

SettingsCommand = Callable[..., None]
"""`run(server, engine, **own)`, where `own` holds the command's own options as keywords."""

_OPTIONS_OF_GATEWAY = frozenset(
    {"host", "port", "uds", "tls_cert", "tls_key", "tls_client_ca", "model", "revision"}
)
"""Shared options that `argosy serve` does not pass on to its replicas."""


def with_shared_options(run: SettingsCommand) -> Callable[..., None]:
    """Return `run` as a command that also has the shared options and receives them as settings."""
    shared_parameters = inspect.signature(_build_settings, eval_str=True).parameters
    _, _, *own_parameters = inspect.signature(run, eval_str=True).parameters.values()

    @functools.wraps(run)
    def command(**options: Any) -> None:  # noqa: ANN401 - options have any type
        _require_engine()
        try:
            server, engine = _build_settings(
                **{name: options.pop(name) for name in shared_parameters}
            )
        except ValueError as error:
            fail(str(error))
        run(server, engine, **options)

    command.__signature__ = inspect.Signature([*shared_parameters.values(), *own_parameters])  # type: ignore[attr-defined]
    return command


def given_replica_options(context: typer.Context) -> dict[str, Any]:
    """Return the shared options on the command line of `argosy serve` that its replicas need, by name."""
    names = inspect.signature(_build_settings).parameters.keys() - _OPTIONS_OF_GATEWAY
    given = {}
    for name in sorted(names & context.params.keys()):
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            given[name] = context.params[name]
    return given


def format_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield command-line arguments that set options by name."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        match value:
            case bool():
                yield f"--{flag}" if value else f"--no-{flag}"
            case dict():
                yield from (f"--{flag}", msgspec.json.encode(value).decode())
            case list() | tuple():
                for item in value:
                    yield from (f"--{flag}", str(item))
            case _:
                yield from (f"--{flag}", str(value))


def _build_settings(
    model: serve_options.Model = None,
    *,
    host: serve_options.Host = "127.0.0.1",
    port: serve_options.Port = 8000,
    uds: serve_options.UnixSocketPath = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    served_model_name: serve_options.ServedModelNames = None,
    revision: serve_options.Revision = None,
    dtype: serve_options.DType = "auto",
    device: serve_options.Device = "auto",
    quantize: serve_options.Quantize = None,
    task: serve_options.Task = "auto",
    model_impl: serve_options.ModelImplName = "auto",
    trust_remote_code: serve_options.TrustRemoteCode = False,
    chat_template: serve_options.ChatTemplatePath = None,
    tool_format: serve_options.ToolFormat = "auto",
    generation_config: serve_options.GenerationConfig = "auto",
    override_generation_config: serve_options.OverrideGenerationConfig = None,
    max_model_len: serve_options.MaxModelLen = None,
    max_seqs: serve_options.MaxSeqs = 64,
    kv_memory: serve_options.KvMemory = None,
    kv_dtype: serve_options.KvDType = "auto",
    host_kv: serve_options.HostKvMemory = None,
    pack_cache: serve_options.PackCache = None,
    threads: serve_options.Threads = None,
    max_step_tokens: serve_options.MaxStepTokens = 1024,
    batching: serve_options.Batching = "continuous",
    prefix_cache: serve_options.PrefixCache = True,
    request_timeout: serve_options.RequestTimeout = 600.0,
    unknown_fields: serve_options.UnknownFields = "ignore",
    drain_deadline: serve_options.DrainDeadline = 30.0,
    zone: serve_options.Zone = "",
    label: serve_options.Labels = None,
    vllm_metrics: serve_options.VllmMetrics = False,
) -> tuple[ReplicaServerConfig, EngineConfig]:
    """Build the settings of the server and the engine from the shared options.

    Raises:
        ValueError: The options contradict each other; the message contains the remedy.
    """
    from argosy.engine import DEFAULT_PACK_CACHE_BYTES
    from argosy.models import BUNDLED_MODEL

    server = ReplicaServerConfig(
        host=host,
        port=port,
        uds=uds,
        tls=build_tls_config(tls_cert, tls_key, tls_client_ca),
        served_model_names=tuple(served_model_name or ()),
        chat_template=chat_template,
        tool_format=tool_format,
        unknown_fields=unknown_fields,
        drain_deadline_s=drain_deadline,
        zone=zone,
        labels=dict(each.split("=", 1) for each in label or ()),
        vllm_metrics=vllm_metrics,
    )
    engine = EngineConfig(
        model=model or str(BUNDLED_MODEL),
        revision=revision,
        generation_config=generation_config,
        override_generation_config=override_generation_config or {},
        dtype=dtype,
        device=device,
        quantize=quantize,
        task=task,
        model_impl=model_impl,
        trust_remote_code=trust_remote_code,
        threads=threads,
        max_model_len=max_model_len,
        max_seqs=max_seqs,
        max_step_tokens=max_step_tokens,
        batching=batching,
        kv_memory_bytes=kv_memory,
        kv_dtype=kv_dtype,
        host_kv_bytes=host_kv or 0,
        pack_cache_bytes=DEFAULT_PACK_CACHE_BYTES if pack_cache is None else pack_cache,
        prefix_cache=prefix_cache,
        request_timeout_s=request_timeout,
    )
    return server, engine


def _require_engine() -> None:
    if importlib.util.find_spec("torch") is None:
        fail("the engine is not installed; install it with: pip install 'argosy[engine]'")
