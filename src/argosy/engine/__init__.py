"""One replica: scheduling, execution, serving. The names here load when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.engine.async_llm import AsyncLLM
    from argosy.engine.engine_config import (
        DEFAULT_KV_MEMORY_FRACTION,
        DEFAULT_PACK_CACHE_BYTES,
        EngineConfig,
    )
    from argosy.engine.execution.architecture_config import read_architecture
    from argosy.engine.execution.checkpoint import resolve_model_path
    from argosy.engine.execution.model_architecture import (
        ModelArchitecture,
        ModelSummary,
        summarize_model,
    )
    from argosy.engine.llm import LLM
    from argosy.engine.outputs import CompletionOutput, RequestOutput
    from argosy.engine.serving.api_server.replica_server import serve_replica
    from argosy.engine.serving.api_server.replica_server_config import ReplicaServerConfig
    from argosy.engine.serving.engine_core.core_start import PrestartedCore
    from argosy.engine.serving.engine_core.engine_client import EngineFailedError

__all__ = [
    "DEFAULT_KV_MEMORY_FRACTION",
    "DEFAULT_PACK_CACHE_BYTES",
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineFailedError",
    "ModelArchitecture",
    "ModelSummary",
    "PrestartedCore",
    "ReplicaServerConfig",
    "RequestOutput",
    "read_architecture",
    "resolve_model_path",
    "serve_replica",
    "summarize_model",
]

_MODULE_BY_NAME = {
    "DEFAULT_KV_MEMORY_FRACTION": "engine_config",
    "LLM": "llm",
    "DEFAULT_PACK_CACHE_BYTES": "engine_config",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "ModelSummary": "execution.model_architecture",
    "PrestartedCore": "serving.engine_core.core_start",
    "EngineConfig": "engine_config",
    "EngineFailedError": "serving.engine_core.engine_client",
    "ModelArchitecture": "execution.model_architecture",
    "RequestOutput": "outputs",
    "ReplicaServerConfig": "serving.api_server.replica_server_config",
    "summarize_model": "execution.model_architecture",
    "resolve_model_path": "execution.checkpoint",
    "read_architecture": "execution.architecture_config",
    "serve_replica": "serving.api_server.replica_server",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module, so that asking for settings does not load a server."""
    home = _MODULE_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module 'argosy.engine' has no attribute {name!r}")
    value: object = vars(import_module(f"argosy.engine.{home}"))[name]
    globals()[name] = value
    return value
