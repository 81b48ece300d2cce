"""compressed-tensors: integers of 2, 4 or 8 bits, packed in 32-bit words or not, and FP8, with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.encoded import (
    EncodedTensor,
    TensorSource,
    matrix_shape,
    unpack_integers,
)
from argosy.engine.execution.checkpoint_formats.float_formats import Fp8Tensor
from argosy.engine.execution.checkpoint_formats.integer_formats import (
    ZeroPointTensor,
    group_size_of,
)
from argosy.engine.execution.checkpoint_formats.quantization_config import QuantizationConfig

_WORD_BITS = 32


def create_compressed_tensor(
    prefix: str, source: TensorSource, config: QuantizationConfig
) -> EncodedTensor:
    """Create the matrix of `prefix`, which has a `weight_scale`.

    Raises:
        ValueError: The stored tensors do not belong together.
    """
    if f"{prefix}.weight_packed" in source.files:
        return CompressedTensor(prefix, source, config, is_packed=True)
    if source.dtype(f"{prefix}.weight") == torch.int8:
        return CompressedTensor(prefix, source, config, is_packed=False)
    return Fp8Tensor(f"{prefix}.weight", f"{prefix}.weight_scale", source, None)


class CompressedTensor(ZeroPointTensor):
    """Matrix of signed integers, which are read as unsigned codes, with zero points if it is asymmetric."""

    def __init__(
        self, prefix: str, source: TensorSource, config: QuantizationConfig, *, is_packed: bool
    ) -> None:
        self._values = f"{prefix}.weight_packed" if is_packed else f"{prefix}.weight"
        self._scales = f"{prefix}.weight_scale"
        self._is_packed = is_packed
        self._optional_names = {
            part: f"{prefix}.{part}"
            for part in ("weight_shape", "weight_zero_point", "weight_g_idx")
            if f"{prefix}.{part}" in source.files
        }
        stored_shape = matrix_shape(source, self._values)
        outs, cols = stored_shape
        bits = 8
        if is_packed:
            bits = config.bits or 4
            cols = self._read_cols(source, cols * (_WORD_BITS // bits))
            if -(-cols * 4 // _WORD_BITS) == stored_shape[1] != -(-cols * bits // _WORD_BITS):
                bits = 4
        scale_shape = source.shape(self._scales)
        groups = scale_shape[1] if len(scale_shape) == 2 else 1
        super().__init__(
            f"{prefix}.weight",
            source,
            (outs, cols),
            (self._values, self._scales, *self._optional_names.values()),
            bits,
            group_size_of(config, cols, max(groups, 1)),
        )
        if is_packed and stored_shape[1] != -(-cols * bits // _WORD_BITS):
            raise self.error(
                self._values, f"has shape {list(stored_shape)} for {cols} columns of {bits} bits"
            )
        self.check_shape(self._scales, (outs, groups), (outs,), (1,), ())
        if "weight_zero_point" in self._optional_names:
            packed_rows = -(-outs * bits // _WORD_BITS)
            self.check_shape(
                self._optional_names["weight_zero_point"],
                *((packed_rows, groups), scale_shape, (outs, groups)),
            )
        if "weight_g_idx" in self._optional_names:
            self.check_shape(self._optional_names["weight_g_idx"], (cols,))

    def _read_cols(self, source: TensorSource, default: int) -> int:
        name = self._optional_names.get("weight_shape")
        if name is None:
            return default
        shape = source.read(name).flatten().tolist()
        if len(shape) != 2 or not 0 < shape[1] <= default:
            raise ValueError(
                f"{source.files[name]}: {name} is {shape[:4]}, which does not fit {self._values}; "
                "the checkpoint is damaged, fetch it again"
            )
        return int(shape[1])

    def read_codes(self) -> Tensor:
        stored = self._source.read(self._values)
        if self._is_packed:
            return unpack_integers(stored, self._bits)[:, : self.shape[1]].contiguous()
        return stored.contiguous().view(torch.uint8) ^ 128

    def read_group_scales(self) -> Tensor:
        scales = self.read_scales(self._scales)
        if scales.dim() < 2:
            scales = scales.reshape(-1, 1).expand(self.shape[0], 1)
        return scales

    def read_zeros(self) -> Tensor:
        middle = 1 << (self._bits - 1)
        name = self._optional_names.get("weight_zero_point")
        if name is None:
            return torch.tensor([[middle]], dtype=torch.int32)
        stored = self._source.read(name)
        if stored.dtype == torch.int32 and self._is_packed:
            return unpack_integers(stored.T, self._bits)[:, : self.shape[0]].T.int()
        zeros = stored.int() + middle
        return zeros if zeros.dim() == 2 else zeros.reshape(-1, 1)
