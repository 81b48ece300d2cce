"""Memory of a replica: weights, activations, reserve, and the tokens that its KV cache holds."""

from __future__ import annotations

import msgspec

from argosy.twin.hardware.model_shape import ModelShape
from argosy.twin.hardware.roofline import ReplicaSpec

GB = 1e9
RESERVE_GB = 2.0
"""Memory of an accelerator for the context of the driver, CUDA graphs and fragmentation."""
COLLECTIVE_GB = 0.4
"""Buffers of collectives on each accelerator of several (NCCL: 342 to 392 MB)."""
BLOCK_TOKENS = 16


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a replica in bytes, for each of its accelerators, and the capacity of its KV cache."""

    memory_bytes: int
    """Memory that the engine may use."""
    weight_bytes: int
    activation_bytes: int
    reserve_bytes: int
    kv_bytes_per_token: float
    """Bytes of a token in the KV cache, on one accelerator."""
    kv_tokens: int
    """Tokens that the KV cache of the replica holds. 0 if the weights do not fit."""

    @property
    def fits(self) -> bool:
        """Whether the weights leave room for a KV cache."""
        return self.kv_tokens > 0


def fit_memory(spec: ReplicaSpec, *, context_tokens: int = 8192) -> MemoryFit:
    """Return the memory of a replica.

    Args:
        spec: The replica.
        context_tokens: Tokens of a typical sequence, of which layers with a sliding window keep their window.
    """
    model = spec.model
    total = spec.accelerator.memory_gib * 2**30
    weights = model.weight_bytes(spec.weights) / spec.accelerators
    rows = spec.engine.max_batch_tokens
    activations = rows * (model.hidden * 8 + _widest_ffn(model) * 4 / spec.tensor_parallel)
    reserve = (RESERVE_GB + COLLECTIVE_GB * (spec.accelerators > 1)) * GB
    taken = weights + activations + reserve
    share = spec.engine.memory_share
    usable = (
        total * share if spec.engine.memory_share_of == "all" else taken + (total - taken) * share
    )
    window_share = min(1.0, model.window / context_tokens) if model.window else 1.0
    per_token = model.kv_bytes_per_token(spec.kv, window_share=window_share)
    if not model.kv_lora_rank:
        per_token /= min(spec.tensor_parallel, model.kv_heads)
    per_token /= spec.pipeline_parallel
    free = usable - taken
    tokens = max(0, int(free / per_token)) // BLOCK_TOKENS * BLOCK_TOKENS
    return MemoryFit(
        memory_bytes=int(usable),
        weight_bytes=int(weights),
        activation_bytes=int(activations),
        reserve_bytes=int(reserve),
        kv_bytes_per_token=per_token,
        kv_tokens=tokens,
    )


def _widest_ffn(model: ModelShape) -> int:
    return max(model.ffn if not model.is_moe or model.dense_layers else 0, model.expert_ffn * 2)
