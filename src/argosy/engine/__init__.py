"""One replica: scheduling, execution, serving. The names here load when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.engine.async_llm import AsyncLLM
    from argosy.engine.config import KV_SHARE_OF_FREE, PACK_CACHE_BYTES, EngineConfig
    from argosy.engine.execution.checkpoint import locate
    from argosy.engine.execution.spec import Description, ModelSpec, describe
    from argosy.engine.execution.spec_config import read_spec
    from argosy.engine.llm import LLM
    from argosy.engine.outputs import CompletionOutput, RequestOutput
    from argosy.engine.serving.core.client import EngineFailedError
    from argosy.engine.serving.core.start import EarlyCore
    from argosy.engine.serving.http.options import ServerConfig
    from argosy.engine.serving.http.server import serve_replica

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
    "KV_SHARE_OF_FREE": "config",
    "LLM": "llm",
    "PACK_CACHE_BYTES": "config",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "Description": "execution.spec",
    "EarlyCore": "serving.core.start",
    "EngineConfig": "config",
    "EngineFailedError": "serving.core.client",
    "ModelSpec": "execution.spec",
    "RequestOutput": "outputs",
    "ServerConfig": "serving.http.options",
    "describe": "execution.spec",
    "locate": "execution.checkpoint",
    "read_spec": "execution.spec_config",
    "serve_replica": "serving.http.server",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module, so that asking for settings does not load a server."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'argosy.engine' has no attribute {name!r}")
    value: object = vars(import_module(f"argosy.engine.{home}"))[name]
    globals()[name] = value
    return value
