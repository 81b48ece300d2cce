"""One replica: scheduling, execution, serving. The names here load when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.engine.async_llm import AsyncLLM
    from argosy.engine.engine_config import KV_SHARE_OF_FREE, PACK_CACHE_BYTES, EngineConfig
    from argosy.engine.execution.architecture_config import read_spec
    from argosy.engine.execution.checkpoint import locate
    from argosy.engine.execution.model_architecture import Description, ModelSpec, describe
    from argosy.engine.llm import LLM
    from argosy.engine.outputs import CompletionOutput, RequestOutput
    from argosy.engine.serving.api_server.replica_server import serve_replica
    from argosy.engine.serving.api_server.replica_server_config import ServerConfig
    from argosy.engine.serving.engine_core.core_start import EarlyCore
    from argosy.engine.serving.engine_core.engine_client import EngineFailedError

__all__ = [
    "KV_SHARE_OF_FREE",
    "LLM",
    "PACK_CACHE_BYTES",
    "AsyncLLM",
    "CompletionOutput",
    "Description",
    "EarlyCore",
    "EngineConfig",
    "EngineFailedError",
    "ModelSpec",
    "RequestOutput",
    "ServerConfig",
    "describe",
    "locate",
    "read_spec",
    "serve_replica",
]

_HOMES = {
    "KV_SHARE_OF_FREE": "engine_config",
    "LLM": "llm",
    "PACK_CACHE_BYTES": "engine_config",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "Description": "execution.model_architecture",
    "EarlyCore": "serving.engine_core.core_start",
    "EngineConfig": "engine_config",
    "EngineFailedError": "serving.engine_core.engine_client",
    "ModelSpec": "execution.model_architecture",
    "RequestOutput": "outputs",
    "ServerConfig": "serving.api_server.replica_server_config",
    "describe": "execution.model_architecture",
    "locate": "execution.checkpoint",
    "read_spec": "execution.architecture_config",
    "serve_replica": "serving.api_server.replica_server",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module, so that asking for settings does not load a server."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'argosy.engine' has no attribute {name!r}")
    value: object = vars(import_module(f"argosy.engine.{home}"))[name]
    globals()[name] = value
    return value
