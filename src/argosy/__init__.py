"""Argosy: a self-hosted LLM serving fleet. Importing it is cheap; torch comes with the first `LLM`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.engine import LLM, AsyncLLM, CompletionOutput, EngineConfig, RequestOutput
    from argosy.protocol import ApiError, SamplingParams

__all__ = [
    "LLM",
    "ApiError",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
]

_HOMES = dict.fromkeys(__all__, "argosy.engine") | {
    "ApiError": "argosy.protocol",
    "SamplingParams": "argosy.protocol",
}


def __getattr__(name: str) -> object:
    """Load a public name from its room when it is first asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'argosy' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value
