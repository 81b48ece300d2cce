"""Rules that find the encoded matrices of a checkpoint by the names of its stored tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from argosy.engine.execution.checkpoint_formats.bitsandbytes import (
    QUANT_STATE_PREFIX,
    Bnb4Tensor,
    Bnb8Tensor,
)
from argosy.engine.execution.checkpoint_formats.compressed import create_compressed_tensor
from argosy.engine.execution.checkpoint_formats.encoded import EncodedTensor, TensorSource
from argosy.engine.execution.checkpoint_formats.float_formats import Fp8Tensor, Mxfp4Tensor
from argosy.engine.execution.checkpoint_formats.integer_formats import AwqTensor, GptqTensor
from argosy.engine.execution.checkpoint_formats.quantization_config import QuantizationConfig

_ACTIVATION_SCALES = re.compile(
    r".+\.(input_scale|output_scale|activation_scale|input_zero_point|input_global_scale|input_scale_ub"
    r"|[kqv]_scale|[kv]_zero_point|kv_scale|[kv]_proj\.(output_scale|[kv]_scale))$"
)
"""Scales of inputs and of the KV cache, which are computed instead."""


@dataclass(frozen=True, slots=True)
class EncodedTensors:
    """Encoded matrices of a checkpoint."""

    by_name: dict[str, EncodedTensor]
    """Matrix by the name that it has in full precision."""
    ignored: tuple[str, ...]
    """Stored tensors that are not needed, such as scales of inputs."""


def find_encoded_tensors(source: TensorSource, config: QuantizationConfig) -> EncodedTensors:
    """Find the matrices that are stored as `config` says.

    Raises:
        ValueError: There are none, or stored tensors do not belong together. The message names file and tensor.
    """
    found = {tensor.name: tensor for tensor in _find(source, config)}
    if not found:
        raise ValueError(
            f"config.json says that the weights are quantized ({config.describe()}), but no stored tensor is; "
            "remove quantization_config from config.json, or fetch the weights that belong to it"
        )
    ignored = tuple(sorted(name for name in source.files if _ACTIVATION_SCALES.fullmatch(name)))
    return EncodedTensors(found, ignored)


def _find(source: TensorSource, config: QuantizationConfig) -> Iterable[EncodedTensor]:
    match config.method:
        case "gptq":
            return (GptqTensor(prefix, source, config) for prefix in _prefixes(source, ".qweight"))
        case "awq":
            return (AwqTensor(prefix, source, config) for prefix in _prefixes(source, ".qweight"))
        case "compressed-tensors":
            prefixes = _prefixes(source, ".weight_scale")
            return (create_compressed_tensor(prefix, source, config) for prefix in prefixes)
        case "fp8":
            return [
                Fp8Tensor(scale.removesuffix(suffix), scale, source, config.block_size)
                for suffix in ("_scale_inv", "_scale")
                for scale in source.files
                if scale.endswith(suffix) and scale.removesuffix(suffix) in source.files
            ]
        case "mxfp4":
            return (Mxfp4Tensor(prefix, source) for prefix in _prefixes(source, "_blocks"))
        case _:
            return _find_bitsandbytes(source)


def _find_bitsandbytes(source: TensorSource) -> Iterable[EncodedTensor]:
    marker = f".weight.{QUANT_STATE_PREFIX}"
    for name in source.files:
        if marker in name:
            yield Bnb4Tensor(name.partition(marker)[0], source)
        elif name.endswith(".SCB"):
            yield Bnb8Tensor(name.removesuffix(".SCB"), source)


def _prefixes(source: TensorSource, suffix: str) -> list[str]:
    return [name.removesuffix(suffix) for name in source.files if name.endswith(suffix)]
