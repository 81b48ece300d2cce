"""Inference engine of one replica, as a server process or as a Python library.

The scheduler (`scheduling`) plans each step, and an executor (`execution`) computes it on the CPU or a GPU. The
replica server (`serving`) makes both available over HTTP. `LLM` and `AsyncLLM` run the same engine loop from Python.
Their prompts (`offline_prompts`), parameters (`SamplingParams`) and options (`llm_options`) have the shapes
that vLLM accepts. They pass the same validation as HTTP requests (`offline_request_processor`), and `outputs` assembles
token deltas into results. `engine_config` holds the settings. A public name is imported from its module on first
use, so that reading settings does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.engine.async_llm import AsyncLLM
    from argosy.engine.engine_config import DEFAULT_KV_MEMORY_FRACTION, EngineConfig
    from argosy.engine.engine_request import AdapterSource, EngineRequest
    from argosy.engine.execution.adapters.peft_reader import read_adapter
    from argosy.engine.execution.architectures.pooling import read_pooling_layout
    from argosy.engine.execution.checkpoint_formats.checkpoint import (
        resolve_model_path,
        weight_files,
    )
    from argosy.engine.execution.checkpoint_formats.reader import StoredIntegers
    from argosy.engine.execution.drafting.token_index import prebuild_token_index
    from argosy.engine.execution.kernels.cpu.native_kernels import prebuild_kernels
    from argosy.engine.execution.loading.model_selection import (
        AnyArchitecture,
        find_stored_integers,
        read_any_architecture,
    )
    from argosy.engine.llm import LLM
    from argosy.engine.offline_request_processor import LoRARequest
    from argosy.engine.outputs import CompletionOutput, RequestOutput
    from argosy.engine.quantization.quantize import QuantizedModel, quantize_model
    from argosy.engine.serving.api_server.adapter_registry import LoraModule
    from argosy.engine.serving.api_server.replica_server import serve_replica
    from argosy.engine.serving.api_server.replica_server_config import (
        REPLICA_OPTIONS,
        ReplicaServerConfig,
        build_replica_settings,
    )
    from argosy.engine.serving.engine_core.core_start import PrestartedCore
    from argosy.engine.serving.engine_core.engine_client import EngineFailedError
    from argosy.engine.serving.preprocessing.text_processing import tool_format_names
    from argosy.engine.serving.text import ChatTemplate, TemplateCapabilities

__all__ = [
    "DEFAULT_KV_MEMORY_FRACTION",
    "LLM",
    "REPLICA_OPTIONS",
    "AdapterSource",
    "AnyArchitecture",
    "AsyncLLM",
    "ChatTemplate",
    "CompletionOutput",
    "EngineConfig",
    "EngineFailedError",
    "EngineRequest",
    "LoRARequest",
    "LoraModule",
    "PrestartedCore",
    "QuantizedModel",
    "ReplicaServerConfig",
    "RequestOutput",
    "StoredIntegers",
    "TemplateCapabilities",
    "build_replica_settings",
    "find_stored_integers",
    "prebuild_kernels",
    "prebuild_token_index",
    "quantize_model",
    "read_adapter",
    "read_any_architecture",
    "read_pooling_layout",
    "resolve_model_path",
    "serve_replica",
    "tool_format_names",
    "weight_files",
]

_MODULE_BY_NAME = {
    "DEFAULT_KV_MEMORY_FRACTION": "engine_config",
    "LLM": "llm",
    "LoRARequest": "offline_request_processor",
    "LoraModule": "serving.api_server.adapter_registry",
    "AnyArchitecture": "execution.loading.model_selection",
    "AsyncLLM": "async_llm",
    "ChatTemplate": "serving.text",
    "CompletionOutput": "outputs",
    "PrestartedCore": "serving.engine_core.core_start",
    "EngineConfig": "engine_config",
    "EngineFailedError": "serving.engine_core.engine_client",
    "AdapterSource": "engine_request",
    "EngineRequest": "engine_request",
    "REPLICA_OPTIONS": "serving.api_server.replica_server_config",
    "RequestOutput": "outputs",
    "build_replica_settings": "serving.api_server.replica_server_config",
    "ReplicaServerConfig": "serving.api_server.replica_server_config",
    "resolve_model_path": "execution.checkpoint_formats.checkpoint",
    "StoredIntegers": "execution.checkpoint_formats.reader",
    "QuantizedModel": "quantization.quantize",
    "quantize_model": "quantization.quantize",
    "TemplateCapabilities": "serving.text",
    "find_stored_integers": "execution.loading.model_selection",
    "prebuild_kernels": "execution.kernels.cpu.native_kernels",
    "prebuild_token_index": "execution.drafting.token_index",
    "read_adapter": "execution.adapters.peft_reader",
    "read_any_architecture": "execution.loading.model_selection",
    "read_pooling_layout": "execution.architectures.pooling",
    "weight_files": "execution.checkpoint_formats.checkpoint",
    "serve_replica": "serving.api_server.replica_server",
    "tool_format_names": "serving.preprocessing.text_processing",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use.

    Raises:
        AttributeError: The package has no public name `name`.
    """
    module = _MODULE_BY_NAME.get(name)
    if module is None:
        raise AttributeError(f"module 'argosy.engine' has no attribute {name!r}")
    value: object = vars(import_module(f"argosy.engine.{module}"))[name]
    globals()[name] = value
    return value
