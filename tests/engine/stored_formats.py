"""Quantized matrices as checkpoints store them, with dequantizers in NumPy that follow each format's specification.

Every format makes the stored tensors of a random matrix. Its dequantizer reads only those tensors, one number at a
time, and shares no code with the product.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.engine.transformers_reference import Reference

Array = Any
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BNB_FP4_VALUES = (
    *(0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.16666667, 0.25),
    *(-0.0, -0.0052083333, -0.6666667, -1.0, -0.3333333, -0.5, -0.16666667, -0.25),
)


@dataclass(frozen=True)
class StoredFormat:
    """A format: its section of config.json, the writer of a matrix, and the dequantizer of what was written."""

    config: dict[str, Any]
    encode: Callable[[str, NDArray[np.float32]], dict[str, torch.Tensor]]
    decode: Callable[[str, dict[str, torch.Tensor]], NDArray[np.float64]]
    is_native: bool = True
    """Whether the kernels compute with the stored integers."""
    tolerance: float = 1e-6
    """Largest error of the native form, relative to the largest weight of the matrix."""
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    """More tensors of a checkpoint, which are ignored."""


def signed(words: Array) -> torch.Tensor:
    """Make an int32 tensor of unsigned 32-bit words."""
    return torch.from_numpy(np.ascontiguousarray(words.astype(np.uint32)).view(np.int32))


def unsigned(tensor: torch.Tensor) -> NDArray[np.uint32]:
    return tensor.numpy().view(np.uint32)


def pack_rows(codes: Array, bits: int) -> Array:
    """Pack codes [R, C] along the first dimension into words [R * bits / 32, C]."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, -len(codes) % per_word), (0, 0)))
    words = np.zeros((len(padded) // per_word, codes.shape[1]), np.uint64)
    for row, line in enumerate(padded):
        words[row // per_word] |= line.astype(np.uint64) << np.uint64(row % per_word * bits)
    return words


def group_affine(
    weight: Array, group: int, bits: int, *, symmetric: bool, scale_dtype: type
) -> tuple[Array, Array, Array]:
    """Round a weight [N, K] to codes [N, K], with scales and zero points [N, groups]."""
    outs, cols = weight.shape
    size = cols if group == -1 else group
    top = 2**bits - 1
    groups = weight.reshape(outs, -1, size)
    if symmetric:
        scales = np.abs(groups).max(-1) / (top // 2)
        zeros = np.full(scales.shape, (top + 1) // 2)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / top
        zeros = np.clip(np.round(-low / scales), 1, top)
    scales = scales.astype(scale_dtype).astype(np.float32)
    codes = np.clip(np.round(groups / scales[..., None] + zeros[..., None]), 0, top)
    return codes.reshape(outs, cols).astype(np.int64), scales, zeros.astype(np.int64)


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    v2: bool = False,
) -> StoredFormat:
    """GPTQ, with groups of the columns in the order of the Hessian's diagonal if `act_order`."""
    shift = 0 if v2 else 1

    def encode(name: str, weight: Array) -> dict[str, torch.Tensor]:
        cols = weight.shape[1]
        order = np.random.default_rng(cols).permutation(cols) if act_order else np.arange(cols)
        codes, scales, zeros = group_affine(
            weight[:, order], group, bits, symmetric=symmetric, scale_dtype=np.float16
        )
        size = cols if group == -1 else group
        group_index = np.empty(cols, np.int32)
        group_index[order] = np.arange(cols) // size
        stored = np.empty_like(codes)
        stored[:, order] = codes
        return {
            f"{name}.qweight": signed(pack_rows(stored.T, bits)),
            f"{name}.qzeros": signed(pack_rows(zeros - shift, bits).T),
            f"{name}.scales": torch.from_numpy(scales.T.astype(np.float16)),
            f"{name}.g_idx": torch.from_numpy(group_index),
        }

    def decode(name: str, tensors: dict[str, torch.Tensor]) -> Array:
        words, zeros = (unsigned(tensors[f"{name}.{part}"]) for part in ("qweight", "qzeros"))
        scales = tensors[f"{name}.scales"].numpy().astype(np.float64)
        groups = tensors[f"{name}.g_idx"].numpy()
        per_word, mask = 32 // bits, 2**bits - 1
        weight = np.empty((words.shape[1], len(groups)))
        for k, g in enumerate(groups):
            for n in range(len(weight)):
                code = int(words[k // per_word, n]) >> k % per_word * bits & mask
                zero = (int(zeros[g, n // per_word]) >> n % per_word * bits & mask) + shift
                weight[n, k] = scales[g, n] * (code - zero)
        return weight

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
    config |= {"desc_act": act_order, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    return StoredFormat(config, encode, decode)


def awq(group: int = 32) -> StoredFormat:
    """AWQ's gemm layout."""

    def pack(codes: Array) -> torch.Tensor:
        words = np.zeros((len(codes), codes.shape[1] // 8), np.uint64)
        for position, column in enumerate(AWQ_ORDER):
            words |= codes[:, column::8].astype(np.uint64) << np.uint64(4 * position)
        return signed(words)

    def encode(name: str, weight: Array) -> dict[str, torch.Tensor]:
        codes, scales, zeros = group_affine(
            weight, group, 4, symmetric=False, scale_dtype=np.float16
        )
        return {
            f"{name}.qweight": pack(codes.T),
            f"{name}.qzeros": pack(zeros.T),
            f"{name}.scales": torch.from_numpy(scales.T.astype(np.float16)),
        }

    def decode(name: str, tensors: dict[str, torch.Tensor]) -> Array:
        words, zeros = (unsigned(tensors[f"{name}.{part}"]) for part in ("qweight", "qzeros"))
        scales = tensors[f"{name}.scales"].numpy().astype(np.float64)
        size = len(words) // len(scales)
        weight = np.empty((words.shape[1] * 8, len(words)))
        for k in range(len(words)):
            for n in range(len(weight)):
                shift = 4 * AWQ_ORDER.index(n % 8)
                code, zero = (
                    int(each[row, n // 8]) >> shift & 15
                    for each, row in ((words, k), (zeros, k // size))
                )
                weight[n, k] = scales[k // size, n] * (code - zero)
        return weight

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return StoredFormat(config | {"zero_point": True}, encode, decode)


def compressed_int(
    bits: int, group: int, *, packed: bool = True, symmetric: bool = True
) -> StoredFormat:
    """compressed-tensors with integers: `pack-quantized` or `int-quantized`."""
    middle = 2 ** (bits - 1)

    def encode(name: str, weight: Array) -> dict[str, torch.Tensor]:
        codes, scales, zeros = group_affine(
            weight, group, bits, symmetric=symmetric, scale_dtype=np.float16
        )
        tensors = {f"{name}.weight_scale": torch.from_numpy(scales).half()}
        if packed:
            tensors[f"{name}.weight_packed"] = signed(pack_rows(codes.T, bits).T)
            tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
            if not symmetric:
                tensors[f"{name}.weight_zero_point"] = signed(pack_rows(zeros, bits))
        else:
            tensors[f"{name}.weight"] = torch.from_numpy((codes - middle).astype(np.int8))
        return tensors

    def decode(name: str, tensors: dict[str, torch.Tensor]) -> Array:
        scales = tensors[f"{name}.weight_scale"].numpy().astype(np.float64)
        if packed:
            words = unsigned(tensors[f"{name}.weight_packed"])
            zeros = None if symmetric else unsigned(tensors[f"{name}.weight_zero_point"])
            outs, cols = tensors[f"{name}.weight_shape"].tolist()
        else:
            values = tensors[f"{name}.weight"].numpy()
            outs, cols = values.shape
        per_word, mask = 32 // bits, 2**bits - 1
        size = -(-cols // scales.shape[1])
        weight = np.empty((outs, cols))
        for n in range(outs):
            for k in range(cols):
                zero = 0
                if packed:
                    code = (int(words[n, k // per_word]) >> k % per_word * bits & mask) - middle
                    if zeros is not None:
                        zero = int(zeros[n // per_word, k // size]) >> n % per_word * bits & mask
                        zero -= middle
                else:
                    code = int(values[n, k])
                weight[n, k] = scales[n, k // size] * (code - zero)
        return weight

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights |= (
        {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    )
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    scale = {f"model.layers.0.self_attn.{kind}_scale": torch.ones(1) for kind in "kv"}
    return StoredFormat(config, encode, decode, extra=scale)


def to_fp8(weight: Array, scales: Array) -> torch.Tensor:
    return torch.from_numpy(weight / scales).to(torch.float8_e4m3fn)


def from_fp8(tensor: torch.Tensor) -> Array:
    """Decode e4m3: a sign, four bits of exponent with bias 7, three of mantissa."""
    bits = tensor.view(torch.uint8).numpy().astype(np.int64)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    )
    return np.where(bits >> 7, -magnitude, magnitude)


def fp8(kind: str) -> StoredFormat:
    """FP8 with a scale for each "tensor", "channel" or "block", or as compressed-tensors has it ("compressed")."""
    suffix = "weight_scale_inv" if kind == "block" else "weight_scale"
    block = (32, 48)

    def scale_matrix(scales: Array, shape: tuple[int, ...]) -> Array:
        if kind != "block":
            return np.broadcast_to(scales, shape)
        return np.array(
            [
                [scales[n // block[0], k // block[1]] for k in range(shape[1])]
                for n in range(shape[0])
            ]
        )

    def encode(name: str, weight: Array) -> dict[str, torch.Tensor]:
        if kind == "tensor":
            scales = np.abs(weight).max().reshape(1) / 448
        elif kind == "block":
            rows, cols = (-(-size // part) for size, part in zip(weight.shape, block, strict=True))
            scales = np.array(
                [
                    [
                        np.abs(weight[n * 32 : n * 32 + 32, k * 48 : k * 48 + 48]).max() / 448
                        for k in range(cols)
                    ]
                    for n in range(rows)
                ]
            )
        else:
            scales = np.abs(weight).max(1, keepdims=True) / 448
        scales = scales.astype(np.float32)
        return {
            f"{name}.weight": to_fp8(weight, scale_matrix(scales, weight.shape)),
            f"{name}.{suffix}": torch.from_numpy(scales),
        }

    def decode(name: str, tensors: dict[str, torch.Tensor]) -> Array:
        values = from_fp8(tensors[f"{name}.weight"])
        return values * scale_matrix(
            tensors[f"{name}.{suffix}"].numpy().astype(np.float64), values.shape
        )

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if kind == "block":
        config["weight_block_size"] = list(block)
    if kind == "compressed":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
        config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        config["config_groups"] = {"group_0": {"weights": weights}}
    extra = {"model.layers.0.mlp.down_proj.input_scale": torch.ones(1)}
    return StoredFormat(config, encode, decode, is_native=False, extra=extra)


def bitsandbytes_4bit(kind: str = "nf4", block: int = 64, *, nested: bool = False) -> StoredFormat:
    """Bitsandbytes with 4 bits: `kind` is nf4 or fp4, and scales are quantized too if `nested`."""
    table = np.array(NF4_VALUES if kind == "nf4" else BNB_FP4_VALUES, np.float32)

    def encode(name: str, weight: Array) -> dict[str, torch.Tensor]:
        blocks = weight.reshape(-1, block)
        scales = np.abs(blocks).max(-1).astype(np.float32)
        codes = np.abs((blocks / scales[:, None])[..., None] - table).argmin(-1).reshape(-1, 2)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        state["shape"] = list(weight.shape)
        tensors = {
            f"{name}.weight": torch.from_numpy((codes[:, :1] << 4 | codes[:, 1:]).astype(np.uint8)),
            f"{name}.weight.quant_map": torch.from_numpy(table),
        }
        if nested:
            offset = float(scales.mean())
            nested_table = np.linspace(-1, 1, 256, dtype=np.float32)
            parts = np.pad(scales - offset, (0, -len(scales) % 256)).reshape(-1, 256)
            nested_scales = np.abs(parts).max(-1) + np.float32(1e-9)
            flat = (parts / nested_scales[:, None]).reshape(-1)[: len(scales)]
            stored = np.abs(flat[:, None] - nested_table).argmin(-1).astype(np.uint8)
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            tensors[f"{name}.weight.absmax"] = torch.from_numpy(stored)
            tensors[f"{name}.weight.nested_absmax"] = torch.from_numpy(nested_scales)
            tensors[f"{name}.weight.nested_quant_map"] = torch.from_numpy(nested_table)
        else:
            tensors[f"{name}.weight.absmax"] = torch.from_numpy(scales)
        data = bytearray(json.dumps(state).encode())
        tensors[f"{name}.weight.quant_state.bitsandbytes__{kind}"] = torch.frombuffer(
            data, dtype=torch.uint8
        )
        return tensors

    def decode(name: str, tensors: dict[str, torch.Tensor]) -> Array:
        state = json.loads(
            bytes(tensors[f"{name}.weight.quant_state.bitsandbytes__{kind}"].tolist())
        )
        data = tensors[f"{name}.weight"].flatten().tolist()
        scales = tensors[f"{name}.weight.absmax"].tolist()
        if nested:
            nested_scales = tensors[f"{name}.weight.nested_absmax"].tolist()
            values = tensors[f"{name}.weight.nested_quant_map"].tolist()
            scales = [
                values[code] * nested_scales[i // 256] + state["nested_offset"]
                for i, code in enumerate(scales)
            ]
        flat = [
            float(table[data[i // 2] >> (0 if i % 2 else 4) & 15]) * scales[i // block]
            for i in range(math.prod(state["shape"]))
        ]
        return np.array(flat).reshape(state["shape"])

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return StoredFormat(config, encode, decode, is_native=kind == "nf4", tolerance=0.005)


def bitsandbytes_8bit() -> StoredFormat:
    """LLM.int8: rows of integers with their largest magnitude."""

    def encode(name: str, weight: Array) -> dict[str, torch.Tensor]:
        peaks = np.abs(weight).max(1).astype(np.float32)
        values = np.round(weight / peaks[:, None] * 127).astype(np.int8)
        return {
            f"{name}.weight": torch.from_numpy(values),
            f"{name}.SCB": torch.from_numpy(peaks),
            f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    def decode(name: str, tensors: dict[str, torch.Tensor]) -> Array:
        values = tensors[f"{name}.weight"].numpy().astype(np.float64)
        return values * tensors[f"{name}.SCB"].numpy().astype(np.float64)[:, None] / 127

    return StoredFormat({"quant_method": "bitsandbytes", "load_in_8bit": True}, encode, decode)


FORMATS = {
    "gptq": gptq(),
    "gptq asymmetric": gptq(group=64, symmetric=False),
    "gptq act-order": gptq(group=64, symmetric=False, act_order=True),
    "gptq v2": gptq(group=-1, symmetric=False, v2=True),
    "gptq 8 bits": gptq(bits=8, group=64),
    "gptq 8 bits asymmetric act-order": gptq(bits=8, symmetric=False, act_order=True),
    "gptq 2 bits": gptq(bits=2, symmetric=False),
    "awq": awq(),
    "awq 64": awq(group=64),
    "compressed int4": compressed_int(4, 32),
    "compressed int4 asymmetric": compressed_int(4, 64, symmetric=False),
    "compressed int8 packed": compressed_int(8, -1),
    "compressed int8": compressed_int(8, -1, packed=False),
    "compressed fp8": fp8("compressed"),
    "fp8 tensor": fp8("tensor"),
    "fp8 channel": fp8("channel"),
    "fp8 block": fp8("block"),
    "nf4": bitsandbytes_4bit(),
    "nf4 nested": bitsandbytes_4bit(nested=True),
    "nf4 long blocks": StoredFormat(**{**vars(bitsandbytes_4bit(block=256)), "is_native": False}),
    "fp4": bitsandbytes_4bit("fp4"),
    "bitsandbytes 8 bits": bitsandbytes_8bit(),
}


def mxfp4_experts(shape: tuple[int, int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random blocks [E, N, K / 32, 16] and scales [E, N, K / 32] of MXFP4."""
    experts, outs, cols = shape
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (experts, outs, cols // 32, 16), dtype=np.uint8)
    scales = generator.integers(118, 128, (experts, outs, cols // 32), dtype=np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy(scales)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Array:
    """Dequantize MXFP4 to [E, N, K], by the OCP MX specification."""
    experts, outs, groups, _ = blocks.shape
    weight = np.empty((experts, outs, groups * 32))
    for index in np.ndindex(weight.shape):
        e, n, k = index
        byte = int(blocks[e, n, k // 32, k % 32 // 2])
        weight[index] = FP4_VALUES[byte >> k % 2 * 4 & 15] * 2.0 ** (
            int(scales[e, n, k // 32]) - 127
        )
    return weight


def write_checkpoint(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], **values: object
) -> None:
    """Write a checkpoint with a `quantization_config`."""
    (path / "config.json").write_text(json.dumps({"quantization_config": config} | values))
    save_file(
        {name: each.clone().contiguous() for name, each in tensors.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )


def quantize_checkpoint(reference: Reference, stored_format: StoredFormat) -> None:
    """Store the projections of a checkpoint in a format, and give its model the dequantized weights."""
    file = reference.path / "model.safetensors"
    state, stored = load_file(file), dict(stored_format.extra)
    for name, tensor in state.items():
        if "_proj" not in name or tensor.dim() < 2:
            stored[name] = tensor
            continue
        prefix = name.removesuffix(".weight")
        encoded = stored_format.encode(prefix, tensor.numpy())
        stored |= encoded
        state[name] = torch.from_numpy(stored_format.decode(prefix, encoded)).float()
    config = json.loads((reference.path / "config.json").read_text())
    write_checkpoint(reference.path, stored_format.config, stored, **config)
    reference.model.load_state_dict(state, strict=False)


def quantize_experts_to_mxfp4(reference: Reference) -> None:
    """Store random experts in a checkpoint of gpt-oss in MXFP4, and give its model the dequantized weights."""
    tensors = load_file(reference.path / "model.safetensors")
    state = reference.model.state_dict()
    projections = [name for name in tensors if "experts" in name and name.endswith("_proj")]
    for seed, name in enumerate(projections):
        num_experts, cols, outs = tensors.pop(name).shape
        blocks, scales = mxfp4_experts((num_experts, outs, cols), seed)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weight = torch.from_numpy(dequantize_mxfp4(blocks, scales)).float()
        state[name].copy_(weight.transpose(1, 2))
    config = json.loads((reference.path / "config.json").read_text())
    write_checkpoint(reference.path, {"quant_method": "mxfp4"}, tensors, **config)
