"""Built-in engine kinds, as data. The options are those of vLLM 0.32, SGLang 0.5 and llama.cpp of November 2026."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from argosy.deployment.declaration.config import FleetConfig, PoolConfig
from argosy.deployment.declaration.engine_kind import EngineKind

ARGOSY_ENGINE = "argosy"

BUILT_IN_ENGINES: Mapping[str, EngineKind] = MappingProxyType(
    {
        ARGOSY_ENGINE: EngineKind(
            command=("argosy", "replica"),
            socket_arguments=("--uds", "{socket}"),
            port_arguments=("--host", "{host}", "--port", "{port}"),
            kind="argosy",
            ready_path="/ready",
        ),
        "vllm": EngineKind(
            command=(
                "vllm",
                "serve",
                "{model}",
                "--served-model-name",
                "{served_name}",
                "--shutdown-timeout",
                "{drain_deadline_s}",
            ),
            optional_arguments=(("--revision", "{revision}"),),
            port_arguments=("--host", "{host}", "--port", "{port}"),
            kind="vllm",
        ),
        "sglang": EngineKind(
            command=(
                "python3",
                "-m",
                "sglang.launch_server",
                "--model-path",
                "{model}",
                "--served-model-name",
                "{served_name}",
            ),
            optional_arguments=(("--revision", "{revision}"),),
            port_arguments=("--host", "{host}", "--port", "{port}"),
            false_options="omit",
            kind="sglang",
        ),
        "llama-cpp": EngineKind(
            command=("llama-server", "--alias", "{served_name}"),
            optional_arguments=(("--model", "{model_path}"), ("--hf-repo", "{hub_model}")),
            port_arguments=("--host", "{host}", "--port", "{port}"),
            list_options="repeat",
            kind="llama.cpp",
        ),
    }
)


def find_engine(config: FleetConfig, pool: PoolConfig) -> EngineKind:
    """Return the engine kind of a pool. The configuration must be valid."""
    return config.engines.get(pool.engine) or BUILT_IN_ENGINES[pool.engine]
