"""Catalog of the measured engines, with their workloads and their environments."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BATCHED = frozenset({"W1", "W2", "W3 off", "W3 on"})
SERVED = BATCHED | {"W4"}
FEW = frozenset({"W1", "W2"})
DEFAULT = ("argosy", "vllm", "openvino", "llama.cpp", "transformers")


@dataclass(frozen=True, slots=True)
class Peer:
    """Engine with one format of the weights."""

    module: str
    """Module below `benchmarks.peers`."""
    workloads: frozenset[str]
    environment: str | None = None
    """Environment below `.venv-peers`, or None for the one that runs the benchmark."""
    weights: str = "bf16"
    """Format that the engine converts to (`bf16`, `int8`, `int4`), or one of `stored_weights.KINDS` that it reads."""
    model_impl: str = "auto"
    """Argosy's implementation of the model."""
    batching: str = "continuous"
    paced: bool = False
    """Whether the engine has no server. Its W4 runs in its process without HTTP, which favours it."""
    speculation: str = "default"
    """Setting of drafts, as in `worker.Settings`."""


def interpreter(environment: str | None, environments: Path) -> Path:
    """Return the Python interpreter of an environment, or the running one for None.

    Raises:
        FileNotFoundError: The environment is not installed. The message contains the remedy.
    """
    if environment is None:
        return Path(sys.executable)
    path = environments / environment / "bin" / "python"
    if not path.exists():
        raise FileNotFoundError(f"not installed: make peers/{environment}")
    return path


ENGINES = {
    "argosy": Peer("argosy", SERVED),
    "vllm": Peer("vllm", SERVED, "vllm"),
    "openvino": Peer("openvino", SERVED, "openvino", paced=True),
    "llama.cpp": Peer("llama_cpp", SERVED, "llama-cpp"),
    "transformers": Peer("transformers", FEW, batching="static"),
    "transformers-cb": Peer("transformers", BATCHED),
    "argosy-int8": Peer("argosy", FEW, weights="int8"),
    "openvino-int8": Peer("openvino", FEW, "openvino", "int8"),
    "llama.cpp-int8": Peer("llama_cpp", FEW, "llama-cpp", "int8"),
    "argosy-int4": Peer("argosy", FEW, weights="int4"),
    "openvino-int4": Peer("openvino", FEW, "openvino", "int4"),
    "llama.cpp-int4": Peer("llama_cpp", FEW, "llama-cpp", "int4"),
    "argosy-generic": Peer("argosy", FEW, model_impl="transformers"),
    "argosy-gptq": Peer("argosy", FEW, weights="gptq"),
    "vllm-gptq": Peer("vllm", FEW, "vllm", "gptq"),
    "argosy-w8a8": Peer("argosy", FEW, weights="w8a8"),
    "vllm-w8a8": Peer("vllm", FEW, "vllm", "w8a8"),
    "argosy-q8_0": Peer("argosy", FEW, weights="gguf-q8_0"),
    "llama.cpp-q8_0": Peer("llama_cpp", FEW, "llama-cpp", "gguf-q8_0"),
    "argosy-q4_k": Peer("argosy", FEW, weights="gguf-q4_k"),
    "llama.cpp-q4_k": Peer("llama_cpp", FEW, "llama-cpp", "gguf-q4_k"),
}
