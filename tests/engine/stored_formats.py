"""Quantized matrices as checkpoints store them, each written by NumPy code that follows its format's specification.

A writer makes the stored tensors of a random matrix from its own codes and scales, and returns the numbers for which
they stand. It shares no code with the product.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.engine.transformers_reference import Reference

Array = Any
Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BNB_FP4_MAGNITUDES = (0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.16666667, 0.25)


@dataclass(frozen=True)
class StoredFormat:
    """A format: its section of config.json, and the writer of a matrix."""

    config: dict[str, Any]
    encode: Callable[[str, NDArray[np.float32]], tuple[Tensors, NDArray[np.float64]]]
    """Function of a name and a matrix that returns the stored tensors, and the numbers for which they stand."""
    is_native: bool = True
    """Whether the kernels compute with the stored integers."""
    tolerance: float = 1e-6
    """Largest error of the native form, relative to the largest weight of the matrix."""
    extra: Tensors = field(default_factory=dict)
    """More tensors of a checkpoint, which are ignored."""


def signed(words: Array) -> torch.Tensor:
    """Make an int32 tensor of unsigned 32-bit words."""
    return torch.from_numpy(np.ascontiguousarray(words.astype(np.uint32)).view(np.int32))


def half(scales: Array) -> torch.Tensor:
    return torch.from_numpy(scales.astype(np.float16))


def pack_rows(codes: Array, bits: int) -> Array:
    """Pack codes [R, C] along the first dimension into words [R * bits / 32, C]."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, -len(codes) % per_word), (0, 0))).astype(np.uint64)
    words = padded.reshape(-1, per_word, codes.shape[1])
    return (words << np.arange(0, 32, bits, dtype=np.uint64)[:, None]).sum(1)


