"""Argosy is a self-hosted LLM serving fleet.

The package exports the offline API (`LLM`, `AsyncLLM`) and the types that it uses. Importing it is cheap, because each
name is loaded on first access. The first use of `LLM` imports torch. The servers are started with the `argosy` command,
whose gateway and replicas are in the packages `gateway` and `engine`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.engine import (
        LLM,
        AsyncLLM,
        CompletionOutput,
        EngineConfig,
        LoRARequest,
        RequestOutput,
    )
    from argosy.protocol import ApiError, SamplingParams

__all__ = [
    "LLM",
    "ApiError",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
]

_PACKAGE_BY_NAME = dict.fromkeys(__all__, "argosy.engine") | {
    "ApiError": "argosy.protocol",
    "SamplingParams": "argosy.protocol",
}


def __getattr__(name: str) -> object:
    """Import a public name from its package on first access."""
    package = _PACKAGE_BY_NAME.get(name)
    if package is None:
        raise AttributeError(f"module 'argosy' has no attribute {name!r}")
    value: object = getattr(import_module(package), name)
    globals()[name] = value
    return value
