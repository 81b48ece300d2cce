"""Sizes of a model, for people."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.engine.engine_config import DEFAULT_BLOCK_SIZE
from argosy.engine.execution.architectures.architecture import GenericArchitecture
from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.architectures.encoder import EncoderArchitecture
from argosy.engine.scheduling import KvCacheGroups


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """Model sizes that `argosy models` shows."""

    architecture: str
    num_parameters: int
    num_active_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    """Bytes of the keys and values of a token in all layers, until it leaves the sliding windows."""
    kv_bytes_per_sequence: int
    """Bytes of the KV cache and of the recurrent state of a sequence of `max_model_len` tokens."""
    max_model_len: int


def summarize_model(
    architecture: ModelArchitecture | EncoderArchitecture | GenericArchitecture, dtype_bytes: int
) -> ModelSummary:
    """Compute a model's sizes with `dtype_bytes` bytes per element of weights and KV cache."""
    kv_bytes_per_token = architecture.kv_bytes_per_token(dtype_bytes)
    layout, max_model_len = architecture.kv_layout, architecture.max_model_len
    groups = KvCacheGroups(layout.windows, DEFAULT_BLOCK_SIZE)
    block_bytes = layout.block_bytes(kv_bytes_per_token, DEFAULT_BLOCK_SIZE)
    return ModelSummary(
        architecture=architecture.architecture,
        num_parameters=architecture.num_parameters,
        num_active_parameters=architecture.num_active_parameters,
        weight_bytes=architecture.num_parameters * dtype_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_bytes_per_sequence=groups.count_blocks(max_model_len) * block_bytes
        + architecture.state_bytes,
        max_model_len=max_model_len,
    )