def group_affine(
    weight: Array, group: int, bits: int, *, symmetric: bool
) -> tuple[Array, Array, Array]:
    """Round a weight [N, K] to codes [N, K], with scales, as float16 holds them, and zero points [N, groups]."""
    outs, cols = weight.shape
    top = 2**bits - 1
    groups = weight.reshape(outs, -1, cols if group == -1 else group)
    if symmetric:
        scales = np.abs(groups).max(-1) / (top // 2)
        zeros = np.full(scales.shape, (top + 1) // 2)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / top
        zeros = np.clip(np.round(-low / scales), 1, top)
    scales = scales.astype(np.float16).astype(np.float64)
    codes = np.clip(np.round(groups / scales[..., None] + zeros[..., None]), 0, top)
    return codes.reshape(outs, cols).astype(np.int64), scales, zeros.astype(np.int64)


def affine_values(codes: Array, scales: Array, zeros: Array) -> Array:
    """Return scale * (code - zero point), with scales and zero points of equal groups of columns."""
    size = codes.shape[1] // scales.shape[1]
    return scales.repeat(size, 1) * (codes - zeros.repeat(size, 1))


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    v2: bool = False,
) -> StoredFormat:
    """GPTQ, with groups of the columns in the order of the Hessian's diagonal if `act_order`."""

    def encode(name: str, weight: Array) -> tuple[Tensors, Array]:
        cols = weight.shape[1]
        order = np.random.default_rng(cols).permutation(cols) if act_order else np.arange(cols)
        codes, scales, zeros = group_affine(weight[:, order], group, bits, symmetric=symmetric)
        place = order.argsort()
        groups = place // (cols if group == -1 else group)
        return {
            f"{name}.qweight": signed(pack_rows(codes[:, place].T, bits)),
            f"{name}.qzeros": signed(pack_rows(zeros - (not v2), bits).T),
            f"{name}.scales": half(scales.T),
            f"{name}.g_idx": torch.from_numpy(groups.astype(np.int32)),
        }, affine_values(codes, scales, zeros)[:, place]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
    config |= {"desc_act": act_order, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    return StoredFormat(config, encode)


def awq(group: int = 32) -> StoredFormat:
    """AWQ's gemm layout."""

    def pack(codes: Array) -> torch.Tensor:
        reordered = codes.reshape(len(codes), -1, 8)[..., AWQ_ORDER].reshape(codes.shape)
        return signed(pack_rows(reordered.T, 4).T)

    def encode(name: str, weight: Array) -> tuple[Tensors, Array]:
        codes, scales, zeros = group_affine(weight, group, 4, symmetric=False)
        return {
            f"{name}.qweight": pack(codes.T),
            f"{name}.qzeros": pack(zeros.T),
            f"{name}.scales": half(scales.T),
        }, affine_values(codes, scales, zeros)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return StoredFormat(config | {"zero_point": True}, encode)


def compressed_int(
    bits: int, group: int, *, packed: bool = True, symmetric: bool = True
) -> StoredFormat:
    """compressed-tensors with integers: `pack-quantized` or `int-quantized`."""

    def encode(name: str, weight: Array) -> tuple[Tensors, Array]:
        codes, scales, zeros = group_affine(weight, group, bits, symmetric=symmetric)
        tensors = {f"{name}.weight_scale": half(scales)}
        if packed:
            tensors[f"{name}.weight_packed"] = signed(pack_rows(codes.T, bits).T)
            tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
            if not symmetric:
                tensors[f"{name}.weight_zero_point"] = signed(pack_rows(zeros, bits))
        else:
            middle = 2 ** (bits - 1)
            tensors[f"{name}.weight"] = torch.from_numpy((codes - middle).astype(np.int8))
        return tensors, affine_values(codes, scales, zeros)

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
    return StoredFormat(config, encode, extra=scale)


def fp8(kind: str) -> StoredFormat:
    """FP8 with a scale for each "tensor", "channel" or "block", or as compressed-tensors has it ("compressed")."""
    suffix = "weight_scale_inv" if kind == "block" else "weight_scale"

    def encode(name: str, weight: Array) -> tuple[Tensors, Array]:
        outs, cols = weight.shape
        rows, columns = {"tensor": (outs, cols), "block": (32, 48)}.get(kind, (1, cols))
        padded = np.pad(np.abs(weight), ((0, -outs % rows), (0, -cols % columns)))
        peaks = padded.reshape(-(-outs // rows), rows, -1, columns).max((1, 3))
        scales = (peaks / 448).astype(np.float32)
        spread = scales.repeat(rows, 0).repeat(columns, 1)[:outs, :cols]
        values = torch.from_numpy(weight / spread).to(torch.float8_e4m3fn)
        stored = scales.reshape(1) if kind == "tensor" else scales
        tensors = {f"{name}.weight": values, f"{name}.{suffix}": torch.from_numpy(stored)}
        return tensors, values.double().numpy() * spread

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if kind == "block":
        config["weight_block_size"] = [32, 48]
    if kind == "compressed":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
        config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        config["config_groups"] = {"group_0": {"weights": weights}}
    extra = {"model.layers.0.mlp.down_proj.input_scale": torch.ones(1)}
    return StoredFormat(config, encode, is_native=False, extra=extra)


def bitsandbytes_4bit(kind: str = "nf4", block: int = 64, *, nested: bool = False) -> StoredFormat:
    """Bitsandbytes with 4 bits: `kind` is nf4 or fp4, and scales are quantized too if `nested`."""
    fp4_values = (*BNB_FP4_MAGNITUDES, *(-each for each in BNB_FP4_MAGNITUDES))
    table = np.array(NF4_VALUES if kind == "nf4" else fp4_values, np.float32)

    def encode(name: str, weight: Array) -> tuple[Tensors, Array]:
        blocks = weight.reshape(-1, block)
        scales = np.abs(blocks).max(-1).astype(np.float32)
        codes = np.abs((blocks / scales[:, None])[..., None] - table).argmin(-1)
        pairs = codes.reshape(-1, 2)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        state["shape"] = list(weight.shape)
        tensors = {"": (pairs[:, :1] << 4 | pairs[:, 1:]).astype(np.uint8), ".quant_map": table}
        tensors[".absmax"] = scales
        if nested:
            offset = float(scales.mean())
            nested_table = np.linspace(-1, 1, 256, dtype=np.float32)
            parts = np.pad(scales - offset, (0, -len(scales) % 256)).reshape(-1, 256)
            peaks = np.abs(parts).max(-1) + np.float32(1e-9)
            stored = np.abs((parts / peaks[:, None])[..., None] - nested_table).argmin(-1)
            scales = (nested_table[stored] * peaks[:, None] + offset).flatten()[: len(scales)]
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            tensors[".absmax"] = stored.flatten()[: len(scales)].astype(np.uint8)
            tensors |= {".nested_absmax": peaks, ".nested_quant_map": nested_table}
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        tensors[f".quant_state.bitsandbytes__{kind}"] = text.copy()
        values = (table[codes] * scales[:, None]).reshape(weight.shape)
        return {
            f"{name}.weight{part}": torch.from_numpy(each) for part, each in tensors.items()
        }, values

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return StoredFormat(config, encode, is_native=kind == "nf4", tolerance=0.005)


def bitsandbytes_8bit() -> StoredFormat:
    """LLM.int8: rows of integers with their largest magnitude."""

    def encode(name: str, weight: Array) -> tuple[Tensors, Array]:
        peaks = np.abs(weight).max(1).astype(np.float32)
        values = np.round(weight / peaks[:, None] * 127).astype(np.int8)
        return {
            f"{name}.weight": torch.from_numpy(values),
            f"{name}.SCB": torch.from_numpy(peaks),
            f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
        }, values * peaks[:, None].astype(np.float64) / 127

    return StoredFormat({"quant_method": "bitsandbytes", "load_in_8bit": True}, encode)


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
    "nf4 long blocks": replace(bitsandbytes_4bit(block=256), is_native=False),
    "fp4": bitsandbytes_4bit("fp4"),
    "bitsandbytes 8 bits": bitsandbytes_8bit(),
}


def mxfp4_experts(
    shape: tuple[int, int, int], seed: int
) -> tuple[torch.Tensor, torch.Tensor, Array]:
    """Return random blocks [E, N, K / 32, 16] and scales [E, N, K / 32] of MXFP4, and their values [E, N, K].

    The values are those of the OCP MX specification.
    """
    experts, outs, cols = shape
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (experts, outs, cols // 32, 16), dtype=np.uint8)
    scales = generator.integers(118, 128, (experts, outs, cols // 32), dtype=np.uint8)
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
    magnitudes = np.array(FP4_MAGNITUDES)[codes & 7] * 2.0 ** (scales.astype(int) - 127)[..., None]
    values = np.where(codes & 8, -magnitudes, magnitudes).reshape(shape)
    return torch.from_numpy(blocks), torch.from_numpy(scales), values


def write_checkpoint(
    path: Path, config: dict[str, Any], tensors: Tensors, **values: object
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
        encoded, values = stored_format.encode(name.removesuffix(".weight"), tensor.numpy())
        stored |= encoded
        state[name] = torch.from_numpy(values).float()
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
        blocks, scales, values = mxfp4_experts((num_experts, outs, cols), seed)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name].copy_(torch.from_numpy(values).transpose(1, 2))
    config = json.loads((reference.path / "config.json").read_text())
    write_checkpoint(reference.path, {"quant_method": "mxfp4"}, tensors, **config)
